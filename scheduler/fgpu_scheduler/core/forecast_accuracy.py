"""How good forecasts were: what was told of a start against the start, and what that teaches the next ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from statistics import median

from fgpu_scheduler.core.run_lengths import RunLengths

INSIDE = 0.8
"""So many of the starts are to lie inside the told range, and of the others as many before it as after it."""
TAUGHT_BY = 20
"""Fewer starts change no range."""
NEWEST_OUTCOMES = 500
"""So many of the newest starts teach."""
LEAST_WAIT_S = 300
"""Is added to each planned wait that a delay is compared with: a start that was planned for now is hours late, too."""
MOST_OUTSIDE = 0.4


@dataclass(frozen=True, slots=True)
class StartRange:
    """When something starts, in UTC seconds: 10 of 100 before ``early_at_s``, 10 after ``late_at_s``, half of them before
    ``middle_at_s``."""

    early_at_s: int
    middle_at_s: int
    late_at_s: int


@dataclass(frozen=True, slots=True)
class ForecastOutcome:
    """What was told of one start, and what became of it: instants in UTC seconds.

    ``planned`` is the range before earlier starts had taught anything. Who has not ``started`` was given up at ``at_s``,
    and counts as late where that is after the range.
    """

    told_at_s: int
    shown: StartRange
    planned: StartRange
    at_s: int
    started: bool = True

    @property
    def counts(self) -> bool:
        """Whether anything is known of it: who left earlier could have started in time."""
        return self.started or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether it started, if at all, after the told range."""
        return self.at_s > self.shown.late_at_s

    @property
    def is_inside(self) -> bool:
        """Whether it started inside the told range."""
        return self.started and self.shown.early_at_s <= self.at_s <= self.shown.late_at_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """How much later than planned starts come, in parts of the planned wait: 10 of 100 before ``early``, 10 after
    ``late``, and half of them before ``middle``."""

    early: float
    middle: float
    late: float

    def of(self, planned: StartRange, told_at_s: int) -> StartRange:
        """Return the range to be told. What is planned without a doubt stays."""
        if not _is_uncertain(planned):
            return planned
        wait_s, middle_s = _wait_s(planned, told_at_s), planned.middle_at_s
        return StartRange(*(middle_s + round(part * wait_s) for part in (self.early, self.middle, self.late)))


def _is_uncertain(planned: StartRange) -> bool:
    return planned.early_at_s < planned.late_at_s


def _wait_s(planned: StartRange, told_at_s: int) -> int:
    return max(0, planned.middle_at_s - told_at_s) + LEAST_WAIT_S


@dataclass(frozen=True, slots=True)
class ForecastHistory:
    """What has happened in a resource group: how long sessions ran, and, where enough waited, how much later than planned
    they started."""

    lengths: RunLengths = field(default_factory=lambda: RunLengths(""))
    stretch: Calibration | None = None


def calibrated(found: Iterable[ForecastOutcome]) -> Calibration | None:
    """Return with which ranges `INSIDE` of these starts would have been inside; None where too few are known.

    That is conformal prediction (Vovk, 2005), adapted by what was missed (after Gibbs and Candes, 2021): where more
    starts than meant lay outside what was told, as a lab changes, the next ranges leave as many fewer outside, on either
    side.
    """
    own = [t for t in found if t.counts and _is_uncertain(t.planned)]
    if len(own) < TAUGHT_BY:
        return None
    places = sorted((t.at_s - t.planned.middle_at_s) / _wait_s(t.planned, t.told_at_s) for t in own)
    before = _outside(len(own), sum(t.at_s < t.shown.early_at_s for t in own))
    after = _outside(len(own), sum(t.is_late for t in own))
    first = floor((len(own) + 1) * before) - 1
    last = ceil((len(own) + 1) * (1 - after)) - 1
    return Calibration(places[max(first, 0)], float(median(places)), places[min(last, len(own) - 1)])


def _outside(starts: int, missed: int) -> float:
    """Return which part of the starts to leave outside, on the side where so many were missed."""
    tail = (1 - INSIDE) / 2
    return min(max(0.0, tail + (tail * starts - missed) / NEWEST_OUTCOMES), MOST_OUTSIDE)


@dataclass(frozen=True, slots=True)
class ForecastAccuracy:
    """How good the last forecasts were. Parts are of 1; waits are medians in seconds."""

    starts: int
    inside: float
    late: float
    early: float
    told_wait_s: float
    true_wait_s: float


def forecast_accuracy(found: Iterable[ForecastOutcome]) -> ForecastAccuracy | None:
    """Return the figures of some forecasts; None of none."""
    own: Sequence[ForecastOutcome] = [t for t in found if t.counts]
    if not own:
        return None
    inside = sum(t.is_inside for t in own)
    late = sum(t.is_late for t in own)
    return ForecastAccuracy(
        len(own),
        inside / len(own),
        late / len(own),
        (len(own) - inside - late) / len(own),
        float(median(t.shown.middle_at_s - t.told_at_s for t in own)),
        float(median(t.at_s - t.told_at_s for t in own)),
    )
