"""Fragmentation gradient descent: the placement that makes the fewest fragments."""

from __future__ import annotations

from functools import lru_cache

from fgpu_scheduler.core.node_table import Ints, PlacementBatch
from fgpu_scheduler.core.placement import NodeAmounts, Score
from fgpu_scheduler.core.scores.fragmentation import Fragmentation
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
    return _Fgd(Fragmentation(workload, percent=TYPICAL_PERCENT))


class _Fgd:
    def __init__(self, fragments: Fragmentation) -> None:
        self._fragments = fragments
        self._potential = lru_cache(maxsize=1 << 16)(fragments)
        self._step = STEP * fragments.scale

    def __call__(self, before: NodeAmounts, after: NodeAmounts, taken: tuple[int, ...]) -> tuple[int, ...]:
        return ((self._potential(after) - self._potential(before)) // self._step,)

    def batch(self, takes: PlacementBatch) -> tuple[Ints, ...]:
        return (self._fragments.growth(takes) // self._step,)
