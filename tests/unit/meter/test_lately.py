"""What was held, used and waited for in the last day and week."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fgpu_scheduler import HeldShares
from fgpuspawner.meter.usage_report import DAY_S, HOUR_S, WEEK_S, Hour, RecentUse, recent_use

NOW_S = 100 * DAY_S + 1234
ALL = WEEK_S // HOUR_S


def spent(
    from_s: int, to_s: int | None, *, waited_s: int = 0, gpu_millionths: int = 500_000, session_id: int = 1
) -> HeldShares:
    """Half a GPU, between two instants before now."""
    at_s = NOW_S - from_s
    ended_at_s = None if to_s is None else NOW_S - to_s
    own = (session_id, "ann", "default", (), "image")
    return HeldShares(*own, at_s - waited_s, at_s, at_s, ended_at_s, gpu_millionths, 1000)


def recent(
    found: Iterable[HeldShares] = (),
    *,
    sm_percents: Mapping[int, float] | None = None,
    waits: Iterable[tuple[int, int | None]] = (),
    known_from_s: int | None = 0,
) -> RecentUse:
    return recent_use(found, NOW_S, sm_percents=sm_percents or {}, waits=waits, known_from_s=known_from_s)


def test_nothing_held_is_nothing_in_each_hour() -> None:
    found = recent()
    assert [hour.held for hour in found.hours] == [0.0] * ALL
    assert found.hours[-1] == Hour(NOW_S - HOUR_S, 0.0, 0.0, 0.0, None)
    assert (found.day.gpus, found.week.starts, found.week.wait_mean_s) == (0.0, 0, None)


def test_what_is_held_counts_in_each_hour_for_as_long_as_it_was() -> None:
    found = recent([spent(90 * 60, None), spent(3 * HOUR_S, 2 * HOUR_S)])
    assert [hour.held for hour in found.hours[-4:]] == [0.0, 0.5, 0.25, 0.5]
    assert not any(hour.held for hour in found.hours[:-4])
    assert found.week.gpus == round(1.25 / 24 / 7, 3)
    assert found.day.gpus == round(1.25 / 24, 3)


def test_what_began_before_the_week_counts_from_its_beginning_on() -> None:
    found = recent([spent(20 * DAY_S, 6 * DAY_S)])
    assert [hour.held for hour in found.hours] == [0.5] * 24 + [0.0] * (ALL - 24)
    assert found.week.starts == 0


def test_waits_are_of_sessions_that_started_in_the_span() -> None:
    found = recent([spent(HOUR_S, None, waited_s=60), spent(2 * DAY_S, DAY_S, waited_s=600)])
    assert (found.day.starts, found.day.wait_mean_s) == (1, 60)
    assert (found.week.starts, found.week.wait_mean_s, found.week.wait_p95_s) == (2, 330, 600)
    assert [hour.wait_mean_s for hour in found.hours if hour.wait_mean_s is not None] == [600, 60]


def test_waiting_requests_count_until_they_are_placed_cancelled_or_now() -> None:
    still = (NOW_S - HOUR_S // 2, None)
    cancelled = (NOW_S - 3 * HOUR_S, NOW_S - 2 * HOUR_S)
    found = recent([spent(2 * HOUR_S, HOUR_S, waited_s=HOUR_S)], waits=[still, cancelled])
    assert [hour.waiting for hour in found.hours[-4:]] == [0.0, 2.0, 0.0, 0.5]


def test_use_is_the_mean_compute_and_unknown_where_too_little_was_measured() -> None:
    measured, other = spent(2 * HOUR_S, None), spent(HOUR_S, None, session_id=2)
    found = recent([measured, other], sm_percents={1: 20.0})
    assert [hour.used for hour in found.hours[-3:]] == [0.0, 0.2, None]
    assert recent([measured, other], sm_percents={1: 20.0, 2: 0.0}).hours[-1].used == 0.2


def test_hours_before_the_first_record_are_unknown_and_not_zero() -> None:
    found = recent([spent(HOUR_S, None)], known_from_s=NOW_S - 2 * HOUR_S)
    assert [hour.held for hour in found.hours[-4:]] == [None, None, 0.0, 0.5]
    assert found.hours[0] == Hour(NOW_S - WEEK_S, None, None, None, None)
    assert found.day.gpus == 0.25
    assert recent(known_from_s=None).week.gpus is None
