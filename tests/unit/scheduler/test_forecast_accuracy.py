"""What was told against what was true, and what that teaches."""

from __future__ import annotations

import random

import pytest

from fgpu_scheduler.core.forecast_accuracy import (
    LEAST_OUTCOMES,
    LEAST_WAIT_S,
    NEWEST_OUTCOMES,
    Calibration,
    ForecastOutcome,
    StartRange,
    calibrated,
    forecast_accuracy,
)

PLANNED = StartRange(1000, 2000, 4000)


def told(
    at_s: int, *, planned: StartRange = PLANNED, stretch: Calibration | None = None, started: bool = True
) -> ForecastOutcome:
    return ForecastOutcome(0, planned if stretch is None else stretch.of(planned, 0), planned, at_s, started)


def test_few_starts_calibrate_nothing() -> None:
    assert calibrated([told(9000)] * (LEAST_OUTCOMES - 1)) is None


def test_a_range_is_stretched_by_its_wait_and_a_start_that_was_planned_for_now_moves_too() -> None:
    twice = Calibration(0.0, 1.0, 2.0)
    assert twice.of(PLANNED, 0) == StartRange(2000, 4000 + LEAST_WAIT_S, 6000 + 2 * LEAST_WAIT_S)
    assert twice.of(StartRange(50, 60, 90), 60) == StartRange(60, 60 + LEAST_WAIT_S, 60 + 2 * LEAST_WAIT_S)


def test_four_in_five_starts_are_inside_after_calibration() -> None:
    draw = random.Random(7)
    kept: list[ForecastOutcome] = []
    for _ in range(1200):
        taught = calibrated(kept[-NEWEST_OUTCOMES:])
        kept.append(told(round(draw.lognormvariate(8.5, 0.8)), stretch=taught))
    found = forecast_accuracy(kept[400:])
    assert found is not None
    assert found.inside == pytest.approx(0.8, abs=0.06)
    assert found.late == pytest.approx(0.1, abs=0.05)
    assert found.told_wait_s == pytest.approx(found.true_wait_s, rel=0.15)


def test_as_waits_grow_longer_and_longer_the_ranges_follow() -> None:
    draw = random.Random(7)
    kept: list[ForecastOutcome] = []
    for n in range(1500):
        taught = calibrated(kept[-NEWEST_OUTCOMES:])
        kept.append(told(round(draw.lognormvariate(8 + n / 600, 0.8)), stretch=taught))
    found = forecast_accuracy(kept[500:])
    assert found is not None
    assert found.inside > 0.78
    assert found.late < 0.16


def test_cancelled_request_counts_only_after_its_range() -> None:
    assert forecast_accuracy([told(3000, started=False)]) is None
    found = forecast_accuracy([told(5000, started=False), told(3000)])
    assert found is not None
    assert (found.starts, found.inside, found.late, found.early) == (2, 0.5, 0.5, 0.0)


def test_certain_start_does_not_calibrate_uncertain_ones() -> None:
    certain = StartRange(2000, 2000, 2000)
    assert calibrated([told(9000, planned=certain)] * 50) is None
    assert Calibration(-1.0, 0.0, 1.0).of(certain, 0) == certain
