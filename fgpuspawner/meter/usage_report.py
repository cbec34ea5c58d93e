"""Use of the GPUs and waits: reports over a span of days, and the last day and week. Pure.

In reports days are in UTC. A session counts on each day for the time that it held its shares; its wait counts on the
day of its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum

from fgpu_scheduler import HeldShares

DAY_S = 24 * 3600
MOST_DAYS = 366
HOUR_S = 3600
HOURS = 24
WEEK_S = 7 * DAY_S


Piece = tuple[int, int, int, int]
"""Begin and end of holding an amount, in thousandths of an fGPU and millionths of a GPU."""


class By(StrEnum):
    """What a report has one line for."""

    DAY = "day"
    USER = "user"
    HUB_GROUP = "hub-group"
    RESOURCE_GROUP = "resource-group"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class Line:
    """One line. ``sessions`` held shares in the span; ``starts`` of them started in it, after these waits in seconds."""

    name: str
    sessions: int
    starts: int
    gpu_hours: float
    fgpu_hours: float
    wait_mean_s: int | None
    wait_p95_s: int | None


@dataclass(slots=True)
class _Sum:
    ids: set[int] = field(default_factory=set)
    waits: list[int] = field(default_factory=list)
    gpu_millionths_s: int = 0
    fgpu_milli_s: int = 0

    def line(self, name: str) -> Line:
        return Line(
            name,
            len(self.ids),
            len(self.waits),
            round(self.gpu_millionths_s / 1_000_000 / 3600, 3),
            round(self.fgpu_milli_s / 1000 / 3600, 3),
            _mean(self.waits),
            p95(self.waits),
        )

    def hold(self, session_id: int, piece: Piece) -> None:
        from_s, to_s, fgpu_milli, gpu_millionths = piece
        self.ids.add(session_id)
        self.gpu_millionths_s += gpu_millionths * (to_s - from_s)
        self.fgpu_milli_s += fgpu_milli * (to_s - from_s)

    def start(self, session_id: int, wait_s: int) -> None:
        self.ids.add(session_id)
        self.waits.append(wait_s)


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The lines of a report, and their total."""

    lines: tuple[Line, ...]
    total: Line


def report(spent: Iterable[HeldShares], by: By, *, first: date, last: date, now_s: int) -> UsageReport:
    """Return the use from the first to the last day, both included, with a line for each ``by``.

    Days come in order, even empty ones; other lines by GPU-hours, highest first. With ``HUB_GROUP`` a session counts in
    each of its user's groups, so the lines add up to more than the total.
    """
    sums: dict[str, _Sum] = {}
    if by is By.DAY:
        sums = {day.isoformat(): _Sum() for day in days(first, last)}
    total = _Sum()
    begin_s, end_s = starts_at_s(first), min(starts_at_s(last) + DAY_S, now_s)
    for one in spent:
        for piece in _pieces(one, begin_s, end_s, by):
            for name in _names(one, by, piece[0]):
                sums.setdefault(name, _Sum()).hold(one.session_id, piece)
            total.hold(one.session_id, piece)
        if one.started_at_s is not None and begin_s <= one.started_at_s < end_s:
            for name in _names(one, by, one.started_at_s):
                sums.setdefault(name, _Sum()).start(one.session_id, _wait_s(one))
            total.start(one.session_id, _wait_s(one))
    lines = [found.line(name) for name, found in sums.items()]
    if by is not By.DAY:
        lines.sort(key=lambda line: (-line.gpu_hours, -line.sessions, line.name))
    return UsageReport(tuple(lines), total.line(""))


def days(first: date, last: date) -> Iterator[date]:
    return (first + timedelta(days=n) for n in range((last - first).days + 1))


def starts_at_s(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())


def day_of(at_s: int) -> date:
    return datetime.fromtimestamp(at_s, UTC).date()


