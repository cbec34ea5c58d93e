"""Bars of pages: a part of a whole, in words and as a length. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fgpu_scheduler import format_milli, parse_milli
from fgpuspawner.service.model import Json
from fgpuspawner.text.sessions import gib, is_gib


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


def memory_bar(label: str, used_mib: int | None, limit_mib: int | None) -> Bar | None:
    """Return GPU memory of a session's limit; None where one of them is not known."""
    if used_mib is None or not limit_mib:
        return None
    return Bar(label, f"{used_mib} of {limit_mib} MiB", percent(used_mib, limit_mib))


def use(meter: Json | None) -> Use | None:
    """Return what a session's meter says; None where nothing was measured yet."""
    if meter is None:
        return None
    compute = None
    sm, entitled = meter["sm_percent"], meter["compute_entitled_percent"]
    if sm is not None:
        # Half of a percent is rounded up, as the page's script does it: "12.5:.0f" would be 12.
        computed = math.floor(sm + 0.5)
        length = percent(round(sm * 1000), entitled * 1000)
        compute = Bar("Compute", f"{computed} % of its {entitled} %", length)
    memory = memory_bar("Memory", meter["memory_used_mib"], meter["memory_limit_mib"])
    return Use(memory, compute, meter["trouble"] or "")


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
