"""The default score: keep the free GPUs most useful for what users will request next.

The loss of a placement has five terms, each in thousandths of a GPU:

1. the residual: a free part of a device is worth what popular fractions can be cut from it (`residual_values`), and
   a placement may leave parts that are worth less than their size;
2. stranded GPU: free GPU that the node's remaining CPU and memory cannot serve;
3. the price of a GPU model that other requests need and that this one does not (`prices`);
4. the price of a whole node of a scarce kind (`scarce_nodes`);
5. the fragments of FGD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from fgpu_scheduler.core.node_table import Ints, PlacementBatch
from fgpu_scheduler.core.placement import NodeAmounts, Score, best_fit
from fgpu_scheduler.core.scores.cutting_stock import residual_values
from fgpu_scheduler.core.scores.fgd import Fragmentation
from fgpu_scheduler.core.scores.simple import batch_best_fit
from fgpu_scheduler.core.scores.workload import ClusterTotals, TypicalRequest, Workload

# Weights, set on seeds 42 to 46 of bench/scheduler/openb.py; half or double of each changes little.
TYPICAL_PERCENT = 75
RESIDUAL = 20
STRANDED = 10
FRAGMENT = 2
PRICE = 20
#: A GPU counts as served by this percentage of the CPU and memory that the workload uses per GPU on average.
SERVED_PERCENT = 90
#: The cost of opening an untouched device, in thousandths of a GPU: OPENED over the number of devices, but at most
#: OPENED_AT_MOST. With few devices the fraction that would fill a gap may not come before the devices run out, so best
#: fit loses less. With many devices it comes.
OPENED = 6400
OPENED_AT_MOST = 300
#: Nodes are scarce if the requests that can run nowhere else will need this many thousandths of them. Set on seeds 42 to
#: 46 of bench/scheduler/openb.py: with 200, up to 0.6 points are lost where many requests are for whole nodes.
LEAST_SCARCE = 500


def worth(workload: Workload, cluster: ClusterTotals) -> Score:
    """Return the score by loss of worth for the nodes of ``cluster``, those that ``workload`` may use.

    Equal losses go by best fit; a placement on whole GPUs then goes to the node left with the least CPU, because other
    nodes with much CPU serve requests that need it. If users request more CPU or memory than the nodes have, some GPU
    stays unused in any case, and does not count as stranded. On one node, and without a workload, it is best fit.
    """
    if cluster.nodes < 2 or not any(shape.fgpu_milli > 0 for shape, _ in workload.counts):
        return best_fit
    return _Worth(workload, cluster)


def prices(workload: Workload, cluster: ClusterTotals) -> dict[str, int]:
    """Return the price of a GPU of each model, for requests that accept other models, in thousandths of a GPU.

    It is the part of these GPUs that the requests for only this model will need, if the demand equals the capacity of
    the cluster: 1000 if they alone would fill them. Models that no request names are left out.
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
            if not takes.devices_taken:  # A placement on a GPU leaves no node whole.
                lost -= PRICE * prices_of(self._scarce, *after)
        if self._prices and takes.devices_taken:
            price = np.array([self._prices.get(kind.model, 0) for kind in takes.kinds], dtype=np.int64)
            each = 1000 * (takes.before - takes.after) // capacity
            lost += PRICE * (price[takes.kind] * each * takes.devices_taken // 1000)
        lost = self._scale * lost + FRAGMENT * self._fragments.growth(takes)
        cpu = np.where((takes.after == 0) & (takes.devices_taken > 0), takes.cpu_after[row], 0)
        return lost, *batch_best_fit(takes), cpu

    def _losses(self, capacity: int) -> tuple[list[int], Ints]:
        """Return what each free amount of a device has lost, in thousandths of a GPU, as a list and as an array."""
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
    """Return how much fGPU is served by how much CPU, or memory; by 0 if it always is, or never can be."""
    fgpu = sum(s.fgpu_milli * n for s, n in workload.counts)
    if sum(amount(s) * n for s, n in workload.counts) * cluster.capacity_milli > amount(cluster) * fgpu:
        return 1, 0
    beside = sum(amount(s) * n for s, n in workload.counts if s.fgpu_milli > 0)
    return _ratio(100 * fgpu, SERVED_PERCENT * beside)


def _ratio(fgpu: int, host: int) -> tuple[int, int]:
    """Return the reduced fraction, small enough that products stay inside 64 bits."""
    factor = max(1, gcd(fgpu, host))
    fgpu, host = fgpu // factor, host // factor
    while fgpu >= 1 << 31:
        fgpu, host = fgpu >> 1, -(-host // 2)
    return fgpu, host


class ScarceNodes(NamedTuple):
    """Nodes that some requests need whole, for their CPU or memory, and the price of one in thousandths of a GPU.

    A node is such a whole node while its free capacity is at least these amounts.
    """

    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    price: int


def scarce_nodes(workload: Workload, cluster: ClusterTotals) -> tuple[ScarceNodes, ...]:
    """Return the scarce nodes of a cluster, by the requests that need all GPUs of a node.

    Scarce nodes have at most half of all GPUs. Requests that fit on the same nodes are counted together. The price of a
    node is its GPU times the part of these nodes that the requests will need that can run nowhere else, if the demand
    equals the capacity of the cluster.
    """
    # A request for less than all GPUs of a node leaves room on it. Requests for one model pay its price (`prices`).
    sizes = {host.capacity_milli for host, _ in cluster.hosts if host.capacity_milli > 0}
    asked = [(shape, n) for shape, n in workload.counts if shape.fgpu_milli in sizes and not shape.gpu_model]
    if not asked:
        return ()
    hosts = np.array([host for host, _ in cluster.hosts], dtype=np.int64)
    there = np.array([host[0] * count for host, count in cluster.hosts], dtype=np.int64)
    amounts = np.array([(s.fgpu_milli, s.cpu_milli, s.memory_mib) for s, _ in asked], dtype=np.int64)
    demand = np.array([shape.fgpu_milli * n for shape, n in asked], dtype=np.int64)
    everything = sum(shape.fgpu_milli * n for shape, n in workload.counts)
    able = np.asarray((hosts[None] >= amounts[:, None]).all(axis=2))
    # Requests that would fill every node that could hold them.
    whole = able.any(axis=1) & ~(able & (hosts[None, :, 0] > amounts[:, 0, None])).any(axis=1)
    found = []
    for nodes in np.unique(able[whole], axis=0):
        if 2 * int(there[nodes].sum()) > cluster.capacity_milli:
            continue  # For most of the nodes a price would only keep them empty for longer.
        own = amounts[whole & (able == nodes).all(axis=1)].min(axis=0)
        captive = int(demand[whole & ~(able & ~nodes).any(axis=1)].sum())
        part = min(
            1000, 1000 * captive * cluster.capacity_milli // max(1, everything * int(there[nodes].sum()))
        )
        if part >= LEAST_SCARCE:
            found.append(ScarceNodes(int(own[0]), int(own[1]), int(own[2]), part * int(own[0]) // 1000))
    return tuple(found)


def price_of(scarce: Sequence[ScarceNodes], fgpu_milli: int, cpu_milli: int, memory_mib: int) -> int:
    """Return the price of a node with this free capacity: 0 if it is not scarce, or not whole."""
    return sum(
        one.price
        for one in scarce
        if fgpu_milli >= one.fgpu_milli and cpu_milli >= one.cpu_milli and memory_mib >= one.memory_mib
    )


def prices_of(scarce: Sequence[ScarceNodes], fgpu_milli: Ints, cpu_milli: Ints, memory_mib: Ints) -> Ints:
    """Return `price_of` for many nodes at once."""
    found = np.zeros_like(fgpu_milli)
    for one in scarce:
        whole = (fgpu_milli >= one.fgpu_milli) & (cpu_milli >= one.cpu_milli) & (memory_mib >= one.memory_mib)
        found += one.price * whole
    return found
