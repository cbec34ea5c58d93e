"""Use of the GPUs and waits: reports over a span of days, and the last day and week. Pure.

In reports days are in UTC. A session counts on each day for the time that it held its shares; its wait counts on the
day of its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum

from fgpu_scheduler import HeldShares

DAY_S = 24 * 3600
MOST_DAYS = 366
HOUR_S = 3600
HOURS, DAYS = 24, 7
WEEK_S = DAYS * DAY_S


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
class Report:
    """The lines of a report, and their total."""

    lines: tuple[Line, ...]
    total: Line


def report(spent: Iterable[HeldShares], by: By, *, first: date, last: date, now_s: int) -> Report:
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
    return Report(tuple(lines), total.line(""))


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
    """A span until now: mean number of held GPUs, number of starts, and their waits in seconds."""

    gpus: float
    starts: int
    wait_mean_s: int | None
    wait_p95_s: int | None


@dataclass(frozen=True, slots=True)
class RecentUse:
    """The last day and week until ``at_s``. ``hours`` and ``days``: mean number of held GPUs in each, oldest first."""

    at_s: int
    day: Span
    week: Span
    hours: tuple[float, ...]
    days: tuple[float, ...]


def recent_use(spent: Iterable[HeldShares], now_s: int) -> RecentUse:
    hours, days = [0.0] * HOURS, [0.0] * DAYS
    waits: list[tuple[int, int]] = []
    for one in spent:
        until_s = now_s if one.ended_at_s is None else one.ended_at_s
        for begin_s, end_s, _, gpu_millionths in one.held(until_s):
            for bins, length_s in ((hours, HOUR_S), (days, DAY_S)):
                first_s = now_s - len(bins) * length_s
                last = min(len(bins), -(-(end_s - first_s) // length_s))
                for n in range(max(0, (begin_s - first_s) // length_s), last):
                    from_s = first_s + n * length_s
                    held_s = min(end_s, from_s + length_s) - max(begin_s, from_s)
                    bins[n] += max(0, held_s) * gpu_millionths / 1e6 / length_s
        if one.started_at_s is not None and now_s - WEEK_S <= one.started_at_s <= now_s:
            waits.append((one.started_at_s, _wait_s(one)))
    return RecentUse(
        now_s,
        _span(hours, [wait_s for at_s, wait_s in waits if at_s >= now_s - DAY_S]),
        _span(days, [wait_s for _, wait_s in waits]),
        tuple(round(gpus, 3) for gpus in hours),
        tuple(round(gpus, 3) for gpus in days),
    )


def _span(gpus: list[float], waits: list[int]) -> Span:
    return Span(round(sum(gpus) / len(gpus), 3), len(waits), _mean(waits), p95(waits))
