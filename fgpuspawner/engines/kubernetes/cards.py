"""Which card of its node a session has, where the cluster chooses that and tells who shares one. Pure.

Such a cluster does not say which card that is. So the cards of a node have names of ours, and what is true of them is who
shares one: that alone decides what fits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fgpu_scheduler import HOLDING, Session, SessionState, Snapshot


def known_on(world: Snapshot, node_id: str, noted: Collection[int]) -> tuple[Session, ...]:
    """Return the sessions of a node whose cards are those that they have: noted in this launch, or before they ran."""
    return tuple(
        s
        for s in world.sessions
        if s.placement is not None
        and s.placement.node_id == node_id
        and s.placement.shares
        and s.state in HOLDING
        and (s.state is SessionState.RUNNING or s.started_at_s is not None or s.id in noted)
    )


def card_for(
    said: str, session: Session, cards: Sequence[str], known: Sequence[Session], said_of: Mapping[int, str]
) -> str | None:
    """Return our name of the card that the cluster calls ``said``, for a session that has a part of it.

    ``cards`` are the node's; ``said_of`` is what the cluster calls the cards of ``known`` sessions. It is the card of
    those that share it, else one that none of them has, the session's own first. None: there is none.
    """
    taken: set[str] = set()
    for other in known:
        if other.id == session.id or other.placement is None:
            continue
        own = [share.device_uuid for share in other.placement.shares]
        if said_of.get(other.id) == said:
            return own[0]
        taken.update(own)
    assert session.placement is not None
    first = [share.device_uuid for share in session.placement.shares]
    return next((card for card in (*first, *cards) if card not in taken and card in cards), None)
