"""One decision for every waiting session: placed where, kept a place, or waiting why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fgpu_scheduler.core import orders
from fgpu_scheduler.core.ground import Memory as Memory
from fgpu_scheduler.core.lanes import Lanes
from fgpu_scheduler.core.model import Placement, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.passes import Floor
from fgpu_scheduler.core.policies import GroupPolicy as GroupPolicy
from fgpu_scheduler.core.policies import Policy as Policy
from fgpu_scheduler.core.quota import Ledger


@dataclass(frozen=True, slots=True)
class Place:
    """Give the session these shares."""

    session_id: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Reserve:
    """Leave the session PENDING, and keep a place for it: nobody who comes after it takes what it needs.

    ``starts_at_s`` is the latest start that can be promised, or None: where no end is known of those who hold
    what it needs, somebody of higher priority waits too, or the policy promises nothing. The devices are those
    that it would get.
    """

    session_id: int
    starts_at_s: int | None
    node_id: str
    device_uuids: tuple[str, ...]

    @property
    def reason(self) -> WaitReason:
        """Why it waits: as every decision that leaves a session PENDING has it."""
        return WaitReason.RESERVED


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the session PENDING, for this reason."""

    session_id: int
    reason: WaitReason


Decision = Place | Reserve | Wait


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for the snapshot of ``version``: resource groups by name, each in the order of its queue."""

    version: int
    decisions: tuple[Decision, ...]

    @property
    def placed(self) -> tuple[Place, ...]:
        """The sessions that get their shares."""
        return tuple(d for d in self.decisions if isinstance(d, Place))


def plan(snapshot: Snapshot, policy: Policy, memory: Memory | None = None) -> Plan:
    """Decide for every waiting session: in the order of its group's policy, with its kind of backfill.

    A held session keeps its place and is not placed. Who is over a quota waits, and blocks nobody. Of those
    who ask for exactly the same nobody overtakes, and nobody is tried again once the first does not fit. With the
    ``memory`` of earlier plans it is the same plan, sooner.
    """
    decisions: list[Decision] = []
    memory, ledger = memory or Memory(), Ledger(snapshot)
    for group, line in orders.lines(snapshot).items():
        own = policy.of(group)
        with memory.ground(snapshot, group, own.placing) as ground:
            floor = Floor(snapshot, ground, own, ledger)
            decisions += _decided(line, floor, by_user=bool(snapshot.quotas))
    return Plan(snapshot.version, tuple(decisions))


def _decided(line: orders.Line, floor: Floor, *, by_user: bool) -> list[Decision]:
    """Return the decisions for one resource group, in the order of its queue."""
    queue = Lanes(floor.in_order(line), by_user=by_user)
    special: dict[int, Decision] = {
        session.id: Place(session.id, where) for session, where in floor.fill(queue)
    }
    kept = floor.kept
    if kept is not None:
        uuids = tuple(share.device_uuid for share in kept.placement.shares)
        starts_at_s = kept.starts_at_s if floor.promises(kept.session_id, queue, special) else None
        special[kept.session_id] = Reserve(kept.session_id, starts_at_s, kept.placement.node_id, uuids)
    # Of a long queue almost everybody waits: this is most of the work of a pass.
    return [
        special[s.id] if s.id in special else Wait(s.id, WaitReason.HELD if lane is None else lane.reason)
        for s, lane in zip(queue.sessions, queue.lane_of, strict=True)
    ]


def applied(snapshot: Snapshot, step: Plan) -> Snapshot:
    """Return the world in which those whom a plan places hold their shares, and nothing else has changed."""
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
