"""Which parked sessions get their shares back, and where sessions on demand are placed.

A parked session has its GPUs in its container, so it gets its shares back on the same ones. While it wants them,
`claims_shares` keeps them free for it, so that nothing new starts in its place. Of the sessions that want shares of one
GPU, the one that has waited longest comes first.

A session on demand needs CPU and memory when it starts, and a GPU later. So it is placed past the queue: on GPUs that
could give it its shares now, and of these on the ones of which other sessions have least, parked ones included. Several
whole GPUs of a node are those of which others have least, and of equal ones those that are free now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fgpu_scheduler.core import lifecycle, placement
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    Change,
    Node,
    NodeState,
    Placement,
    Session,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.placement import NodeFree, without_machine
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.shares import per_preferred_model, shares_of
from fgpu_scheduler.errors import StaleVersion


@dataclass(frozen=True, slots=True)
class ReturnDecision:
    """The decision about a parked session that wants its shares back: it gets them, or ``waits`` says why not."""

    session_id: int
    waits: WaitReason | None


def returns(snapshot: Snapshot) -> tuple[ReturnDecision, ...]:
    """Return a decision for every parked session that wants its shares back, the one that has waited longest first."""
    wanted = sorted(
        filter(lifecycle.wants_shares, snapshot.sessions), key=lambda s: (s.wanted_at_s or 0, s.id)
    )
    if not wanted:
        return ()
    homes = _Homes(snapshot)
    blocked: set[str] = set()
    found = []
    for session in wanted:
        uuids = session.device_uuids
        waits = homes.why_not(session)
        if waits is None and not blocked.isdisjoint(uuids):
            waits = WaitReason.RESOURCES
        if waits is None:
            homes.take(session)
        elif waits is WaitReason.RESOURCES:
            blocked.update(uuids)
        found.append(ReturnDecision(session.id, waits))
    return tuple(found)


def returned(snapshot: Snapshot, decisions: Sequence[ReturnDecision]) -> list[Change]:
    """Return each session that these decisions change, before and after the change.

    Raises:
        StaleVersion: a decision does not hold.
    """
    if not decisions:
        return []
    homes, changes = _Homes(snapshot), list[Change]()
    sessions = {s.id: s for s in snapshot.sessions if s.wanted_at_s is not None}
    for decision in decisions:
        session = sessions.get(decision.session_id)
        if session is None or not lifecycle.wants_shares(session):
            raise StaleVersion(f"session {decision.session_id} does not want its shares back")
        if decision.waits is None:
            if (why := homes.why_not(session)) is not None:
                raise StaleVersion(f"session {session.id} cannot have its shares back now ({why})")
            homes.take(session)
            changes.append((session, lifecycle.moved(session, SessionState.RESUMING, now_s=snapshot.now_s)))
        elif session.wait_reason is not decision.waits:
            changes.append((session, replace(session, wait_reason=decision.waits)))
    return changes


class _Homes:
    """The free amounts of the GPUs to which parked sessions return, and the quotas, without any claims."""

    def __init__(self, snapshot: Snapshot) -> None:
        claims = [s for s in snapshot.sessions if lifecycle.claims_shares(s)]
        self._now_s = snapshot.now_s
        self._nodes = {node.id: node for node in snapshot.nodes}
        self._held = snapshot.changed([(s, replace(s, wait_reason=WaitReason.QUOTA)) for s in claims])
        self._ledger = Ledger(self._held)
        self._free: dict[str, NodeFree] = {}

    def why_not(self, session: Session) -> WaitReason | None:
        """Return why a session cannot have its shares back now, or None."""
        where, node = session.placement, self._node(session)
        assert where is not None
        if not self._ledger.allows(self._resuming(session)):
            return WaitReason.QUOTA
        if node is None or node.state not in (NodeState.READY, NodeState.CORDONED):
            return WaitReason.RESOURCES
        left = self._left(node)
        fits = placement.claimed_shares(left, without_machine(session.request), where)
        return WaitReason.RESOURCES if fits is None else None

    def take(self, session: Session) -> None:
        """Count a session as holding its shares again."""
        where, node = session.placement, self._node(session)
        assert where is not None
        assert node is not None
        self._free[node.id] = placement.claimed(self._left(node), without_machine(session.request), where)
        self._ledger.take(self._resuming(session))

    def _node(self, session: Session) -> Node | None:
        return None if session.placement is None else self._nodes.get(session.placement.node_id)

    def _resuming(self, session: Session) -> Session:
        return lifecycle.moved(session, SessionState.RESUMING, now_s=self._now_s)

    def _left(self, node: Node) -> NodeFree:
        if node.id not in self._free:
            # A cordoned GPU keeps its sessions, and the parked ones are among them. They have their CPU and memory, even
            # where the node became smaller.
            left = placement.free_on_node(node.opened(), self._held.index.on_node.get(node.id, {}))
            self._free[node.id] = replace(left, cpu_milli=0, memory_mib=0)
        return self._free[node.id]


def placed_on_demand(snapshot: Snapshot, ledger: Ledger) -> list[tuple[Session, Placement | WaitReason]]:
    """Return where each waiting session on demand is placed, or why it waits: by priority, then by position.

    The placed ones are counted in ``ledger``.
    """
    waiting = [s for queue in snapshot.index.waiting.values() for s in queue.values() if s.request.on_demand]
    waiting.sort(key=lambda s: (-s.request.priority, s.place, s.id))
    bound, taken = Counter[str](), Counter[str]()
    for other in snapshot.sessions if waiting else ():
        if other.state in HOLDING:
            bound.update(_milli(other.placement))
            taken.update(_milli(lifecycle.taken_placement(other)))
    #: The nodes with their free CPU and memory, as if all their GPUs were free.
    nodes: dict[str, NodeFree] = {}
    if waiting:
        for left in placement.free(snapshot):
            nodes[left.node.id] = replace(left, devices=placement.untouched(left.node).devices)
    found: list[tuple[Session, Placement | WaitReason]] = []
    for session in waiting:
        request, refused = session.request, {n.node_id for n in session.refusing_nodes(snapshot.now_s)}
        if session.held or not ledger.allows(session):
            found.append((session, WaitReason.HELD if session.held else WaitReason.QUOTA))
            continue
        offers = []
        for left in nodes.values():
            # Several whole GPUs are the first ones.
            devices = sorted(left.devices, key=lambda d: (bound[d.device.uuid], taken[d.device.uuid]))
            ordered = replace(left, devices=tuple(devices))
            for preference, asked in enumerate(per_preferred_model(request)):
                for chosen, each in placement.feasible_device_sets(ordered, asked, {}):
                    own = {devices[at].device.uuid: devices[at].device for at in chosen}
                    # A session stays on its GPUs, and a busy one may be busy for days.
                    busy = sum(taken[uuid] + each > device.capacity_milli for uuid, device in own.items())
                    used = sum(bound[uuid] for uuid in own)
                    if left.node.id not in refused:
                        offers.append((busy, used, preference, left.node.id, sorted(own)))
        if not offers:
            found.append((session, WaitReason.CLUSTER if refused else WaitReason.RESOURCES))
            continue
        *_, node_id, uuids = min(offers)
        there = {free.device.uuid: free.device for free in nodes[node_id].devices}
        shares = shares_of(request, [there[uuid] for uuid in uuids])
        assert shares is not None
        where = Placement(node_id, shares)
        nodes[node_id] = placement.claimed(nodes[node_id], request, Placement(node_id, ()))
        ledger.take(session)
        bound.update(_milli(where))
        found.append((session, where))
    return found


def _milli(where: Placement | None) -> dict[str, int]:
    return {share.device_uuid: share.fgpu_milli for share in where.shares} if where is not None else {}


def parked_mib(snapshot: Snapshot) -> dict[str, int]:
    """Return, by node, the host memory in MiB that has the GPU memory of parked sessions, until they end or run."""
    found: dict[str, int] = {}
    for session in snapshot.sessions:
        if session.placement is not None and session.parked_mib:
            node_id = session.placement.node_id
            found[node_id] = found.get(node_id, 0) + session.parked_mib
    return found
