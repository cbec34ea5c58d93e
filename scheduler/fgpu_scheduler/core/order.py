"""The order of the queue: what every order policy is given, and what is common to them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fgpu_scheduler.core.lifecycle import WAITING
from fgpu_scheduler.core.model import Session, Snapshot


@dataclass(frozen=True, slots=True)
class Line:
    """Those who wait in one resource group, in the order of their places, and what an order may look at.

    ``waited_s`` is for each how long it has waited: nobody less than somebody behind, however the clock was set.
    """

    snapshot: Snapshot
    resource_group: str
    waiting: Sequence[Session]
    waited_s: Sequence[int]
    half_life_s: int


Order = Callable[[Line], Sequence[float]]
"""A rank for each in the line; lower comes first, and who has the earlier place where ranks are equal."""


def line(snapshot: Snapshot, resource_group: str, *, half_life_s: int) -> Line:
    """Return the line of a resource group."""
    waiting = sorted(
        (s for s in snapshot.sessions if s.state in WAITING and s.request.resource_group == resource_group),
        key=_place,
    )
    return Line(snapshot, resource_group, waiting, waited_s(waiting, snapshot.now_s), half_life_s)


def _place(session: Session) -> tuple[int, int]:
    return session.place, session.id


def waited_s(waiting: Sequence[Session], now_s: int) -> list[int]:
    """Return how long each has waited, in the order of their places.

    Places tell who came first. Instants do not: after the clock was set back those who come later seem to
    have waited longer. So nobody has waited less than somebody behind.
    """
    longest = 0
    found = []
    for session in reversed(waiting):
        longest = max(longest, now_s - session.submitted_at_s)
        found.append(longest)
    found.reverse()
    return found


def in_order(own: Line, order: Order) -> list[int]:
    """Return the places in the line, next one first."""
    ranks = order(own)
    return sorted(range(len(ranks)), key=ranks.__getitem__)


def queue(sessions: Iterable[Session]) -> tuple[Session, ...]:
    """Return the waiting sessions in the order of their places: first come first."""
    return tuple(sorted((s for s in sessions if s.state in WAITING), key=_place))
