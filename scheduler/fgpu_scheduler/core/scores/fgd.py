"""Fragmentation gradient descent: the placement that makes the fewest fragments."""

from __future__ import annotations

from functools import lru_cache

from fgpu_scheduler.core.placement import Room, Score
from fgpu_scheduler.core.scores.fragmentation import fragmentation
from fgpu_scheduler.core.scores.workload import Workload

TYPICAL_PERCENT = 95
"""The part of the requests whose shapes count as typical, as in the paper."""

STEP = 40
"""Differences below this many thousandths of a GPU count as none.

The authors' scheduler rounds its score to whole numbers of 0 to 100, which makes steps of about this size;
without them more is packed onto the node that is already fullest, and 0.8 points are lost on openb.
"""


def fgd(workload: Workload) -> Score:
    """Return the score by growth of the expected fragments, in steps of `STEP`; equal ones go by id."""
    fragments, scale = fragmentation(workload, percent=TYPICAL_PERCENT)
    potential = lru_cache(maxsize=1 << 16)(fragments)

    def score(before: Room, after: Room, taken: tuple[int, ...]) -> tuple[int, ...]:
        return ((potential(after) - potential(before)) // (STEP * scale),)

    return score
