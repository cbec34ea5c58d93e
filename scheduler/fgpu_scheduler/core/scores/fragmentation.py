"""How much of a node's free GPU the typical shapes cannot use: F_n(M) of the FGD paper.

Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent", USENIX ATC 2023.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cache

from fgpu_scheduler.core.placement import Room
from fgpu_scheduler.core.scores.workload import Workload
from fgpu_scheduler.core.shares import devices_needed

Potential = Callable[[Room], int]
"""A number for a node's state; a placement's score is by how much it raises it."""


def fragmentation(workload: Workload, *, percent: int) -> tuple[Potential, int]:
    """Return F_n(M) for the popular shapes that make ``percent`` of the workload, and its scale.

    The potential is in thousandths of a GPU times the scale (the number of requests it rests on).
    A shape that cannot run on the node makes all of its free GPU a fragment; so does one without GPU,
    as in the paper. A shape that can run makes those devices fragments that are too full for it.
    """
    shapes = sorted(workload.popular(percent), key=lambda item: (item[0].cpu_milli, item[0]))
    needs_cpu = [shape.cpu_milli for shape, _ in shapes]
    scale = sum(count for _, count in shapes)

    @cache
    def fragment(runnable: int, free: int, capacity: int) -> int:
        # Of one device, while the node's CPU is enough for this many of the shapes.
        usable = sum(
            count
            for shape, count in shapes[:runnable]
            if 0 < shape.fgpu_milli <= free and devices_needed(shape.fgpu_milli, capacity_milli=capacity) == 1
        )
        return (scale - usable) * (1000 * free // capacity)

    several = [
        (at, shape.fgpu_milli, count) for at, (shape, count) in enumerate(shapes) if shape.fgpu_milli > 0
    ]

    @cache
    def spanning(capacity: int) -> tuple[tuple[int, int, int], ...]:
        needed = ((at, devices_needed(fgpu, capacity_milli=capacity), n) for at, fgpu, n in several)
        return tuple((at, devices, n) for at, devices, n in needed if devices is not None and devices > 1)

    def potential(room: Room) -> int:
        runnable = bisect_right(needs_cpu, room.cpu_milli)
        total = 0
        for free, capacity in zip(room.free_milli, room.capacity_milli, strict=True):
            if free > 0:
                total += fragment(runnable, free, capacity)
        for capacity in dict.fromkeys(room.capacity_milli):
            for at, devices, count in spanning(capacity):
                whole = sum(
                    1
                    for free, own in zip(room.free_milli, room.capacity_milli, strict=True)
                    if free == own == capacity
                )
                if at < runnable and whole >= devices:
                    total -= count * 1000 * whole
        return total

    return potential, max(1, scale)
