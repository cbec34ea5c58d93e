"""One decision for every waiting session: placed where, or waiting why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fgpu_scheduler.core import order, placement
from fgpu_scheduler.core.model import Placement, Session, Snapshot, WaitReason
from fgpu_scheduler.core.policies import GroupPolicy as GroupPolicy
from fgpu_scheduler.core.policies import Policy as Policy
from fgpu_scheduler.core.shares import Shape, shape


@dataclass(frozen=True, slots=True)
class Place:
    """Give the session these shares."""

    session_id: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Reserve:
    """Leave the session PENDING, and keep a place for it: nobody who comes after it takes what it needs.

    ``starts_at_s`` is the latest start that can be promised, or None where no end is known of those who hold
    what it needs. The devices are those that it would get.
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


def plan(snapshot: Snapshot, policy: Policy) -> Plan:
    """Decide for every waiting session: in the order of its group's policy, skipping what does not fit.

    A held session keeps its place and is not placed. Once an amount does not fit, no later session
    that asks for exactly the same is tried again in this pass.
    """
    decisions: list[Decision] = []
    left = placement.free(snapshot)
    for group in sorted({s.request.resource_group for s in order.queue(snapshot.sessions)}):
        own = policy.of(group)
        line = order.line(snapshot, group, half_life_s=own.half_life_s)
        waiting = [line.waiting[at] for at in order.in_order(line, own.order)]
        where, left = place_in_order([s for s in waiting if not s.held], left, own)
        decisions += (_decision(s, where.get(s.id)) for s in waiting)
    return Plan(snapshot.version, tuple(decisions))


def _decision(session: Session, where: Placement | None) -> Decision:
    if where is not None:
        return Place(session.id, where)
    return Wait(session.id, WaitReason.HELD if session.held else WaitReason.RESOURCES)


def place_in_order(
    queue: Iterable[Session], left: placement.Free, policy: GroupPolicy
) -> tuple[dict[int, Placement], placement.Free]:
    """Place what fits, in the order given, and return where each goes and what they all leave."""
    misfits: dict[Shape, None] = {}
    where: dict[int, Placement] = {}
    for session in queue:
        asked = shape(session.request)
        if asked in misfits:
            continue
        found = placement.place(session.request, left, score=policy.score)
        if found is None:
            misfits[asked] = None
        else:
            where[session.id], left = found
    return where, left
