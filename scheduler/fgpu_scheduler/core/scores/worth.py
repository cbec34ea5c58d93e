"""The default: keep the most worth of what is left, for what people ask next."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import gcd

import numpy as np

from fgpu_scheduler.core.node_table import Ints, PlacementBatch
from fgpu_scheduler.core.placement import NodeAmounts, Score, best_fit
from fgpu_scheduler.core.scores.batch import batch_best_fit
from fgpu_scheduler.core.scores.cluster_totals import ClusterTotals
from fgpu_scheduler.core.scores.cutting_stock import residual_values
from fgpu_scheduler.core.scores.fragmentation import Fragmentation
from fgpu_scheduler.core.scores.scarce_nodes import price_of, prices_of, scarce_nodes
from fgpu_scheduler.core.scores.workload import TypicalRequest, Workload

# Set on seeds 42 to 46 of bench/scheduler/openb.py; half and double of each change little.
TYPICAL_PERCENT = 75
RESIDUAL = 20
STRANDED = 10
FRAGMENT = 2
PRICE = 20
SERVED_PERCENT = 90
"""A GPU counts as served by this part of the CPU and memory that the workload uses per GPU on average."""
OPENED = 6400
OPENED_AT_MOST = 300
"""What it costs to open an untouched device, in thousandths of a GPU: the first over the number of devices.

