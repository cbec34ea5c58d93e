"""Which devices a session really has, where its cluster chooses them: the record follows what the cluster did. Pure.

What is placed and not yet chosen for is a proposal: it makes way. What is chosen for stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.lifecycle import HOLDING, LAUNCHING
from fgpu_scheduler.core.model import Device, Node, Placement, Session, SessionState, Share, Snapshot

PROPOSED = (SessionState.SCHEDULED, *LAUNCHING)
"""The states in which the cluster may not have chosen yet."""
BOUNDLESS = 2**62


def settled(
    world: Snapshot, session: Session, device_uuids: Sequence[str], *, known: Collection[int] = ()
) -> tuple[Session, ...] | None:
    """Return the sessions that change if this one holds its shares of these devices, itself first; empty if none does.

    It stays on its node, and so do those that make way for it: sessions of the node that are being launched, but for
    the ``known`` ones, whose devices are those that they have. Every share keeps its amount. None: these are no devices
    of its node that are like those that it had, or there is no room for all.
    """
    where = session.placement
    node = next((n.opened() for n in world.nodes if where is not None and n.id == where.node_id), None)
    if where is None or node is None or len(device_uuids) != len(where.shares):
        return None
    if [share.device_uuid for share in where.shares] == list(device_uuids):
        return ()
    wanted = _on(node, where, device_uuids)
    if wanted is None:
        return None
    others = [s for s in _holding(world, node) if s.id != session.id]
    loose = [s for s in others if s.state in PROPOSED and s.id not in known]
    firm = [s for s in others if s not in loose]
    # Neither CPU nor memory of the node moves with them.
    room = replace(node, cpu_milli=BOUNDLESS, memory_mib=BOUNDLESS)
    (left,) = placement.free(replace(world, nodes=(room,), sessions=tuple(firm)))
    found = fitted(left, session, wanted)
    if found is None:
        return None
    changed = [replace(session, placement=wanted)]
    move: list[Session] = []
    for other in loose:
        assert other.placement is not None
        stays = fitted(found, other, other.placement)
        found = found if stays is None else stays
        if stays is None:
            move.append(other)
    for other in move:
        elsewhere = _elsewhere(found, other)
        after = None if elsewhere is None else fitted(found, other, elsewhere)
        if after is None:
            return None
        found = after
        changed.append(replace(other, placement=elsewhere))
    return tuple(changed)


def _holding(world: Snapshot, node: Node) -> Iterable[Session]:
    return (
        s
        for s in world.sessions
        if s.placement is not None and s.placement.node_id == node.id and s.state in HOLDING
    )


def _on(node: Node, where: Placement, device_uuids: Sequence[str]) -> Placement | None:
    """Return a placement with the same amounts of other devices, None where these are not like the ones that it has."""
    by_uuid = {device.uuid: device for device in node.devices}
    pairs = [(share, by_uuid.get(uuid)) for share, uuid in zip(where.shares, device_uuids, strict=True)]
    if len(set(device_uuids)) < len(device_uuids):
        return None
    if any(to is None or not _alike(by_uuid.get(share.device_uuid), to) for share, to in pairs):
        return None
    return Placement(where.node_id, tuple(replace(s, device_uuid=to.uuid) for s, to in pairs if to))


def _alike(had: Device | None, to: Device) -> bool:
    """Return whether a share of one is worth the same of the other. What is there no more was like any."""
    return had is None or (had.model, had.memory_mib, had.capacity_milli) == (
        to.model,
        to.memory_mib,
        to.capacity_milli,
    )


def fitted(left: placement.NodeFree, session: Session, where: Placement) -> placement.NodeFree | None:
    """Return what is left of a node when a session has this, None where it does not fit."""
    own = {share.device_uuid: share.mode for share in where.shares}
    had = [d for d in left.devices if d.device.uuid in own]
    if len(had) < len(own) or any(d.mode not in (None, own[d.device.uuid]) for d in had):
        return None
    after = placement.claimed(left, session.request, where)
    if after.cpu_milli < 0 or after.memory_mib < 0:
        return None
    fits = all(
        min(d.fgpu_milli, d.memory_mib, d.compute_percent, d.shares) >= 0
        for d in after.devices
        if d.device.uuid in own
    )
    return after if fits else None


def _elsewhere(left: placement.NodeFree, session: Session) -> Placement | None:
    """Return the first devices of a node, by their index, on which all shares of a session fit."""
    where = session.placement
    assert where is not None
    by_uuid = {d.device.uuid: d.device for d in left.devices}
    shares: list[Share] = []
    for share in where.shares:
        taken = {one.device_uuid for one in shares}
        for device in sorted(by_uuid.values(), key=lambda d: (d.index, d.uuid)):
            to = replace(share, device_uuid=device.uuid)
            if device.uuid in taken or not _alike(by_uuid.get(share.device_uuid), device):
                continue
            if fitted(left, session, Placement(where.node_id, (to,))) is not None:
                shares.append(to)
                break
        else:
            return None
    return Placement(where.node_id, tuple(shares))
