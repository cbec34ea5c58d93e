"""Decide for every waiting session: place it now, reserve a place for it, or leave it waiting with a reason.

`plan` works on one snapshot, and on each resource group in turn:

1. Bring the group's free capacity to the snapshot (`PlanCache.ground`). Only nodes that changed since the last plan are
   counted again, since a plan is made after every event.
2. Sort the waiting sessions by the group's policy (`GroupScheduler.in_order`).
3. Put sessions with identical requests together (`PendingQueue`): when the first of them does not fit, the others cannot.
4. Start what fits, and reserve a place for the first session that does not (`GroupScheduler.fill` has the steps).
5. Give each session its decision. A reserved start is promised only while no session of higher priority waits, since
   that session could take the place.

Quotas span resource groups, so all groups share one `Ledger`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fgpu_scheduler.core import orders
from fgpu_scheduler.core.free_capacity import PlanCache as PlanCache
from fgpu_scheduler.core.group_scheduler import GroupScheduler
from fgpu_scheduler.core.model import Placement, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.pending_queue import PendingQueue
from fgpu_scheduler.core.policies import GroupPolicy as GroupPolicy
from fgpu_scheduler.core.policies import Policy as Policy
from fgpu_scheduler.core.quota import Ledger


@dataclass(frozen=True, slots=True)
class StartDecision:
    """The decision to start a session on these shares."""

    session_id: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class ReserveDecision:
    """The decision to leave a session PENDING and to reserve a place for it from the sessions behind it.

    ``starts_at_s`` is the latest start that can be promised. It is None where the sessions in its place have no known
    end, where a session of higher priority waits too, or where the policy promises nothing. ``device_uuids`` are the
    devices that the session would get.
    """

    session_id: int
    starts_at_s: int | None
    node_id: str
    device_uuids: tuple[str, ...]

    @property
    def reason(self) -> WaitReason:
        """Why the session waits, as in `WaitDecision`."""
        return WaitReason.RESERVED


@dataclass(frozen=True, slots=True)
class WaitDecision:
    """The decision to leave a session PENDING, and why."""

    session_id: int
    reason: WaitReason


Decision = StartDecision | ReserveDecision | WaitDecision


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for the snapshot of ``version``, by resource group name and then in queue order."""

    version: int
    decisions: tuple[Decision, ...]

    @property
    def placed(self) -> tuple[StartDecision, ...]:
        """The decisions that start a session."""
        return tuple(d for d in self.decisions if isinstance(d, StartDecision))


def plan(snapshot: Snapshot, policy: Policy, memory: PlanCache | None = None) -> Plan:
    """Return a decision for every waiting session, by the order and the backfill of its resource group's policy.

    A held session keeps its place in the queue and is not started. A session over a quota waits and does not block the
    sessions behind it. Sessions with identical requests start in queue order. ``memory`` from earlier plans makes the
    plan faster; it does not change it.
    """
    decisions: list[Decision] = []
    memory, ledger = memory or PlanCache(), Ledger(snapshot)
    for group, line in orders.queue_snapshots(snapshot).items():
        own = policy.of(group)
        with memory.ground(snapshot, group, own.placing) as ground:
            floor = GroupScheduler(snapshot, ground, own, ledger)
            decisions += _decided(line, floor, by_user=bool(snapshot.quotas))
    return Plan(snapshot.version, tuple(decisions))


def _decided(line: orders.QueueSnapshot, floor: GroupScheduler, *, by_user: bool) -> list[Decision]:
    """Return the decisions for one resource group, in the order of its queue."""
    queue = PendingQueue(floor.in_order(line), by_user=by_user)
    special: dict[int, Decision] = {
        session.id: StartDecision(session.id, where) for session, where in floor.fill(queue)
    }
    kept = floor.kept
    if kept is not None:
        uuids = tuple(share.device_uuid for share in kept.placement.shares)
        starts_at_s = kept.starts_at_s if floor.promises(kept.session_id, queue, special) else None
        special[kept.session_id] = ReserveDecision(
            kept.session_id, starts_at_s, kept.placement.node_id, uuids
        )
    # In a long queue almost every session waits: this loop is most of the work of a pass.
    return [
        special[s.id]
        if s.id in special
        else WaitDecision(s.id, WaitReason.HELD if lane is None else lane.reason)
        for s, lane in zip(queue.sessions, queue.lane_of, strict=True)
    ]


def applied(snapshot: Snapshot, step: Plan) -> Snapshot:
    """Return the snapshot with the sessions that a plan places as SCHEDULED, and nothing else changed."""
    where = {p.session_id: p.placement for p in step.placed}
    if not where:
        return snapshot
    now_s, state = snapshot.now_s, SessionState.SCHEDULED
    return snapshot.changed(
        [
            (s, replace(s, state=state, placement=where[s.id], scheduled_at_s=now_s))
            for s in snapshot.sessions
            if s.id in where
        ]
    )
