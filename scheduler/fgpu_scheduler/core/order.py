"""The order of the queue: what every order policy is given, and what is common to them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from fgpu_scheduler.core.model import Session, Snapshot

ANYBODY = "*"
"""The name under which a limit by user has that of everybody else."""


@dataclass(frozen=True, slots=True)
class Line:
    """Those who wait in one resource group, in the order of their places, and what an order may look at.

    ``waited_s`` is for each how long it has waited: nobody less than somebody behind, however the clock was set, but for
    those that were queued again after they had run.
    """

    snapshot: Snapshot
    resource_group: str
    waiting: Sequence[Session]
    waited_s: Sequence[int]


Order = Callable[[Line], Sequence[float]]
"""A rank for each in the line; lower comes first, and who has the earlier place where ranks are equal."""


@dataclass(frozen=True, slots=True)
class First:
    """Who comes before the others, whatever the order: higher priority first; of one priority who has a promise
    (with ``promises``), then who has waited for ``longest_wait_s``, each by their places.

    ``most_priority`` is the highest priority that counts, by user, and of everybody else under "*".
    """

    promises: bool = False
    longest_wait_s: int | None = None
    most_priority: Mapping[str, int] | None = None


def lines(snapshot: Snapshot) -> dict[str, Line]:
    """Return the line of each resource group in which somebody waits, by name."""
    waiting = snapshot.groups.waiting
    return {group: line(snapshot, group, waiting[group].values()) for group in sorted(waiting)}


def line(snapshot: Snapshot, resource_group: str, waiting: Iterable[Session]) -> Line:
    """Return the line of these sessions of a resource group."""
    own = by_place(waiting)
    return Line(snapshot, resource_group, own, waited_s(own, snapshot.now_s))


def by_place(waiting: Iterable[Session]) -> list[Session]:
    """Return sessions in the order of their places: first come first, by ids where two have one place."""
    own = sorted(waiting, key=attrgetter("id"))
    if any([s.place_of is not None for s in own]):
        own.sort(key=attrgetter("place"))
    return own


def waited_s(waiting: Sequence[Session], now_s: int) -> list[int]:
    """Return how long each has waited, given in the order of their places.

    Places tell who came first. Instants do not: after the clock was set back those who come later seem to
    have waited longer. So nobody has waited less than somebody behind. Only one that was queued again has: it stands
    at its old place, and while it ran it did not wait.
    """
    first = now_s
    found = []
    for session in reversed(waiting):
        if session.queued_at_s is not None:
            found.append(max(0, now_s - session.queued_at_s))
            continue
        if session.submitted_at_s < first:
            first = session.submitted_at_s
        found.append(now_s - first)
    found.reverse()
    return found


def in_order(line: Line, order: Order, first: First | None = None) -> list[int]:
    """Return the numbers of those in the line, next one first."""
    ranks = order(line)
    found = sorted(range(len(ranks)), key=ranks.__getitem__)
    if first is None:
        return found
    if first.longest_wait_s is not None:
        aged = [n for n, s in enumerate(line.waited_s) if s >= first.longest_wait_s]
        if aged:
            others = dict.fromkeys(aged)
            found = [*aged, *(n for n in found if n not in others)]
    waiting = line.waiting
    if first.promises:
        promised = [n for n, s in enumerate(waiting) if s.promised_at_s is not None]
        if promised:
            others = dict.fromkeys(promised)
            found = [*promised, *(n for n in found if n not in others)]
    if any([s.request.priority for s in waiting]):
        most = first.most_priority or {}
        highest = [-priority(s, most) for s in waiting]
        found.sort(key=highest.__getitem__)
    return found


def priority(session: Session, most: Mapping[str, int]) -> int:
    """Return the priority that counts: what was asked for, up to the highest of its user."""
    asked = session.request
    limit = most.get(asked.user, most.get(ANYBODY))
    return asked.priority if limit is None else min(asked.priority, limit)
