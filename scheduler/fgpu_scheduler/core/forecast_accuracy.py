"""How good earlier forecasts were: the shown ranges against the starts, and the calibration of the next ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from statistics import median

from fgpu_scheduler.core.run_lengths import RunLengths

#: The part of starts that should lie inside the shown range. The others should be half before and half after it.
INSIDE = 0.8
#: Fewer starts calibrate nothing.
LEAST_OUTCOMES = 20
#: The number of the newest starts that count.
NEWEST_OUTCOMES = 500
#: Added to each planned wait before a delay is divided by it: a start that was planned for now can be hours late, too.
LEAST_WAIT_S = 300
#: The largest part of starts that a range leaves outside on one side.
MOST_OUTSIDE = 0.4


@dataclass(frozen=True, slots=True)
class StartRange:
    """The range of a start in UTC seconds: 10 % of starts are before ``early_at_s``, half before ``middle_at_s``, and
    10 % after ``late_at_s``."""

    early_at_s: int
    middle_at_s: int
    late_at_s: int


@dataclass(frozen=True, slots=True)
class ForecastOutcome:
    """The range that was shown for a start, and what happened. Instants are UTC seconds.

    ``planned`` is the range before calibration. Without ``started`` the request was cancelled at ``at_s``; it counts as
    late if that is after the range.
    """

    told_at_s: int
    shown: StartRange
    planned: StartRange
    at_s: int
    started: bool = True

    @property
    def counts(self) -> bool:
        """Whether it says anything: a request that was cancelled earlier could have started in time."""
        return self.started or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether it started after the shown range, or was cancelled after it."""
        return self.at_s > self.shown.late_at_s

    @property
    def is_inside(self) -> bool:
        """Whether it started inside the shown range."""
        return self.started and self.shown.early_at_s <= self.at_s <= self.shown.late_at_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """How much later than planned sessions start, in parts of the planned wait: 10 % before ``early``, half before
    ``middle``, 10 % after ``late``."""

    early: float
    middle: float
    late: float

    def of(self, planned: StartRange, told_at_s: int) -> StartRange:
        """Return the calibrated range. A planned range without uncertainty stays."""
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
    """The past of a resource group: how long sessions ran, and, after enough waits, the calibration of its forecasts."""

    lengths: RunLengths = field(default_factory=lambda: RunLengths(""))
    stretch: Calibration | None = None


def calibrated(found: Iterable[ForecastOutcome]) -> Calibration | None:
    """Return the calibration with which `INSIDE` of these starts would have been inside; None after too few starts.

    This is conformal prediction (Vovk, 2005) with adaptation (after Gibbs and Candes, 2021): if more starts than
    meant lay outside the shown ranges, because a lab changes, the next ranges leave fewer outside, on either side.
    """
    own = [t for t in found if t.counts and _is_uncertain(t.planned)]
    if len(own) < LEAST_OUTCOMES:
        return None
    places = sorted((t.at_s - t.planned.middle_at_s) / _wait_s(t.planned, t.told_at_s) for t in own)
    before = _outside(len(own), sum(t.at_s < t.shown.early_at_s for t in own))
    after = _outside(len(own), sum(t.is_late for t in own))
    first = floor((len(own) + 1) * before) - 1
    last = ceil((len(own) + 1) * (1 - after)) - 1
    return Calibration(places[max(first, 0)], float(median(places)), places[min(last, len(own) - 1)])


def _outside(starts: int, missed: int) -> float:
    """Return the part of the starts to leave outside on one side, where ``missed`` of them were outside."""
    tail = (1 - INSIDE) / 2
    return min(max(0.0, tail + (tail * starts - missed) / NEWEST_OUTCOMES), MOST_OUTSIDE)


@dataclass(frozen=True, slots=True)
class ForecastAccuracy:
    """How good the last forecasts were. Parts are from 0 to 1; waits are medians in seconds."""

    starts: int
    inside: float
    late: float
    early: float
    told_wait_s: float
    true_wait_s: float


def forecast_accuracy(found: Iterable[ForecastOutcome]) -> ForecastAccuracy | None:
    """Return how good these forecasts were; None without any."""
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
