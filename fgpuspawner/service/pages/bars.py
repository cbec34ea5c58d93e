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
    """One part of a stacked bar; ``x`` and ``width`` are in percent. ``words`` say the amount and its kind."""

    kind: str
    words: str
    x: str
    width: str


@dataclass(frozen=True, slots=True)
class Stack:
    """All of a resource, as parts. ``own`` is the viewer's use of what is available to them, or empty."""

    label: str
    text: str
    parts: tuple[Part, ...]
    own: str | None


@dataclass(frozen=True, slots=True)
class Use:
    """A running session's current use, or why it is unknown."""

    memory: Bar | None
    compute: Bar | None
    trouble: str
    lent: str = ""


def memory_bar(label: str, used_mib: int | None, limit_mib: int | None) -> Bar | None:
    """Return a bar of GPU memory against the session's limit; None if either is unknown."""
    if used_mib is None or not limit_mib:
        return None
    used, _ = numbers_of([used_mib, max(0, limit_mib - used_mib)], "memory_mib")
    return Bar(label, f"{format_milli(used)} of {gib_words(limit_mib)} GiB", percent(used_mib, limit_mib))


def use(meter: Meter | None) -> Use | None:
    """Return a session's meter in words; None if nothing was measured yet."""
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
    """Return a percent as shown, with halves rounded up as in the scripts; "12.5:.0f" would be 12."""
    return math.floor(percent + 0.5)


def compute_words(computed: float, entitled: int | None) -> str:
    """Return the compute in use: against the share, or of the GPU if compute is not limited."""
    now = rounded(computed)
    if entitled is None:
        return f"{now} % of GPU"
    return f"{now} %" if now > entitled else f"{now} of {entitled} %"


def lent_now(computed: float | None, entitled: int | None, lent: float | None) -> str:
    """Return how much compute is borrowed, or how much of the share is lent to others.

    ``lent`` is None where compute is not lent: then the text is empty.
    """
    if computed is None or entitled is None or lent is None:
        return ""
    if (more := rounded(computed) - entitled) > 0:
        return f"{entitled} % share + {more} % borrowed"
    return f"others use {rounded(lent)} % of it" if rounded(lent) else ""


def context_words(mib: int) -> str:
    """Return how much of the memory in use is contexts and code, to follow that figure."""
    return f", {gib_words(mib)} of it contexts and code"


HELD = ("mine", "others", "used")
"""Kinds of parts that are held."""


def percent(part: int, whole: int) -> str:
    """Return a bar's length in percent, rounded down to a tenth; "0" for an empty whole."""
    if whole <= 0 or part <= 0:
        return "0"
    tenths = min(1000, part * 1000 // whole)
    return f"{tenths // 10}.{tenths % 10}"


def part_of(part: int, whole: int, key: str, unit: str) -> str:
    """Return "0.5 of 2 fGPU" of thousandths, or "1 of 16 GiB" of MiB."""
    own, rest = numbers_of([part, whole - part], key)
    return f"{format_milli(own)} of {format_milli(own + rest)} {unit}"


def numbers_of(amounts: Sequence[int], key: str) -> list[int]:
    """Return thousandths as they are, or MiB of memory in thousandths of a GiB.

    Memory is rounded so that the parts add up, and finely enough that none is shown as 0.
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
    """Return a stacked bar of these kinds, words and amounts; empty parts are left out, except the free one."""
    # After an administrator made machines smaller, more can be held than there is.
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
