"""One decision for every waiting session: placed where, or waiting why."""

from __future__ import annotations

from dataclasses import dataclass

from fgpu_scheduler.core import order, placement
from fgpu_scheduler.core.model import Placement, SessionState, Snapshot, WaitReason


@dataclass(frozen=True, slots=True)
class Policy:
    """How the queue is ordered and where sessions go."""

    order: order.Order = order.fifo
    score: placement.Score = placement.best_fit


@dataclass(frozen=True, slots=True)
class Place:
    """Give the session these shares."""

    session_id: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the session PENDING, for this reason."""

    session_id: int
    reason: WaitReason


Decision = Place | Wait


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions in queue order, made on the snapshot of ``version``."""

    version: int
    decisions: tuple[Decision, ...]

    @property
    def placed(self) -> tuple[Place, ...]:
        """The sessions that get their shares."""
        return tuple(d for d in self.decisions if isinstance(d, Place))


def plan(snapshot: Snapshot, policy: Policy) -> Plan:
    """Decide for every waiting session: first come, first served, skipping what does not fit.

    A held session keeps its place and is not placed. Once an amount does not fit, no later session
    that asks for exactly the same is tried again in this pass.
    """
    left = placement.free(snapshot)
    misfits = []
    decisions: list[Decision] = []
    for session in order.queue(snapshot.sessions, order=policy.order):
        assert session.state is SessionState.PENDING
        if session.held:
            decisions.append(Wait(session.id, WaitReason.HELD))
            continue
        asked = session.request
        shape = (asked.resource_group, asked.fgpu_milli, asked.cpu_milli, asked.memory_mib)
        found = None if shape in misfits else placement.place(asked, left, score=policy.score)
        if found is None:
            misfits.append(shape)
            decisions.append(Wait(session.id, WaitReason.RESOURCES))
        else:
            where, left = found
            decisions.append(Place(session.id, where))
    return Plan(snapshot.version, tuple(decisions))
