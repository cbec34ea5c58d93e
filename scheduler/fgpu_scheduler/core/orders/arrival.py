"""Orders that look at nothing but who came first."""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler.core.order import Line


def fifo(line: Line) -> Sequence[float]:
    """First come, first served: in the order of their places.

    A session that is queued again has the place of the one that it replaces.
    """
    return [0] * len(line.waiting)


def lifo(line: Line) -> Sequence[float]:
    """Last come, first served."""
    return range(len(line.waiting), 0, -1)
