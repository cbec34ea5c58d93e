"""Which idle sessions are parked: their GPU memory goes to the host's memory, and their shares to others.

`due_for_parking` decides by the rules of the resource group. The caller parks them one after the other and asks again
after each, because one parked session may be enough for the sessions that wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.model import Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.reclaim import AllRules
from fgpu_scheduler.core.returning import parked_mib
from fgpu_scheduler.core.shares import accepts_model
from fgpu_scheduler.core.units import memory_words

#: The wait reasons of sessions that other shares could start.
WAITS_FOR_SHARES = (WaitReason.RESOURCES, WaitReason.RESERVED, WaitReason.PRIORITY)


def due_for_parking(
    snapshot: Snapshot, rules: AllRules, *, held_mib: Mapping[int, int], host_mib: Mapping[str, int]
) -> tuple[Session, ...]:
    """Return the sessions to park now, the one that has been idle for longest first.

    ``held_mib`` is the GPU memory that each session holds, by its id; a session without an entry is left out.
    ``host_mib`` is the host memory that each node has for parked sessions, by its id: those returned fit there together.
    """
    used, found = parked_mib(snapshot), []
    for session in _idle_long_enough(snapshot, rules):
        where, mib = session.placement, held_mib.get(session.id)
        assert where is not None
        if mib is not None and used.get(where.node_id, 0) + mib <= host_mib.get(where.node_id, 0):
            used[where.node_id] = used.get(where.node_id, 0) + mib
            found.append(session)
    return tuple(found)


def no_room_to_park(
    snapshot: Snapshot, rules: AllRules, *, held_mib: Mapping[int, int], host_mib: Mapping[str, int]
) -> Mapping[int, str]:
    """Return, by id, why sessions that are idle for long enough do not fit into the host memory of their node."""
    due = {s.id for s in due_for_parking(snapshot, rules, held_mib=held_mib, host_mib=host_mib)}
    used, found = parked_mib(snapshot), {}
    for session in _idle_long_enough(snapshot, rules):
        if session.id not in due and session.id in held_mib and session.placement is not None:
            node_id = session.placement.node_id
            whole_mib = host_mib.get(node_id, 0)
            left_mib = max(0, whole_mib - used.get(node_id, 0))
            found[session.id] = (
                f"it is not parked: it holds {memory_words(held_mib[session.id])} of GPU memory, and {node_id} has "
                f"{memory_words(left_mib)} left of the {memory_words(whole_mib)} for parked sessions"
            )
    return found


def _idle_long_enough(snapshot: Snapshot, rules: AllRules) -> list[Session]:
    """Return the running sessions that the rules park now, the one that has been idle for longest first."""
    now_s, found = snapshot.now_s, []
    for session in snapshot.sessions:
        own, since_s = rules.of(session.request.resource_group), session.idle_since_s
        if session.state is not SessionState.RUNNING or own.park_after_s is None or since_s is None:
            continue
        kept = session.kept_until_s is not None and now_s < session.kept_until_s
        if (
            now_s < since_s + own.park_after_s
            or kept
            or not session.placement
            or not session.placement.shares
        ):
            continue
        if own.park_always or _could_help(session, snapshot):
            found.append((since_s, session.id, session))
    return [session for _, _, session in sorted(found)]


def _could_help(session: Session, snapshot: Snapshot) -> bool:
    """Return whether another session waits for a share that this one holds."""
    assert session.placement is not None
    uuids = {share.device_uuid for share in session.placement.shares}
    group = session.request.resource_group
    for other in filter(lifecycle.claims_shares, snapshot.sessions):
        if other.placement and any(share.device_uuid in uuids for share in other.placement.shares):
            return True
    models = [d.model for node in snapshot.nodes for d in node.devices if d.uuid in uuids]
    return any(
        other.wait_reason in WAITS_FOR_SHARES
        and not other.request.on_demand
        and not other.held
        and all(accepts_model(other.request, model) for model in models)
        for other in snapshot.index.waiting.get(group, {}).values()
    )