def p95(values: Sequence[int]) -> int | None:
    """Return the smallest value that at least 95 % of the values do not exceed; None without values."""
    if not values:
        return None
    return sorted(values)[-(-95 * len(values) // 100) - 1]


def _mean(values: Sequence[int]) -> int | None:
    return round(sum(values) / len(values)) if values else None


def _wait_s(one: HeldShares) -> int:
    return max(0, one.scheduled_at_s - one.waits_since_s)


def _pieces(one: HeldShares, begin_s: int, end_s: int, by: By) -> Iterator[Piece]:
    """Return what a session held in the span: a piece for each amount, and for each day if asked by day."""
    until_s = end_s if one.ended_at_s is None else min(one.ended_at_s, end_s)
    for from_s, held_until_s, fgpu_milli, gpu_millionths in one.held(until_s):
        at_s = max(from_s, begin_s)
        while at_s < held_until_s:
            midnight_s = at_s - at_s % DAY_S + DAY_S
            to_s = min(held_until_s, midnight_s) if by is By.DAY else held_until_s
            yield at_s, to_s, fgpu_milli, gpu_millionths
            at_s = to_s


def _names(one: HeldShares, by: By, at_s: int) -> tuple[str, ...]:
    match by:
        case By.DAY:
            return (day_of(at_s).isoformat(),)
        case By.USER:
            return (one.user,)
        case By.RESOURCE_GROUP:
            return (one.resource_group,)
        case By.HUB_GROUP:
            return one.hub_groups or ("(none)",)
        case By.IMAGE:
            return (one.image,)


# -- the last day and week ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A span until now: mean number of held GPUs (None if unknown), number of starts, and their waits in seconds."""

    gpus: float | None
    starts: int
    wait_mean_s: int | None
    wait_p95_s: int | None


@dataclass(frozen=True, slots=True)
class Hour:
    """One hour from ``from_s`` on: mean numbers of held GPUs, used GPUs and waiting requests (None if unknown), and the
    mean wait in seconds before the starts in it.

    A session counts as using its mean compute during all of its run, since only that mean is kept.
    """

    from_s: int
    held: float | None
    used: float | None
    waiting: float | None
    wait_mean_s: int | None


@dataclass(frozen=True, slots=True)
class RecentUse:
    """The last day and week until ``at_s``, and each hour of the week, oldest first."""

    at_s: int
    day: Span
    week: Span
    hours: tuple[Hour, ...]


MEASURED_PART = 0.9
"""Least part of the held GPUs that must have been measured for an hour's use to count as known."""


def recent_use(
    spent: Iterable[HeldShares],
    now_s: int,
    *,
    sm_percents: Mapping[int, float],
    waits: Iterable[tuple[int, int | None]],
    known_from_s: int | None,
) -> RecentUse:
    """Return the use of the last day and week.

    ``sm_percents`` has the mean compute of measured sessions, in percent of a GPU. ``waits`` are begin and end (None:
    now) of waits that no start has ended. Hours that end before ``known_from_s`` are unknown; None: all are.
    """
    first_s = now_s - WEEK_S
    held, used, measured, waiting = ([0.0] * (WEEK_S // HOUR_S) for _ in range(4))
    started: list[tuple[int, int]] = []

    def add(bins: list[float], begin_s: int, end_s: int, amount: float) -> None:
        for n in range(
            max(0, (begin_s - first_s) // HOUR_S), min(len(bins), -(-(end_s - first_s) // HOUR_S))
        ):
            from_s = first_s + n * HOUR_S
            bins[n] += amount * max(0, min(end_s, from_s + HOUR_S) - max(begin_s, from_s)) / HOUR_S

    for one in spent:
        sm_percent = sm_percents.get(one.session_id)
        until_s = now_s if one.ended_at_s is None else one.ended_at_s
        for begin_s, end_s, _, gpu_millionths in one.held(until_s):
            add(held, begin_s, end_s, gpu_millionths / 1e6)
            if gpu_millionths and sm_percent is not None:
                add(measured, begin_s, end_s, gpu_millionths / 1e6)
                add(used, begin_s, end_s, sm_percent / 100)
        add(waiting, one.waits_since_s, one.scheduled_at_s, 1)
        if one.started_at_s is not None and first_s <= one.started_at_s <= now_s:
            started.append((one.started_at_s, _wait_s(one)))
    for begin_s, ended_at_s in waits:
        add(waiting, begin_s, now_s if ended_at_s is None else ended_at_s, 1)
    by_hour: dict[int, list[int]] = {}
    for at_s, wait_s in started:
        by_hour.setdefault(min((at_s - first_s) // HOUR_S, len(held) - 1), []).append(wait_s)

    def hour(n: int) -> Hour:
        from_s = first_s + n * HOUR_S
        if known_from_s is None or from_s + HOUR_S <= known_from_s:
            return Hour(from_s, None, None, None, None)
        use = round(used[n], 3) if measured[n] >= MEASURED_PART * held[n] else None
        return Hour(from_s, round(held[n], 3), use, round(waiting[n], 3), _mean(by_hour.get(n, [])))

    hours = tuple(hour(n) for n in range(len(held)))
    return RecentUse(
        now_s,
        _span(hours[-HOURS:], [wait_s for at_s, wait_s in started if at_s >= now_s - DAY_S]),
        _span(hours, [wait_s for _, wait_s in started]),
        hours,
    )


def _span(hours: Sequence[Hour], waits: list[int]) -> Span:
    known = [hour.held for hour in hours if hour.held is not None]
    return Span(round(sum(known) / len(known), 3) if known else None, len(waits), _mean(waits), p95(waits))
