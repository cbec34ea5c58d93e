"""The usage report: sums over days, users, groups and images."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

from fgpu_scheduler import HeldShares
from fgpuspawner.meter.usage_report import DAY_S, By, Line, UsageReport, report, starts_at_s

FIRST, LAST = date(2026, 5, 1), date(2026, 5, 3)


BEGIN_S = starts_at_s(FIRST)


NOW_S = BEGIN_S + 10 * DAY_S


HOUR_S = 3600


ONE = HeldShares(
    1,
    "alice",
    "lab",
    ("class", "staff"),
    "torch",
    waits_since_s=BEGIN_S + HOUR_S - 90,
    scheduled_at_s=BEGIN_S + HOUR_S - 30,
    started_at_s=BEGIN_S + HOUR_S,
    ended_at_s=BEGIN_S + 3 * HOUR_S - 30,
    gpu_millionths=500_000,
    fgpu_milli=1000,
)


def made(*spent: HeldShares, by: By, now_s: int = NOW_S) -> UsageReport:
    return report(spent, by, first=FIRST, last=LAST, now_s=now_s)


def short(found: UsageReport) -> list[tuple[str, int, int, float]]:
    return [(line.name, line.sessions, line.starts, line.gpu_hours) for line in found.lines]


def test_a_session_counts_from_its_placement_to_its_end_and_its_wait_to_its_placement() -> None:
    found = made(ONE, by=By.USER)
    assert found.lines == (Line("alice", 1, 1, 1.0, 2.0, 60, 60),)
    assert found.total == replace(found.lines[0], name="")


def test_a_session_over_midnight_counts_in_both_days_and_starts_in_one() -> None:
    over = replace(ONE, scheduled_at_s=BEGIN_S + 23 * HOUR_S, started_at_s=BEGIN_S + 23 * HOUR_S)
    over = replace(over, ended_at_s=BEGIN_S + DAY_S + 3 * HOUR_S)
    assert short(made(over, by=By.DAY)) == [
        ("2026-05-01", 1, 1, 0.5),
        ("2026-05-02", 1, 0, 1.5),
        ("2026-05-03", 0, 0, 0.0),
    ]
    assert made(over, by=By.DAY).total.sessions == 1


def test_what_is_outside_of_the_span_does_not_count_and_what_runs_counts_until_now() -> None:
    long = replace(ONE, scheduled_at_s=BEGIN_S - DAY_S, started_at_s=BEGIN_S - DAY_S, ended_at_s=None)
    assert short(made(long, by=By.USER)) == [("alice", 1, 0, 36.0)]
    assert short(made(long, by=By.USER, now_s=BEGIN_S + 2 * HOUR_S)) == [("alice", 1, 0, 1.0)]
    before = replace(ONE, scheduled_at_s=BEGIN_S - HOUR_S, started_at_s=BEGIN_S - 60, ended_at_s=BEGIN_S)
    assert short(made(before, by=By.USER)) == []


def test_user_of_several_groups_counts_in_each_and_once_in_total() -> None:
    none = replace(ONE, session_id=2, hub_groups=())
    found = made(ONE, none, by=By.HUB_GROUP)
    assert short(found) == [("(none)", 1, 1, 1.0), ("class", 1, 1, 1.0), ("staff", 1, 1, 1.0)]
    assert (found.total.sessions, found.total.gpu_hours) == (2, 2.0)


def test_lines_come_with_the_most_first_by_image_and_resource_group() -> None:
    more = replace(ONE, session_id=2, image="tf", resource_group="class", gpu_millionths=750_000)
    assert [line.name for line in made(ONE, more, by=By.IMAGE).lines] == ["tf", "torch"]
    assert [line.name for line in made(ONE, more, by=By.RESOURCE_GROUP).lines] == ["class", "lab"]


def test_a_clock_that_was_set_back_makes_no_wait_and_no_use_negative() -> None:
    back = replace(ONE, waits_since_s=BEGIN_S + 2 * HOUR_S, ended_at_s=ONE.scheduled_at_s - 60)
    (line,) = made(back, by=By.USER).lines
    assert (line.wait_mean_s, line.gpu_hours) == (0, 0.0)
