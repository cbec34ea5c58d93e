"""Usage reports: sums of use and waits over a span of days. Pure.

Days are in UTC. A session counts on each day for the time that it held its shares; its wait counts on the day of its
start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum

from fgpu_scheduler import HeldShares

DAY_S = 24 * 3600
MOST_DAYS = 366


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
        mean = round(sum(self.waits) / len(self.waits)) if self.waits else None
        return Line(
            name,
            len(self.ids),
            len(self.waits),
            _hours(self.gpu_millionths_s, 1_000_000),
            _hours(self.fgpu_milli_s, 1000),
            mean,
            p95(self.waits),
        )


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
                _add(sums.setdefault(name, _Sum()), one, piece)
            _add(total, one, piece)
        if one.started_at_s is not None and begin_s <= one.started_at_s < end_s:
            wait_s = max(0, one.scheduled_at_s - one.waits_since_s)
            for name in _names(one, by, one.started_at_s):
                own = sums.setdefault(name, _Sum())
                own.waits.append(wait_s)
                own.ids.add(one.session_id)
            total.waits.append(wait_s)
            total.ids.add(one.session_id)
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


Piece = tuple[int, int, int, int]
"""Begin and end of holding an amount, in thousandths of an fGPU and millionths of a GPU."""


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


def _add(found: _Sum, one: HeldShares, piece: Piece) -> None:
    from_s, to_s, fgpu_milli, gpu_millionths = piece
    found.ids.add(one.session_id)
    found.gpu_millionths_s += gpu_millionths * (to_s - from_s)
    found.fgpu_milli_s += fgpu_milli * (to_s - from_s)


def _hours(parts_s: int, of: int) -> float:
    return round(parts_s / of / 3600, 3)
