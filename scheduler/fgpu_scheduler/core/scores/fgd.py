"""Fragmentation gradient descent (FGD): choose the placement that makes the fewest fragments.

A fragment is free GPU of a node that the typical requests cannot use: F_n(M) of Weng et al., "Beware of Fragmentation:
Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC 2023.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from fgpu_scheduler.core.node_table import Ints, PlacementBatch
from fgpu_scheduler.core.placement import NodeAmounts, Score
from fgpu_scheduler.core.scores.workload import Workload
from fgpu_scheduler.core.shares import devices_needed

#: The percentage of requests that count as typical, as in the paper.
TYPICAL_PERCENT = 95
#: Differences below this many thousandths of a GPU count as none. The authors' scheduler rounds its score to whole
#: numbers of 0 to 100, which makes steps of about this size; without them the fullest node gets more requests, and
#: 0.8 points are lost on openb.
STEP = 40


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


class Fragmentation:
    """F_n(M) of the paper for the popular shapes that make ``percent`` of a workload: called with a `NodeAmounts`.

    The unit is thousandths of a GPU times ``scale``, the number of requests counted. For a shape that cannot run on the
    node, or that needs no GPU, all free GPU of the node is a fragment. For a shape that can run, the devices are
    fragments that are too full for it.
    """

    def __init__(self, workload: Workload, *, percent: int) -> None:
        shapes = sorted(workload.popular(percent), key=lambda item: (item[0].cpu_milli, item[0]))
        self._shapes = tuple((shape.fgpu_milli, count) for shape, count in shapes)
        self._needs_cpu = [shape.cpu_milli for shape, _ in shapes]
        self._cpu_steps = np.array(self._needs_cpu, dtype=np.int64)
        self._tables: dict[int, Ints] = {}
        self._span_tables: dict[tuple[int, int], Ints] = {}
        self._fragments: dict[tuple[int, int, int], int] = {}
        self._spans: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self.scale = max(1, sum(count for _, count in shapes))

    def __call__(self, room: NodeAmounts) -> int:
        """Return the fragments of one node."""
        runnable = bisect_right(self._needs_cpu, room.cpu_milli)
        total = 0
        for free, capacity in zip(room.free_milli, room.capacity_milli, strict=True):
            if free > 0:
                total += self._fragment(runnable, free, capacity)
        for capacity in dict.fromkeys(room.capacity_milli):
            spanning = self._spanning(capacity)
            if spanning:
                own = zip(room.free_milli, room.capacity_milli, strict=True)
                whole = sum(1 for free, full in own if free == full == capacity)
                for at, devices, count in spanning:
                    if at < runnable and whole >= devices:
                        total -= count * 1000 * whole
        return total

    def growth(self, takes: PlacementBatch) -> Ints:
        """Return by how much each placement raises the fragments of its node."""
        table = self._table(takes.capacity_milli)
        runs = np.searchsorted(self._cpu_steps, takes.cpu_milli, side="right")
        runs_after = np.searchsorted(self._cpu_steps, takes.cpu_after, side="right")
        free = np.maximum(takes.free_milli, 0)
        others = (table[runs_after[:, None], free] - table[runs[:, None], free]).sum(axis=1)
        last, row = runs_after[takes.row], takes.row
        own = table[last, takes.after] - table[last, np.maximum(takes.before, 0)]
        grown = others[row] + takes.devices_taken * own
        if self._spanning(takes.capacity_milli):
            whole = np.count_nonzero(takes.free_milli == takes.capacity_milli, axis=1)
            lost = self._span_table(takes.capacity_milli, takes.free_milli.shape[1])
            grown += lost[runs, whole][row] - lost[last, takes.whole_after()]
        return np.asarray(grown)

    def _fragment(self, runnable: int, free: int, capacity: int) -> int:
        """Return the fragment of a device when the node's CPU is enough for the first ``runnable`` shapes."""
        known = self._fragments.get((runnable, free, capacity))
        if known is None:
            usable = sum(
                count
                for fgpu, count in self._shapes[:runnable]
                if 0 < fgpu <= free and devices_needed(fgpu, capacity_milli=capacity) == 1
            )
            known = (self.scale - usable) * (1000 * free // capacity)
            self._fragments[runnable, free, capacity] = known
        return known

    def _table(self, capacity: int) -> Ints:
        """Return `_fragment` for every free amount: one row per number of runnable shapes."""
        table = self._tables.get(capacity)
        if table is None:
            amounts = np.arange(capacity + 1, dtype=np.int64)
            usable = np.zeros((len(self._shapes) + 1, capacity + 1), dtype=np.int64)
            for at, (fgpu, count) in enumerate(self._shapes):
                usable[at + 1] = usable[at]
                if fgpu > 0 and devices_needed(fgpu, capacity_milli=capacity) == 1:
                    usable[at + 1, fgpu:] += count
            table = self._tables[capacity] = (self.scale - usable) * (1000 * amounts // capacity)
        return table

    def _spanning(self, capacity: int) -> tuple[tuple[int, int, int], ...]:
        """Return the index, number of devices and count of each shape that needs several devices."""
        spanning = self._spans.get(capacity)
        if spanning is None:
            needed = (
                (at, devices_needed(fgpu, capacity_milli=capacity) or 0, count)
                for at, (fgpu, count) in enumerate(self._shapes)
            )
            spanning = self._spans[capacity] = tuple((at, d, n) for at, d, n in needed if d > 1)
        return spanning

    def _span_table(self, capacity: int, width: int) -> Ints:
        """Return what shapes of several devices can use, by number of runnable shapes and of empty devices."""
        table = self._span_tables.get((capacity, width))
        if table is None:
            table = self._span_tables[capacity, width] = np.zeros(
                (len(self._shapes) + 1, width + 1), dtype=np.int64
            )
            whole = np.arange(width + 1, dtype=np.int64)
            for at, devices, count in self._spanning(capacity):
                table[at + 1 :, devices:] += count * 1000 * whole[devices:]
        return table
