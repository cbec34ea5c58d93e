"""When what is held becomes free again, by the ends that are known, and where a request fits soonest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from fgpu_scheduler.core.model import Placement, Request, Session
from fgpu_scheduler.core.placement import NodeFree, Score, place, released
from fgpu_scheduler.core.reservations import ENDING_S, Reservation
from fgpu_scheduler.core.shares import RequestShape, per_preferred_model, shape

NEVER_S = 1 << 62
_FREE_AT = itemgetter(0)


class Release(NamedTuple):
    """A session that ends, and the instant by which its shares are free again, in UTC seconds."""

    free_at_s: int
    session: Session
    placement: Placement


class _Fit(NamedTuple):
    """Where a request fits on a node, the best first; without a ``place`` it does not fit there before ``at_s``."""

    at_s: int
    model: int
    """Which of the GPU models that are asked for, the most liked first."""
    node_id: str
    change: int
    """How often the node had changed when it was looked at."""
    seen_at_s: int
    place: tuple[Placement, NodeFree] | None = None


class ReleaseSchedule:
    """The known ends on the nodes of one resource group.

    For the shape that was asked for last it keeps what each node answered, until something changes on that node.
    """

    def __init__(self, at_first: Callable[[str], Iterable[Release]]) -> None:
        """``at_first`` returns the known ends of those who hold something on a node at the beginning."""
        self._at_first = at_first
        self._started: dict[str, tuple[Release, ...]] = {}
        self._ended: dict[int, None] = {}
        self._changes: dict[str, int] = {}
        self._shape: RequestShape | None = None
        self._fits: list[_Fit] = []
        """A heap; those of nodes that have changed since are stale."""

    def copy(self) -> ReleaseSchedule:
        """Return one that goes on from the same state."""
        other = copy(self)
        other._started, other._ended = dict(self._started), dict(self._ended)
        other._changes, other._fits = dict(self._changes), list(self._fits)
        return other

    def start(self, session: Session, where: Placement, free_at_s: int | None) -> None:
        """Add a session that starts; None: its end is not known."""
        if free_at_s is not None:
            release = Release(free_at_s, session, where)
            self._started[where.node_id] = (*self._started.get(where.node_id, ()), release)
        self._changed(where.node_id)

    def end(self, session_id: int, node_id: str) -> None:
        """Remove a session that has ended."""
        self._ended[session_id] = None
        self._changed(node_id)

    def _changed(self, node_id: str) -> None:
        change = self._changes[node_id] = self._changes.get(node_id, 0) + 1
        heappush(self._fits, _Fit(0, 0, node_id, change, 0))

    def soonest(
        self, session: Session, left: Mapping[str, NodeFree], *, now_s: int, score: Score
    ) -> Reservation | None:
        """Return the place at which a session can start soonest that fits nowhere now; None where no end is known.

        ``left`` is what is free of the nodes of its resource group, by id.
        """
        asked, fits, changes = session.request, self._fits, self._changes
        if shape(asked) != self._shape:
            self._shape = shape(asked)
            ends = ((min((r.free_at_s for r in self._there(i)), default=NEVER_S), i) for i in left)
            fits[:] = [_Fit(at_s, 0, i, changes.get(i, 0), 0) for at_s, i in ends if at_s < NEVER_S]
            heapify(fits)
        # An end that should have been by now is still to come.
        least_s, until_s = now_s + ENDING_S, NEVER_S

        def is_known(fit: _Fit) -> bool:
            current = fit.change == changes.get(fit.node_id, 0) and fit.node_id in left
            return current and (fit.at_s > least_s or fit.seen_at_s == now_s)

        while fits:
            best = fits[0]
            node_id = best.node_id
            if best.change != changes.get(node_id, 0) or node_id not in left:
                heappop(fits)
            elif best.place is not None and is_known(best):
                return Reservation(session.id, best.place[0], best.at_s, best.place[1])
            else:
                heappop(fits)
                if fits and fits[0].place and is_known(fits[0]):
                    until_s = min(until_s, fits[0].at_s)
                fit = self._first_fit(asked, left[node_id], now_s, max(until_s, least_s), score)
                if fit is not None:
                    heappush(fits, fit)
                    if fit.place:
                        until_s = min(until_s, fit.at_s)
        return None

    def _first_fit(
        self, asked: Request, left: NodeFree, now_s: int, until_s: int, score: Score
    ) -> _Fit | None:
        """Return when a request first fits on a node, if that is not after ``until_s``; None if it never does."""
        node_id, least_s = left.node.id, now_s + ENDING_S
        change = self._changes.get(node_id, 0)
        releases = sorted(self._there(node_id), key=_FREE_AT)
        for number, release in enumerate(releases):
            at_s = max(release.free_at_s, least_s)
            if at_s > until_s:
                return _Fit(at_s, 0, node_id, change, now_s)
            left = released(left, release.session.request, release.placement)
            more = number + 1 < len(releases) and max(releases[number + 1].free_at_s, least_s) == at_s
            if more or not may_hold(left, asked):
                continue
            for model, one in enumerate(per_preferred_model(asked)):
                found = place(one, (left,), score=score)
                if found is not None:
                    return _Fit(at_s, model, node_id, change, now_s, (found[0], found[1][0]))
        return None

    def _there(self, node_id: str) -> list[Release]:
        there = (*self._at_first(node_id), *self._started.get(node_id, ()))
        return [release for release in there if release.session.id not in self._ended]


def may_hold(left: NodeFree, asked: Request) -> bool:
    """Return whether so much is free; whether it fits takes longer to say."""
    if left.cpu_milli < asked.cpu_milli or left.memory_mib < asked.memory_mib:
        return False
    wanted, enough = asked.fgpu_milli, 0
    for free in left.devices:
        capacity = free.device.capacity_milli
        if free.fgpu_milli >= min(wanted, capacity):
            enough += capacity
    return enough >= wanted
