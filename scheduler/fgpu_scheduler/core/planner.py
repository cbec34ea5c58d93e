"""Decide for every waiting session: place it now, reserve a place for it, or leave it waiting with a reason.

`plan` works on one snapshot. Parked sessions get their shares back first, and sessions on demand are placed next
(`returning`). Then it works on each resource group in turn:

1. Bring the group's free capacity to the snapshot (`PlanCache.free_capacity`). Only nodes that changed since the last
   plan are counted again, since a plan is made after every event.
2. Sort the waiting sessions by the group's policy (`GroupScheduler.in_order`).
3. Put sessions with identical requests together (`PendingQueue`): when the first of them does not fit, the others cannot.
4. Start what fits, and reserve a place for the first session that does not (`GroupScheduler.fill` has the steps).
5. Give each session its decision. A reserved start is promised only while no session of higher priority waits, since
   that session could take the place.

Quotas span resource groups, so all groups share one `Ledger`.

Before a store writes a plan, `committed` checks it again with the planner's own rules for fit and quotas. Every kind of
store uses this one check.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fgpu_scheduler.core import lifecycle, orders, placement, returning
from fgpu_scheduler.core.free_capacity import PlanCache as PlanCache
from fgpu_scheduler.core.group_scheduler import GroupScheduler
from fgpu_scheduler.core.model import Placement, Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.pending_queue import PendingQueue
from fgpu_scheduler.core.policies import GroupPolicy as GroupPolicy
from fgpu_scheduler.core.policies import Policy as Policy
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.reservations import Reservation as Reservation
from fgpu_scheduler.core.returning import ReturnDecision
from fgpu_scheduler.errors import StaleVersion


@dataclass(frozen=True, slots=True)
class StartDecision:
    """The decision to start a session on the shares of ``placement``."""

    session_id: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class WaitDecision:
    """The decision to leave a session PENDING, and why."""

    session_id: int
    reason: WaitReason


#: A `Reservation` leaves a session PENDING, and keeps its place from the sessions behind it. ``until_s`` is the latest
#: start that can be promised: None where a session of higher priority waits, too.
Decision = StartDecision | Reservation | WaitDecision


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for the snapshot of ``version``: first about sessions on demand, then by resource group name and in
    queue order. ``returns`` are those about parked sessions that want their shares back, which come before all others.
    """

    version: int
    decisions: tuple[Decision, ...]
    returns: tuple[ReturnDecision, ...] = ()

    @property
    def placed(self) -> tuple[StartDecision, ...]:
        """The decisions that start a session."""
        return tuple(d for d in self.decisions if isinstance(d, StartDecision))


def plan(snapshot: Snapshot, policy: Policy, cache: PlanCache | None = None) -> Plan:
    """Return a decision for every waiting session, by the order and the backfill of its resource group's policy.

    A held session keeps its queue position and is not started. A session over a quota waits and does not block the
    sessions behind it. Sessions with identical requests start in queue order. A ``cache`` of earlier plans makes the plan
    faster and does not change it.
    """
    decisions: list[Decision] = []
    returns: tuple[ReturnDecision, ...] = ()
    special = [s for s in snapshot.sessions if s.wanted_at_s is not None or s.request.on_demand]
    if any(map(lifecycle.wants_shares, special)):
        returns = returning.returns(snapshot)
        snapshot = snapshot.changed(returning.returned(snapshot, returns))
    cache, ledger = cache or PlanCache(), Ledger(snapshot)
    if any(s.state is SessionState.PENDING for s in special):
        for one, at in returning.placed_on_demand(snapshot, ledger):
            decisions.append(
                StartDecision(one.id, at) if isinstance(at, Placement) else WaitDecision(one.id, at)
            )
        snapshot = applied(snapshot, Plan(snapshot.version, tuple(decisions)))
    for group, queue in orders.queue_snapshots(snapshot, policy.accounts).items():
        group_policy = policy.of(group)
        with cache.free_capacity(snapshot, group) as capacity:
            scheduler = GroupScheduler(snapshot, capacity, group_policy, ledger)
            decisions += _decided(queue, scheduler, by_user=bool(snapshot.quotas))
    return Plan(snapshot.version, tuple(decisions), returns)


