"""How good forecasts were: what was told of a start against the start, and what that teaches the next ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from statistics import median

from fgpu_scheduler.core.lengths import Lengths

INSIDE = 0.8
"""So many of the starts are to lie inside the told range, and of the others as many before it as after it."""
TAUGHT_BY = 20
"""Fewer starts change no range."""
NEWEST_TOLD = 200
"""So many of the newest starts teach."""
MOST_STRETCH = 20.0


@dataclass(frozen=True, slots=True)
class Range:
    """When something starts, in UTC seconds: 10 of 100 before ``early_at_s``, 10 after ``late_at_s``, half of them before
    ``middle_at_s``."""

    early_at_s: int
    middle_at_s: int
    late_at_s: int


@dataclass(frozen=True, slots=True)
class Told:
    """What was told of one start, and what became of it: instants in UTC seconds.

    ``planned`` is the range before earlier starts had taught anything. Who has not ``started`` was given up at ``at_s``,
    and counts as late where that is after the range.
    """

    told_at_s: int
    told: Range
    planned: Range
    at_s: int
    started: bool = True

    @property
    def counts(self) -> bool:
        """Whether anything is known of it: who left earlier could have started in time."""
        return self.started or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether it started, if at all, after the told range."""
        return self.at_s > self.told.late_at_s

    @property
    def is_inside(self) -> bool:
        """Whether it started inside the told range."""
        return self.started and self.told.early_at_s <= self.at_s <= self.told.late_at_s


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where starts lie in the ranges that were planned: -1 is the early bound, 0 the middle, and 1 the late bound."""

    early: float = -1.0
    middle: float = 0.0
    late: float = 1.0

    def of(self, planned: Range) -> Range:
        """Return the range to be told."""
        early, middle, late = (_at_s(planned, z) for z in (self.early, self.middle, self.late))
        return Range(early, middle, late)


def _at_s(planned: Range, z: float) -> int:
    side_s = planned.late_at_s - planned.middle_at_s if z > 0 else planned.middle_at_s - planned.early_at_s
    return planned.middle_at_s + round(z * side_s)


@dataclass(frozen=True, slots=True)
class Experience:
    """What has happened in a resource group: how long sessions ran, and where in their ranges they started."""

    lengths: Lengths = field(default_factory=lambda: Lengths(""))
    stretch: Stretch = Stretch()


def stretch_of(found: Iterable[Told]) -> Stretch:
    """Return with which ranges `INSIDE` of these starts would have been inside: conformal prediction (Vovk, 2005)."""
    own = [
        t for t in found if t.counts and t.planned.early_at_s < t.planned.middle_at_s < t.planned.late_at_s
    ]
    if len(own) < TAUGHT_BY:
        return Stretch()
    places = sorted(_place(t.planned, t.at_s) for t in own)
    tail = (1 - INSIDE) / 2
    first = floor((len(own) + 1) * tail) - 1
    last = ceil((len(own) + 1) * (1 - tail)) - 1
    return Stretch(places[max(first, 0)], float(median(places)), places[min(last, len(own) - 1)])


def _place(planned: Range, at_s: int) -> float:
    """Return where in its range something started, as `Stretch` has it."""
    after_s = at_s - planned.middle_at_s
    side_s = (
        planned.late_at_s - planned.middle_at_s if after_s > 0 else planned.middle_at_s - planned.early_at_s
    )
    return max(-MOST_STRETCH, min(after_s / side_s, MOST_STRETCH))


@dataclass(frozen=True, slots=True)
class Hindsight:
    """How good the last forecasts were. Parts are of 1; waits are medians in seconds."""

    starts: int
    inside: float
    late: float
    early: float
    told_wait_s: float
    true_wait_s: float


def hindsight(found: Iterable[Told]) -> Hindsight | None:
    """Return the figures of some forecasts; None of none."""
    own: Sequence[Told] = [t for t in found if t.counts]
    if not own:
        return None
    inside = sum(t.is_inside for t in own)
    late = sum(t.is_late for t in own)
    return Hindsight(
        len(own),
        inside / len(own),
        late / len(own),
        (len(own) - inside - late) / len(own),
        float(median(t.told.middle_at_s - t.told_at_s for t in own)),
        float(median(t.at_s - t.told_at_s for t in own)),
    )
