"""Use of the GPUs in the last day and week, and waits. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fgpu_scheduler import HeldShares
from fgpuspawner.meter.usage_report import DAY_S, p95

HOUR_S = 3600
HOURS, DAYS = 24, 7
WEEK_S = DAYS * DAY_S


@dataclass(frozen=True, slots=True)
class Span:
    """A span until now: mean number of held GPUs, number of starts, and their waits in seconds."""

    gpus: float
    starts: int
    wait_mean_s: int | None
    wait_p95_s: int | None


@dataclass(frozen=True, slots=True)
class Lately:
    """The last day and week until ``at_s``. ``hours`` and ``days``: mean number of held GPUs in each, oldest first."""

    at_s: int
    day: Span
    week: Span
    hours: tuple[float, ...]
    days: tuple[float, ...]


def lately(spent: Iterable[HeldShares], now_s: int) -> Lately:
    hours, days = [0.0] * HOURS, [0.0] * DAYS
    waits: list[tuple[int, int]] = []
    for one in spent:
        for begin_s, end_s, _, gpu_millionths in one.held(
            now_s if one.ended_at_s is None else one.ended_at_s
        ):
            for bins, length_s in ((hours, HOUR_S), (days, DAY_S)):
                first_s = now_s - len(bins) * length_s
                last = min(len(bins), -(-(end_s - first_s) // length_s))
                for n in range(max(0, (begin_s - first_s) // length_s), last):
                    from_s = first_s + n * length_s
                    held_s = min(end_s, from_s + length_s) - max(begin_s, from_s)
                    bins[n] += max(0, held_s) * gpu_millionths / 1e6 / length_s
        if one.started_at_s is not None and now_s - WEEK_S <= one.started_at_s <= now_s:
            waits.append((one.started_at_s, max(0, one.scheduled_at_s - one.waits_since_s)))
    return Lately(
        now_s,
        _span(hours, [wait_s for at_s, wait_s in waits if at_s >= now_s - DAY_S]),
        _span(days, [wait_s for _, wait_s in waits]),
        tuple(round(gpus, 3) for gpus in hours),
        tuple(round(gpus, 3) for gpus in days),
    )


def _span(gpus: list[float], waits: list[int]) -> Span:
    mean = round(sum(waits) / len(waits)) if waits else None
    return Span(round(sum(gpus) / len(gpus), 3), len(waits), mean, p95(waits))
