"""One decision for every waiting session: placed where, or waiting why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fgpu_scheduler.core import order, placement
from fgpu_scheduler.core.model import Placement, Request, Session, Snapshot, WaitReason


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
    waiting = order.queue(snapshot.sessions, order=policy.order)
    unheld = [s for s in waiting if not s.held]
    where, _ = place_in_order(unheld, placement.free(snapshot), policy)
    return Plan(snapshot.version, tuple(_decision(s, where.get(s.id)) for s in waiting))


def _decision(session: Session, where: Placement | None) -> Decision:
    if where is not None:
        return Place(session.id, where)
    return Wait(session.id, WaitReason.HELD if session.held else WaitReason.RESOURCES)


Shape = tuple[str, int, int, int]
"""What decides where a request fits: two of one shape fit exactly alike."""


def shape(asked: Request) -> Shape:
    """Return the shape of a request."""
    return asked.resource_group, asked.fgpu_milli, asked.cpu_milli, asked.memory_mib


def place_in_order(
    queue: Iterable[Session], left: placement.Free, policy: Policy
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
