"""The hundredths of each period in which a session may run kernels. Pure.

A slot is ``(first, end)`` in hundredths, without ``end``. libfgpu counts the hundredths by the same clock in every
session, so sessions with different slots run in turn.
"""

from __future__ import annotations

from collections.abc import Iterable

HUNDREDTHS = 100

Slots = tuple[tuple[int, int], ...]
"""Ascending, not overlapping."""


def assign(taken: Iterable[Slots], percent: int) -> Slots:
    """Return slots of ``percent`` hundredths in all, beside those that the neighbours have ``taken``.

    1. The smallest gap that is large enough, the first of equal ones, so that large gaps stay whole.
    2. Otherwise the largest gaps first.
    3. If the gaps are too small (an administrator changed the unit while sessions ran), the rest overlaps the
       hundredths with the fewest holders.

    Raises:
        ValueError: ``percent`` is not 1 to 100.
    """
    if not 1 <= percent <= HUNDREDTHS:
        raise ValueError(f"{percent} is no share of compute; it must be 1 to 100")
    holders = [0] * HUNDREDTHS
    for slots in taken:
        for first, end in slots:
            for hundredth in range(first, end):
                holders[hundredth] += 1
    gaps = sorted(_runs(h for h in range(HUNDREDTHS) if not holders[h]), key=lambda gap: gap[1] - gap[0])
    for first, end in gaps:
        if end - first >= percent:
            return ((first, first + percent),)
    chosen: list[int] = []
    for first, end in sorted(gaps, key=lambda gap: (gap[0] - gap[1], gap[0])):
        chosen.extend(range(first, min(end, first + percent - len(chosen))))
    held = sorted((h for h in range(HUNDREDTHS) if holders[h]), key=lambda h: (holders[h], -h))
    chosen.extend(held[: percent - len(chosen)])
    return tuple(_runs(sorted(chosen)))


def render(slots: Slots) -> str:
    return ",".join(f"{first}-{end}" for first, end in slots)


def parse(text: str) -> Slots:
    """Return the slots in such a text; raises ValueError if it is not one."""
    found: list[tuple[int, int]] = []
    for piece in text.split(","):
        first, dash, end = piece.partition("-")
        if not (dash and first.isascii() and first.isdigit() and end.isascii() and end.isdigit()):
            raise ValueError(f"{piece!r} is no slot such as 50-75")
        slot = int(first), int(end)
        if not (found[-1][1] if found else 0) <= slot[0] < slot[1] <= HUNDREDTHS:
            raise ValueError(f"{piece!r} is not within 0-100, or not after the slot before it")
        found.append(slot)
    return tuple(found)


def _runs(ascending: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, each without its end."""
    runs: list[tuple[int, int]] = []
    for number in ascending:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
