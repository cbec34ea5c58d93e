"""The fragments of a node: the free GPU that the typical requests cannot use.

F_n(M) of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent",
USENIX ATC 2023.
"""

from __future__ import annotations

from bisect import bisect_right

from fgpu_scheduler.core.placement import NodeAmounts
from fgpu_scheduler.core.scores.workload import Workload
from fgpu_scheduler.core.shares import devices_needed


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
