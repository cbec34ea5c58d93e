"""The order of the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fgpu_scheduler.core.lifecycle import WAITING
from fgpu_scheduler.core.model import Session

Order = Callable[[Session], tuple[int, ...]]
"""Lower comes first. The session's id breaks ties."""


def fifo(session: Session) -> tuple[int, ...]:
    """First come, first served: in the order of submission.

    Ids tell it, being given in that order. Instants do not: a clock that is set back would let everybody
    who comes later overtake. One that is queued again has the place of the one that it replaces.
    """
    return (session.place,)


def queue(sessions: Iterable[Session], *, order: Order) -> tuple[Session, ...]:
    """Return the waiting sessions, next one first."""
    waiting = (s for s in sessions if s.state in WAITING)
    return tuple(sorted(waiting, key=lambda s: (order(s), s.id)))


def positions(sessions: Iterable[Session], *, order: Order) -> dict[int, int]:
    """Return each waiting session's position in its resource group's queue; 1 is next."""
    length: dict[str, int] = {}
    found: dict[int, int] = {}
    for session in queue(sessions, order=order):
        group = session.request.resource_group
        length[group] = length.get(group, 0) + 1
        found[session.id] = length[group]
    return found
