"""Amounts, instants and lengths of bars as pages show them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from fgpu_scheduler import format_milli, parse_milli
from fgpuspawner.service.view import Json


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in time: for machines, and in UTC for readers without scripts."""

    machine: str
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: a part of a whole, in words. ``percent`` is its length, to a tenth."""

    label: str
    text: str
    percent: str


@dataclass(frozen=True, slots=True)
class Use:
    """What a running session uses now, or why that is not known."""

    memory: Bar | None
    compute: Bar | None
    trouble: str


def instant(at_s: int) -> Instant:
    """Return an instant for machines and readers."""
    at = datetime.fromtimestamp(at_s, UTC)
    return Instant(at.strftime("%Y-%m-%dT%H:%M:%SZ"), at.strftime("%Y-%m-%d %H:%M UTC"))


def moment(at: Instant) -> str:
    """Return an instant as HTML. Both its texts are made here, and of digits."""
    return f'<time datetime="{at.machine}">{at.text}</time>'


def use(meter: Json | None) -> Use | None:
    """Return what a session's meter says; None where nothing was measured yet."""
    if meter is None:
        return None
    memory = compute = None
    used, limit = meter["memory_used_mib"], meter["memory_limit_mib"]
    if used is not None:
        memory = Bar("Memory", f"{used} of {limit} MiB", percent(used, limit))
    sm, entitled = meter["sm_percent"], meter["compute_entitled_percent"]
    if sm is not None:
        # Half of a percent is rounded up, as the page's script does it: "12.5:.0f" would be 12.
        computed = math.floor(sm + 0.5)
        compute = Bar(
            "Compute", f"{computed} % of its {entitled} %", percent(round(sm * 1000), entitled * 1000)
        )
    return Use(memory, compute, meter["trouble"] or "")


def duration(seconds: int) -> str:
    """Return a length of time: "45 s", "12 min", "3 h 05 min", "2 d 4 h"."""
    if seconds < 60:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def mib(amount: int) -> str:
    """Return memory exactly: in GiB where three decimals hold it, else in MiB."""
    return f"{gib(amount)} GiB" if is_gib(amount) else f"{amount} MiB"


def is_gib(amount: int) -> bool:
    """Return whether three decimals of a GiB hold this many MiB."""
    # 1/8 GiB is 128 MiB: the finest that three decimals hold.
    return amount % 128 == 0 and amount >= 512


def gib(amount: int) -> str:
    """Return MiB as GiB."""
    return format_milli(amount * 1000 // 1024)


def percent(part: int, whole: int) -> str:
    """Return a bar's length in percent, rounded down to a tenth; "0" where there is nothing at all."""
    if whole <= 0 or part <= 0:
        return "0"
    tenths = min(1000, part * 1000 // whole)
    return f"{tenths // 10}.{tenths % 10}"


def part_of(part: int, whole: int, key: str, unit: str) -> str:
    """Return "0.5 of 2 fGPU", "1 of 16 GiB": thousandths, or MiB of memory."""
    if key != "memory_mib":
        return f"{format_milli(part)} of {format_milli(whole)} {unit}"
    if all(amount == 0 or is_gib(amount) for amount in (part, whole)):
        return f"{gib(part)} of {gib(whole)} GiB"
    return f"{part} of {whole} {unit}"


def whole(amount: str | int) -> int:
    """Return an amount of the API in thousandths, or memory in MiB: sums stay exact."""
    return amount if isinstance(amount, int) else parse_milli(amount, field="amount")


def ordinal(number: int) -> str:
    """Return "1st", "2nd", "3rd", "4th", "11th", "21st"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
