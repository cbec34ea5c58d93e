"""Bars of pages: a part of a whole, in words and as a length. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from fgpu_scheduler import format_milli, parse_milli
from fgpuspawner.meter.model import Meter
from fgpuspawner.text.sessions import gib_words


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: a part of a whole, in words. ``percent`` is its length, to a tenth."""

    label: str
    text: str
    percent: str


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a stacked bar, from ``x`` on, in percent as ``width`` is. ``words`` say how much of what it is."""

    kind: str
    words: str
    x: str
    width: str


@dataclass(frozen=True, slots=True)
class Stack:
    """All there is of a resource, as parts. ``own`` is the viewer's part of what they can use; empty: nothing."""

    label: str
    text: str
    parts: tuple[Part, ...]
    own: str | None


@dataclass(frozen=True, slots=True)
class Use:
    """What a running session uses now, or why that is not known."""

    memory: Bar | None
    compute: Bar | None
    trouble: str
    lent: str = ""


def memory_bar(label: str, used_mib: int | None, limit_mib: int | None) -> Bar | None:
    """Return GPU memory of a session's limit; None where one of them is not known."""
    if used_mib is None or not limit_mib:
        return None
    used, _ = numbers_of([used_mib, max(0, limit_mib - used_mib)], "memory_mib")
    return Bar(label, f"{format_milli(used)} of {gib_words(limit_mib)} GiB", percent(used_mib, limit_mib))


def use(meter: Meter | None) -> Use | None:
    """Return what a session's meter says; None where nothing was measured yet."""
    if meter is None:
        return None
    compute = None
    sm, entitled = meter.sm_percent, meter.compute_entitled_percent
    if sm is not None:
        compute = Bar(
            "Compute", compute_words(sm, entitled), percent(round(sm * 1000), (entitled or 100) * 1000)
        )
    memory = memory_bar("Memory", meter.memory_used_mib, meter.memory_limit_mib)
    if memory is not None and meter.memory_context_mib:
        memory = replace(memory, text=memory.text + context_words(meter.memory_context_mib))
    return Use(
        memory,
        compute,
        meter.trouble or "",
        lent_now(sm, entitled, meter.compute_lent_percent),
    )


def rounded(percent: float) -> int:
    """Return a percent as it is shown: half of one is rounded up, as scripts do it; "12.5:.0f" would be 12."""
    return math.floor(percent + 0.5)


def compute_words(computed: float, entitled: int | None) -> str:
    """Return what of a GPU is computed with: of the share or beyond it, or of the GPU where compute is not limited."""
    now = rounded(computed)
    if entitled is None:
        return f"{now} % of GPU"
    return f"{now} %" if now > entitled else f"{now} of {entitled} %"


def lent_now(computed: float | None, entitled: int | None, lent: float | None) -> str:
    """Return from where what is computed beyond the share comes, or who has what is left of it.

    ``lent`` is None where compute is not lent: then nothing is said.
    """
    if computed is None or entitled is None or lent is None:
        return ""
    if (more := rounded(computed) - entitled) > 0:
        return f"{entitled} % share + {more} % borrowed"
    return f"others use {rounded(lent)} % of it" if rounded(lent) else ""


def context_words(mib: int) -> str:
    """Return what of the memory is not the program's, to follow what is used."""
    return f", {gib_words(mib)} of it contexts and code"


HELD = ("mine", "others", "used")
"""Of the kinds of parts."""


def percent(part: int, whole: int) -> str:
    """Return a bar's length in percent, rounded down to a tenth; "0" where there is nothing at all."""
    if whole <= 0 or part <= 0:
        return "0"
    tenths = min(1000, part * 1000 // whole)
    return f"{tenths // 10}.{tenths % 10}"


def part_of(part: int, whole: int, key: str, unit: str) -> str:
    """Return "0.5 of 2 fGPU", "1 of 16 GiB" of thousandths, or of MiB of memory."""
    own, rest = numbers_of([part, whole - part], key)
    return f"{format_milli(own)} of {format_milli(own + rest)} {unit}"


def numbers_of(amounts: Sequence[int], key: str) -> list[int]:
    """Return thousandths as they are, or MiB of memory in thousandths of a GiB.

    These are rounded so that they add up, and as finely as it takes to show no amount as nothing.
    """
    if key != "memory_mib":
        return list(amounts)
    found: list[int] = []
    for grain in (1,) if all(amount % 128 == 0 for amount in amounts) else (100, 10, 1):
        ends = [round(mib * 1000 / 1024 / grain) * grain for mib in accumulate(amounts, initial=0)]
        found = [end - begin for begin, end in pairwise(ends)]
        if all(found[n] for n, amount in enumerate(amounts) if amount):
            break
    return found


def stack(
    label: str, amounts: Sequence[tuple[str, str, int]], total: int, key: str, unit: str, own: str | None
) -> Stack:
    """Return a stacked bar of these kinds, words and amounts; what holds nothing is left out, but for what is free."""
    # An administrator may have made machines smaller since: then more is held than there is.
    whole = max(total, sum(amount for _, _, amount in amounts), 1)
    found, begin = [], 0
    numbers = numbers_of([amount for _, _, amount in amounts], key)
    for (kind, words, amount), number in zip(amounts, numbers, strict=True):
        if amount > 0 or kind == "free":
            told = f"{format_milli(number)} {words}"
            found.append(Part(kind, told, percent(begin, whole), percent(amount, whole)))
            begin += amount
    held = sum(number for (kind, _, _), number in zip(amounts, numbers, strict=True) if kind in HELD)
    return Stack(label, f"{format_milli(held)} of {format_milli(sum(numbers))} {unit}", tuple(found), own)


def whole(amount: str | int) -> int:
    """Return an amount of the API in thousandths, or memory in MiB: sums stay exact."""
    return amount if isinstance(amount, int) else parse_milli(amount, field="amount")
