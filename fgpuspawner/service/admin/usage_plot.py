"""The bars of the usage report, as numbers for an SVG. Pure: the page draws them, with the table beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fgpuspawner.meter.usage_report import Line

WIDTH, HEIGHT = 900, 220
LEFT, TOP, BOTTOM = 64, 22, 40
MOST_LABELS = 8


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, in the units of the drawing; ``label`` stands under it, or is empty."""

    x: float
    y: float
    width: float
    height: float
    title: str
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """One horizontal line, at a number of GPU-hours."""

    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    bottom: int = HEIGHT - BOTTOM


def plot(lines: Sequence[Line]) -> Plot:
    """Return a bar for each line, as high as its GPU-hours, on a scale that ends at a round number."""
    top = round_up(max((line.gpu_hours for line in lines), default=0))
    tall, step = HEIGHT - TOP - BOTTOM, (WIDTH - LEFT) / max(1, len(lines))
    every = -(-len(lines) // MOST_LABELS)
    bars = []
    for at, line in enumerate(lines):
        high = tall * line.gpu_hours / top
        wide = max(1.0, step * 0.8)
        bars.append(
            Bar(
                round(LEFT + at * step + (step - wide) / 2, 2),
                round(HEIGHT - BOTTOM - high, 2),
                round(wide, 2),
                round(high, 2),
                f"{line.name}: {number(line.gpu_hours)} GPU-hours",
                line.name[5:] if at % every == 0 else "",
            )
        )
    marks = (Mark(round(HEIGHT - BOTTOM - tall * part, 2), number(top * part)) for part in (0, 0.5, 1))
    return Plot(tuple(bars), tuple(marks))


def number(value: float) -> str:
    """Return a sum with all its digits, up to thousandths: never as 1e+06."""
    whole, _, rest = f"{value:,.3f}".partition(".")
    rest = rest.rstrip("0")
    return f"{whole}.{rest}" if rest else whole


def round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ... or of their tenths; 1 for 0."""
    if value <= 0:
        return 1
    power = 10.0 ** math.floor(math.log10(value))
    return next(round(factor * power, 12) for factor in (1, 2, 5, 10) if value <= factor * power * (1 + 1e-9))