def _decided(queue: orders.QueueSnapshot, scheduler: GroupScheduler, *, by_user: bool) -> list[Decision]:
    """Return the decisions for one resource group, in the order of its queue."""
    pending = PendingQueue(scheduler.in_order(queue), by_user=by_user)
    chosen: dict[int, Decision] = {
        session.id: StartDecision(session.id, where) for session, where in scheduler.fill(pending)
    }
    reserved = scheduler.reservation
    if reserved is not None:
        promised = scheduler.promises(reserved.session_id, pending, chosen)
        chosen[reserved.session_id] = reserved if promised else replace(reserved, until_s=None)
    # In a long queue almost every session waits: this loop is most of the work of a pass.
    return [
        chosen[s.id]
        if s.id in chosen
        else WaitDecision(s.id, WaitReason.HELD if same is None else same.reason)
        for s, same in zip(pending.sessions, pending.set_of, strict=True)
    ]


def delays_start(before: Plan, after: Plan, now_s: int) -> bool:
    """Return whether a session that a plan starts, or promises a start, starts later by another plan."""

    def starts_at_s(own: Plan) -> dict[int, int]:
        promised = {d.session_id: d.until_s for d in own.decisions if isinstance(d, Reservation)}
        known = {number: at_s for number, at_s in promised.items() if at_s is not None}
        return {**known, **dict.fromkeys((d.session_id for d in own.placed), now_s)}

    then = starts_at_s(after)
    return any(then.get(number, at_s + 1) > at_s for number, at_s in starts_at_s(before).items())


def with_returns(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """Return the snapshot with the parked sessions that a plan gives their shares as RESUMING."""
    return snapshot.changed(returning.returned(snapshot, plan.returns)) if plan.returns else snapshot


def applied(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """Return the snapshot with the sessions that a plan starts as SCHEDULED, and those that return as RESUMING."""
    snapshot = with_returns(snapshot, plan)
    placements = {p.session_id: p.placement for p in plan.placed}
    if not placements:
        return snapshot
    return snapshot.changed(
        [
            (s, _scheduled(s, placements[s.id], now_s=snapshot.now_s))
            for s in snapshot.sessions
            if s.id in placements
        ]
    )


def committed(plan: Plan, world: Snapshot, *, now_s: int) -> tuple[tuple[Session, Session], ...]:
    """Return each session that the plan changes, before and after the change, in the plan's order.

    The store has checked that the plan was made on the version of ``world``.

    Raises:
        StaleVersion: a decision does not hold.
    """
    waiting = {number: s for queue in world.index.waiting.values() for number, s in queue.items()}
    changes = [
        (old, new)
        for old, new in returning.returned(replace(world, now_s=now_s), plan.returns)
        if old is not None and new is not None
    ]
    world = world.changed(changes) if changes else world
    free, ledger = _free_capacity_for(plan, world), Ledger(world)
    for decision in plan.decisions:
        session = waiting.pop(decision.session_id, None)
        if session is None:
            raise StaleVersion(f"session {decision.session_id} does not wait")
        if isinstance(decision, StartDecision):
            new = _started(session, decision.placement, free, ledger, now_s=now_s)
        else:
            promised_at_s = session.promised_at_s
            if promised_at_s is None and isinstance(decision, Reservation):
                # The scheduler is judged by the first promise, so a later one does not replace it.
                promised_at_s = decision.until_s
            if (session.wait_reason, session.promised_at_s) == (decision.reason, promised_at_s):
                continue
            new = replace(session, wait_reason=decision.reason, promised_at_s=promised_at_s)
        changes.append((session, new))
    return tuple(changes)


def _started(
    session: Session, where: Placement, free: dict[str, placement.NodeFree], ledger: Ledger, *, now_s: int
) -> Session:
    node = free.get(where.node_id)
    rest = None if node is None or session.held else placement.claimed_if_fits(node, session.request, where)
    if rest is None:
        raise StaleVersion(f"session {session.id} does not fit where it was placed")
    if not ledger.allows(session, where):
        raise StaleVersion(f"session {session.id} was placed over a quota")
    free[where.node_id] = rest
    ledger.take(session, where)
    return _scheduled(session, where, now_s=now_s)


def _scheduled(session: Session, where: Placement, *, now_s: int) -> Session:
    return replace(lifecycle.moved(session, SessionState.SCHEDULED, now_s=now_s), placement=where)


def _free_capacity_for(plan: Plan, world: Snapshot) -> dict[str, placement.NodeFree]:
    """Return the free capacity of the nodes and devices on which the plan places; missing nodes are left out."""
    uuids = {share.device_uuid for place in plan.placed for share in place.placement.shares}
    node_ids = {place.placement.node_id for place in plan.placed}
    free = {}
    for node in world.nodes:
        if node.id in node_ids:
            # Only the devices that the plan uses: counting the rest of a large node costs time and changes nothing.
            used = replace(node, devices=tuple(device for device in node.devices if device.uuid in uuids))
            free[node.id] = placement.free_on_node(used, world.index.on_node.get(node.id, {}))
    return free
