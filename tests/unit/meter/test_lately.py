"""What was held in the last day and week, and how long people waited."""

from __future__ import annotations

from fgpu_scheduler import HeldShares
from fgpuspawner.meter.usage_report import DAY_S, DAYS, HOUR_S, HOURS, recent_use

NOW_S = 100 * DAY_S + 1234


def spent(from_s: int, to_s: int | None, *, waited_s: int = 0, gpu_millionths: int = 500_000) -> HeldShares:
    """Half a GPU, between two instants before now."""
    at_s = NOW_S - from_s
    ended_at_s = None if to_s is None else NOW_S - to_s
    return HeldShares(
        1, "ann", "default", (), "image", at_s - waited_s, at_s, at_s, ended_at_s, gpu_millionths, 1000
    )


def test_nothing_held_is_nothing_in_each_hour_and_day() -> None:
    found = recent_use((), NOW_S)
    assert (found.hours, found.days) == ((0.0,) * HOURS, (0.0,) * DAYS)
    assert (found.day.gpus, found.week.starts, found.week.wait_mean_s) == (0.0, 0, None)


def test_what_is_held_counts_in_each_hour_for_as_long_as_it_was() -> None:
    found = recent_use([spent(90 * 60, None), spent(3 * HOUR_S, 2 * HOUR_S)], NOW_S)
    assert found.hours[-4:] == (0.0, 0.5, 0.25, 0.5)
    assert sum(found.hours[:-4]) == 0
    assert found.days[-1] == round((0.75 + 0.5) / 24, 3)
    assert found.day.gpus == round(1.25 / 24, 3)


def test_what_began_before_the_week_counts_from_its_beginning_on() -> None:
    found = recent_use([spent(20 * DAY_S, 6 * DAY_S)], NOW_S)
    assert (found.days[0], sum(found.days[1:])) == (0.5, 0)
    assert found.week.starts == 0


def test_waits_are_of_sessions_that_started_in_the_span() -> None:
    found = recent_use([spent(HOUR_S, None, waited_s=60), spent(2 * DAY_S, DAY_S, waited_s=600)], NOW_S)
    assert (found.day.starts, found.day.wait_mean_s) == (1, 60)
    assert (found.week.starts, found.week.wait_mean_s, found.week.wait_p95_s) == (2, 330, 600)
