"""Bars of pages: a part of a whole, in words and as a length. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fgpu_scheduler import format_milli, parse_milli
from fgpuspawner.service.model import Json
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
    return Bar(label, f"{gib_words(used_mib)} of {gib_words(limit_mib)} GiB", percent(used_mib, limit_mib))


def use(meter: Json | None) -> Use | None:
    """Return what a session's meter says; None where nothing was measured yet."""
    if meter is None:
        return None
    compute = None
    sm, entitled = meter["sm_percent"], meter["compute_entitled_percent"]
    if sm is not None:
        compute = Bar(
            "Compute", compute_words(sm, entitled), percent(round(sm * 1000), (entitled or 100) * 1000)
        )
    memory = memory_bar("Memory", meter["memory_used_mib"], meter["memory_limit_mib"])
    if memory is not None and meter["memory_context_mib"]:
        memory = replace(memory, text=memory.text + context_words(meter["memory_context_mib"]))
    return Use(
        memory,
        compute,
        meter["trouble"] or "",
        lent_now(sm, entitled, meter["compute_lent_percent"]),
    )


def rounded(percent: float) -> int:
    """Return a percent as it is shown: half of one is rounded up, as scripts do it; "12.5:.0f" would be 12."""
    return math.floor(percent + 0.5)


def compute_words(computed: float, entitled: int | None) -> str:
    """Return what of a GPU is computed with: of the share or beyond it, or of the GPU where compute is not limited."""
    now = rounded(computed)
    if entitled is None:
        return f"{now} % of the GPU"
    return f"{now} %" if now > entitled else f"{now} of {entitled} %"


def lent_now(computed: float | None, entitled: int, lent: float | None) -> str:
    """Return from where what is computed beyond the share comes, or who has what is left of it.

    ``lent`` is None where compute is not lent: then nothing is said.
    """
    if computed is None or lent is None:
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
    return f"{number_of(part, key)} of {number_of(whole, key)} {unit}"


def number_of(amount: int, key: str) -> str:
    """Return thousandths, or MiB of memory in GiB."""
    return gib_words(amount) if key == "memory_mib" else format_milli(amount)


def stack(
    label: str, amounts: Sequence[tuple[str, str, int]], total: int, key: str, unit: str, own: str | None
) -> Stack:
    """Return a stacked bar of these kinds, words and amounts; what holds nothing is left out, but for what is free."""
    # An administrator may have made machines smaller since: then more is held than there is.
    whole = max(total, sum(amount for _, _, amount in amounts), 1)
    found, begin = [], 0
    for kind, words, amount in amounts:
        if amount > 0 or kind == "free":
            told = f"{number_of(amount, key)} {words}"
            found.append(Part(kind, told, percent(begin, whole), percent(amount, whole)))
            begin += amount
    held = sum(amount for kind, _, amount in amounts if kind in HELD)
    return Stack(label, part_of(held, total, key, unit), tuple(found), own)


def whole(amount: str | int) -> int:
    """Return an amount of the API in thousandths, or memory in MiB: sums stay exact."""
    return amount if isinstance(amount, int) else parse_milli(amount, field="amount")
