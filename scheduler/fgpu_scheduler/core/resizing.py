"""Whether a running session may get another amount of its GPU, and what it is then. Pure.

It can grow by what is free on its own GPU now, within its user's quotas, and never by what is reserved for a waiting
session.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.lifecycle import with_size
from fgpu_scheduler.core.model import (
    Device,
    Node,
    NodeState,
    Placement,
    Session,
    SessionState,
    Share,
    Snapshot,
)
from fgpu_scheduler.core.planner import Reservation, WaitDecision, delays_start, plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.shares import is_explicit, shares_of, size_until


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of a GPU: the fields are those of a `Request`."""

    fgpu_milli: int
    gpu_memory_mib: int | None = None
    compute_percent: int | None = None

    @classmethod
    def of(cls, session: Session) -> Amount:
        """Return the present amount of a session."""
        asked = session.request
        return cls(asked.fgpu_milli, asked.gpu_memory_mib, asked.compute_percent)

    @classmethod
    def before(cls, session: Session) -> Amount | None:
        """Return the amount before the last resize, or None if it was never resized."""
        # While it was parked it held nothing.
        size, asked = next((s for s in reversed(session.sizes) if s.fgpu_milli), None), session.request
        if size is None:
            return None
        if not is_explicit(asked):
            return cls(size.fgpu_milli)
        return cls(0, size.memory_mib, None if asked.compute_percent is None else size.compute_percent)


class NotResized(StrEnum):
    """Why a session is not resized."""

    NOT_RUNNING = "NOT_RUNNING"
    NO_GPU = "NO_GPU"
    SEVERAL_GPUS = "SEVERAL_GPUS"
    WHOLE_GPU = "WHOLE_GPU"
    GPU_GONE = "GPU_GONE"
    OTHER_KIND = "OTHER_KIND"
    IMPOSSIBLE = "IMPOSSIBLE"
    BOTH_WAYS = "BOTH_WAYS"
    CORDONED = "CORDONED"
    NO_ROOM = "NO_ROOM"
    QUOTA = "QUOTA"
    PROMISED = "PROMISED"


def resized(world: Snapshot, session: Session, amount: Amount) -> Session | NotResized:
    """Return the session with another amount, or why that is not possible. Waiting sessions are not considered.

    What it grows by must be free on its GPU and within its user's quotas.
    """
    against = why_not_resizable(world, session)
    if against is not None:
        return against
    node, device = _where(world, session)
    assert node is not None
    assert device is not None
    where = session.placement
    assert where is not None
    (had,) = where.shares
    asked = replace(
        session.request,
        fgpu_milli=amount.fgpu_milli,
        gpu_memory_mib=amount.gpu_memory_mib,
        compute_percent=amount.compute_percent,
    )
    # Without its model preferences: it has its GPU.
    shares = shares_of(replace(asked, gpu_models=()), (device,))
    if is_explicit(asked) is not is_explicit(session.request):
        return NotResized.OTHER_KIND
    if not shares:
        return NotResized.IMPOSSIBLE
    (share,) = shares
    if share.mode is not had.mode:
        return NotResized.OTHER_KIND
    if share == had:
        return replace(session, request=asked)
    new = replace(
        session,
        request=asked,
        placement=Placement(where.node_id, shares),
        sizes=with_size(session, size_until(world.now_s, shares=where.shares, devices=(device,))),
    )
    if grows(had, share) and grows(share, had):
        return NotResized.BOTH_WAYS
    if grows(had, share):
        return _not_grown(world, node, new, share.fgpu_milli - had.fgpu_milli) or new
    return new


def why_not_resizable(world: Snapshot, session: Session) -> NotResized | None:
    """Return why a session cannot be resized at all, or None."""
    where = session.placement
    if session.state is not SessionState.RUNNING or where is None:
        return NotResized.NOT_RUNNING
    if not where.shares:
        return NotResized.NO_GPU
    if len(where.shares) > 1:
        return NotResized.SEVERAL_GPUS
    _, device = _where(world, session)
    if device is None:
        return NotResized.GPU_GONE
    # libfgpu does not limit the compute of a whole GPU, and cannot begin to while the session runs.
    return NotResized.WHOLE_GPU if where.shares[0].memory_mib >= device.memory_mib else None


def grows(had: Share, share: Share) -> bool:
    """Return whether a share is more than another in anything."""
    return (
        share.fgpu_milli > had.fgpu_milli
        or share.memory_mib > had.memory_mib
        or share.compute_percent > had.compute_percent
    )


def available_to(world: Snapshot, session: Session) -> placement.DeviceFree | None:
    """Return the free amounts of a session's GPU without the session itself; None if the GPU is gone."""
    node, device = _where(world, session)
    if node is None or device is None:
        return None
    left = _beside(world, node, session)
    return next((d for d in left.devices if d.device.uuid == device.uuid), None)


def harms_pending(world: Snapshot, session: Session, policy: Policy) -> bool:
    """Return whether a waiting session would not start now, or start later, if ``session`` were as given.

    Only sessions that start now or have a reservation are compared.
    """
    group = session.request.resource_group
    own = world.of_group(group)
    if not own.index.waiting.get(group):
        return False
    before = plan(own, policy)
    if policy.of(group).strict and any(isinstance(d, WaitDecision) for d in before.decisions):
        return True
    grown = own.with_sessions(session if s.id == session.id else s for s in own.sessions)
    # Where a start is not known, no other session gets a part of the reserved place.
    reserves = [d for d in before.decisions if isinstance(d, Reservation) and d.until_s is None]
    reserved = {share.device_uuid for d in reserves for share in d.placement.shares}
    if not reserved.isdisjoint(session.device_uuids):
        return True
    return delays_start(before, plan(grown, policy), own.now_s)


def _where(world: Snapshot, session: Session) -> tuple[Node | None, Device | None]:
    where = session.placement
    node = next((n for n in world.nodes if where is not None and n.id == where.node_id), None)
    own = session.device_uuids
    return node, next((d for d in (node.devices if node else ()) if d.uuid in own), None)


def _beside(world: Snapshot, node: Node, session: Session) -> placement.NodeFree:
    there = {i: s for i, s in world.index.on_node.get(node.id, {}).items() if i != session.id}
    return placement.free_on_node(node, there)


def _not_grown(world: Snapshot, node: Node, new: Session, more_milli: int) -> NotResized | None:
    where = new.placement
    assert where is not None
    (share,) = where.shares
    device = next(d for d in node.devices if d.uuid == share.device_uuid)
    if node.state is not NodeState.READY or device.cordoned:
        return NotResized.CORDONED
    # CPU and memory do not change, even if the node was made smaller than what it holds.
    left = replace(
        _beside(world, node, new), cpu_milli=new.request.cpu_milli, memory_mib=new.request.memory_mib
    )
    if placement.claimed_shares(left, new.request, where) is None:
        return NotResized.NO_ROOM
    room = Ledger(world).left(new.request).fgpu_milli
    return NotResized.QUOTA if room is not None and more_milli > room else None
