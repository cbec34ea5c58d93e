"""The default: keep the most worth of what is left, for what people ask next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

from fgpu_scheduler.core.model import Node
from fgpu_scheduler.core.placement import Room, Score, best_fit
from fgpu_scheduler.core.scores.cutting import residual_values
from fgpu_scheduler.core.scores.fragmentation import fragmentation
from fgpu_scheduler.core.scores.workload import Workload

# Set on seeds 42 to 46 of bench/scheduler/openb.py; half and double of each change little.
TYPICAL_PERCENT = 75
RESIDUAL = 20
STRANDED = 10
FRAGMENT = 2
SERVED_PERCENT = 90
"""A GPU counts as served by this part of the CPU and memory that the workload uses per GPU on average."""
OPENED = 6400
OPENED_AT_MOST = 300
"""What it costs to open an untouched device, in thousandths of a GPU: the first over the number of devices.

Where devices are few, the fraction that would match a gap may not come before they run out: best fit loses
less there. Where they are many, matching is all.
"""


def worth(workload: Workload, nodes: Sequence[Node]) -> Score:
    """Return the score for ``nodes``, those that ``workload`` may use, by loss of worth.

    Three terms, each in thousandths of a GPU: what the free parts of devices lose beside their size, with
    each part worth what popular fractions can be cut from it (`residual_values`); free GPU that the node's
    CPU and memory cannot serve any more; and the fragments of FGD. Equal losses go by best fit. On one
    node, and without a workload, it is best fit.
    """
    if len(nodes) < 2 or not any(shape.fgpu_milli > 0 for shape, _ in workload.counts):
        return best_fit
    fragments, scale = fragmentation(workload, percent=TYPICAL_PERCENT)
    fgpu = sum(s.fgpu_milli * n for s, n in workload.counts)
    cpu = sum(s.cpu_milli * n for s, n in workload.counts if s.fgpu_milli > 0) * SERVED_PERCENT
    memory = sum(s.memory_mib * n for s, n in workload.counts if s.fgpu_milli > 0) * SERVED_PERCENT

    opened = min(OPENED_AT_MOST, OPENED // max(1, sum(len(node.devices) for node in nodes)))

    @cache
    def values(capacity: int) -> tuple[int, ...]:
        demand: dict[int, int] = {}
        for shape, count in workload.counts:
            demand[shape.fgpu_milli] = demand.get(shape.fgpu_milli, 0) + count
        return residual_values(demand, capacity_milli=capacity)

    @cache
    def lost(free: int, capacity: int) -> int:
        if free >= capacity:
            return -opened
        return 1000 * (free - values(capacity)[free]) // capacity if free > 0 else 0

    @lru_cache(maxsize=1 << 16)
    def potential(room: Room) -> int:
        residual = free_milli = 0
        for free, capacity in zip(room.free_milli, room.capacity_milli, strict=True):
            residual += lost(free, capacity)
            free_milli += free
        served = free_milli
        if cpu:
            served = min(served, 100 * room.cpu_milli * fgpu // cpu)
        if memory:
            served = min(served, 100 * room.memory_mib * fgpu // memory)
        stranded = 0
        if served < free_milli:
            stranded = 1000 * (free_milli - served) * len(room.capacity_milli) // sum(room.capacity_milli)
        return scale * (RESIDUAL * residual + STRANDED * stranded) + FRAGMENT * fragments(room)

    def score(before: Room, after: Room, taken: tuple[int, ...]) -> tuple[int, ...]:
        return (potential(after) - potential(before), *best_fit(before, after, taken))

    return score