Where devices are few, the fraction that would match a gap may not come before they run out: best fit loses
less there. Where they are many, matching is all.
"""


def worth(workload: Workload, cluster: ClusterTotals) -> Score:
    """Return the score for the nodes of ``cluster``, those that ``workload`` may use, by loss of worth.

    Five terms, each in thousandths of a GPU: what the free parts of devices lose beside their size, with
    each part worth what popular fractions can be cut from it (`residual_values`); free GPU that the node's
    CPU and memory cannot serve any more; the price of the model that is taken; that of a whole node of which
    there are few (`scarce_nodes`); and the fragments of FGD.
    Equal losses go by best fit; who fills whole GPUs then goes to the node left with the least CPU, as
    much CPU is for whoever needs it. Where people ask for more CPU (or memory) than the nodes have, some
    GPU stays without, whatever is done, and that does not count. On one node, and without a workload, it
    is best fit.
    """
    if cluster.nodes < 2 or not any(shape.fgpu_milli > 0 for shape, _ in workload.counts):
        return best_fit
    return _Worth(workload, cluster)


def prices(workload: Workload, cluster: ClusterTotals) -> dict[str, int]:
    """Return for each GPU model what one of it costs whom any would do, in thousandths of a GPU.

    It is the part of these GPUs that those will ask for who can use no other, if everything is asked for: 1000
    where they alone would fill them. Models that nobody asks for by name cost nothing, and are left out.
    """
    there: dict[str, int] = {}
    for kind, count in cluster.kinds:
        there[kind.model] = there.get(kind.model, 0) + kind.capacity_milli * count
    named: dict[str, int] = {}
    for shape, count in workload.counts:
        named[shape.gpu_model] = named.get(shape.gpu_model, 0) + shape.fgpu_milli * count
    everything = sum(named.values())
    found = {
        model: min(1000, 1000 * named.get(model, 0) * cluster.capacity_milli // max(1, everything * own))
        for model, own in sorted(there.items())
        if model and own > 0
    }
    return {model: price for model, price in found.items() if price > 0}


class _Worth:
    def __init__(self, workload: Workload, cluster: ClusterTotals) -> None:
        self._fragments = Fragmentation(workload, percent=TYPICAL_PERCENT)
        self._scale = self._fragments.scale
        self._opened = min(OPENED_AT_MOST, OPENED // max(1, cluster.devices))
        self._prices = prices(workload, cluster)
        self._scarce = scarce_nodes(workload, cluster)
        self._demand: dict[int, int] = {}
        for shape, count in workload.counts:
            self._demand[shape.fgpu_milli] = self._demand.get(shape.fgpu_milli, 0) + count
        self._per_cpu = _per(workload, cluster, lambda one: one.cpu_milli)
        self._per_memory = _per(workload, cluster, lambda one: one.memory_mib)
        self._lost: dict[int, tuple[list[int], Ints]] = {}
        self._potential = lru_cache(maxsize=1 << 16)(self._worth)

    def __call__(self, before: NodeAmounts, after: NodeAmounts, taken: tuple[int, ...]) -> tuple[int, ...]:
        lost = self._potential(after) - self._potential(before)
        price = self._prices.get(before.models[taken[0]], 0) if taken and self._prices else 0
        if price:
            at = taken[0]
            each = 1000 * (before.free_milli[at] - after.free_milli[at]) // before.capacity_milli[at]
            lost += self._scale * PRICE * (price * each * len(taken) // 1000)
        fit = best_fit(before, after, taken)
        return (lost, *fit, after.cpu_milli if taken and not fit[0] else 0)

    def batch(self, takes: PlacementBatch) -> tuple[Ints, ...]:
        capacity = takes.capacity_milli
        _, losses = self._losses(capacity)
        devices, row = takes.devices, takes.row
        after = takes.sum_after(), takes.cpu_after[row], takes.memory_after[row]
        stranded = self._stranded_many(*after, devices[row], capacity)
        before = takes.free_milli.sum(axis=1), takes.cpu_milli, takes.memory_mib
        stranded -= self._stranded_many(*before, devices, capacity)[row]
        lost = RESIDUAL * takes.changed(losses) + STRANDED * stranded
        if self._scarce:
            lost += PRICE * prices_of(self._scarce, *before)[row]
            if not takes.devices_taken:  # Whoever takes of its GPU leaves no node whole.
                lost -= PRICE * prices_of(self._scarce, *after)
        if self._prices and takes.devices_taken:
            price = np.array([self._prices.get(kind.model, 0) for kind in takes.kinds], dtype=np.int64)
            each = 1000 * (takes.before - takes.after) // capacity
            lost += PRICE * (price[takes.kind] * each * takes.devices_taken // 1000)
        lost = self._scale * lost + FRAGMENT * self._fragments.growth(takes)
        cpu = np.where((takes.after == 0) & (takes.devices_taken > 0), takes.cpu_after[row], 0)
        return lost, *batch_best_fit(takes), cpu

    def _losses(self, capacity: int) -> tuple[list[int], Ints]:
        """Return what each free amount of a device has lost, in thousandths of a GPU: twice the same."""
        losses = self._lost.get(capacity)
        if losses is None:
            found = 1000 * (np.arange(capacity + 1) - residual_values(self._demand, capacity_milli=capacity))
            found //= capacity
            found[capacity] = -self._opened
            losses = self._lost[capacity] = found.tolist(), found
        return losses

    def _worth(self, room: NodeAmounts) -> int:
        residual = free_milli = 0
        for free, capacity in zip(room.free_milli, room.capacity_milli, strict=True):
            if free > 0:
                residual += self._losses(capacity)[0][min(free, capacity)]
            free_milli += free
        served = free_milli
        for host, (fgpu, each) in ((room.cpu_milli, self._per_cpu), (room.memory_mib, self._per_memory)):
            if each:
                served = min(served, host * fgpu // each)
        stranded = 0
        if served < free_milli:
            stranded = 1000 * (free_milli - served) * len(room.capacity_milli) // sum(room.capacity_milli)
        lost = RESIDUAL * residual + STRANDED * stranded
        if self._scarce:
            lost -= PRICE * price_of(self._scarce, free_milli, room.cpu_milli, room.memory_mib)
        return self._scale * lost + FRAGMENT * self._fragments(room)

    def _stranded_many(self, free_milli: Ints, cpu: Ints, memory: Ints, devices: Ints, capacity: int) -> Ints:
        served = free_milli
        for host, (fgpu, each) in ((cpu, self._per_cpu), (memory, self._per_memory)):
            if each:
                served = np.minimum(served, host * fgpu // each)
        return np.asarray(1000 * (free_milli - served) * devices // (devices * capacity))


def _per(
    workload: Workload, cluster: ClusterTotals, amount: Callable[[TypicalRequest | ClusterTotals], int]
) -> tuple[int, int]:
    """Return how much fGPU is served by how much CPU, or memory; by 0 where it always is, or cannot be."""
    fgpu = sum(s.fgpu_milli * n for s, n in workload.counts)
    if sum(amount(s) * n for s, n in workload.counts) * cluster.capacity_milli > amount(cluster) * fgpu:
        return 1, 0
    beside = sum(amount(s) * n for s, n in workload.counts if s.fgpu_milli > 0)
    return _ratio(100 * fgpu, SERVED_PERCENT * beside)


def _ratio(fgpu: int, host: int) -> tuple[int, int]:
    """Return both without their common factor, and small enough that products stay inside 64 bits."""
    factor = max(1, gcd(fgpu, host))
    fgpu, host = fgpu // factor, host // factor
    while fgpu >= 1 << 31:
        fgpu, host = fgpu >> 1, -(-host // 2)
    return fgpu, host
