"""The score: keep the free GPUs most useful for what users will request next.

The loss of a placement has five terms, each in thousandths of a GPU:

1. the residual: a free part of a device is worth what popular fractions can be cut from it (`residual_values`), and
   a placement may leave parts that are worth less than their size;
2. stranded GPU: free GPU that the node's remaining CPU and memory cannot serve;
3. the price of a GPU model that other requests need and that this one does not (`prices`);
4. the price of a whole node of a scarce kind (`scarce_nodes`);
5. the fragments of FGD.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from math import gcd
from operator import ge
from typing import NamedTuple

from fgpu_scheduler.core.model import RequestCount, Snapshot
from fgpu_scheduler.core.placement import NodeAmounts, Score, best_fit
from fgpu_scheduler.core.scores.cutting_stock import residual_values
from fgpu_scheduler.core.scores.fragments import Fragmentation
from fgpu_scheduler.core.scores.workload import ClusterTotals, NodeKind, TypicalRequest, Workload, workload_of

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


def score_for(snapshot: Snapshot, resource_group: str, cluster: ClusterTotals) -> Score:
    """Return the score for a resource group whose nodes have these totals, by its newest requests."""
    asked = tuple(one for one in snapshot.request_counts if one.resource_group == resource_group)
    return _made(asked, cluster)


@lru_cache(maxsize=32)
def _made(asked: tuple[RequestCount, ...], cluster: ClusterTotals) -> Score:
    """Return the score, made once for many passes: making it costs more than a pass."""
    return worth(workload_of(asked, cluster), cluster)


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
    there, named = Counter[str](), Counter[str]()
    for kind, count in cluster.kinds:
        there[kind.model] += kind.capacity_milli * count
    for shape, count in workload.counts:
        named[shape.gpu_model] += shape.fgpu_milli * count
    everything = named.total()
    found = {
        model: min(1000, 1000 * named[model] * cluster.capacity_milli // max(1, everything * own))
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
        self._demand = Counter[int]()
        for shape, count in workload.counts:
            self._demand[shape.fgpu_milli] += count
        self._per_cpu = _per(workload, cluster, lambda one: one.cpu_milli)
        self._per_memory = _per(workload, cluster, lambda one: one.memory_mib)
        self._lost: dict[int, list[int]] = {}
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

    def _losses(self, capacity: int) -> list[int]:
        """Return what each free amount of a device has lost, in thousandths of a GPU."""
        losses = self._lost.get(capacity)
        if losses is None:
            values = residual_values(self._demand, capacity_milli=capacity)
            losses = [1000 * (free - value) // capacity for free, value in enumerate(values)]
            losses[capacity] = -self._opened
            self._lost[capacity] = losses
        return losses

    def _worth(self, room: NodeAmounts) -> int:
        residual = free_milli = 0
        for free, capacity in zip(room.free_milli, room.capacity_milli, strict=True):
            if free > 0:
                residual += self._losses(capacity)[min(free, capacity)]
            free_milli += free
        served = free_milli
        for host, (fgpu, each) in ((room.cpu_milli, self._per_cpu), (room.memory_mib, self._per_memory)):
            if each:
                served = min(served, host * fgpu // each)
        stranded = 0
        if served < free_milli:
            stranded = 1000 * (free_milli - served) * len(room.capacity_milli) // sum(room.capacity_milli)
        lost = RESIDUAL * residual + STRANDED * stranded
        for fgpu_milli, cpu_milli, memory_mib, price in self._scarce:
            if free_milli >= fgpu_milli and room.cpu_milli >= cpu_milli and room.memory_mib >= memory_mib:
                lost -= PRICE * price
        return self._scale * lost + FRAGMENT * self._fragments(room)


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
    everything = sum(shape.fgpu_milli * n for shape, n in workload.counts)
    #: By the kinds of nodes that could hold them, the requests that would fill each of these.
    filling: dict[frozenset[NodeKind], list[tuple[TypicalRequest, int]]] = {}
    for shape, n in workload.counts:
        amounts = shape.fgpu_milli, shape.cpu_milli, shape.memory_mib
        able = frozenset(host for host, _ in cluster.hosts if all(map(ge, host, amounts)))
        # A request for less than all GPUs leaves room on a node. Requests for one model pay its price (`prices`).
        fills = shape.fgpu_milli > 0 and all(host.capacity_milli == shape.fgpu_milli for host in able)
        if able and fills and not shape.gpu_model:
            filling.setdefault(able, []).append((shape, n))
    found = []
    for able, own in filling.items():
        there = sum(host.capacity_milli * count for host, count in cluster.hosts if host in able)
        if 2 * there > cluster.capacity_milli:
            continue  # For most of the nodes a price would only keep them empty for longer.
        captive = [(s.fgpu_milli * n) for kinds, asked in filling.items() if kinds <= able for s, n in asked]
        part = min(1000, 1000 * sum(captive) * cluster.capacity_milli // max(1, everything * there))
        if part >= LEAST_SCARCE:
            fgpu = own[0][0].fgpu_milli
            cpu, memory = min(s.cpu_milli for s, _ in own), min(s.memory_mib for s, _ in own)
            found.append(ScarceNodes(fgpu, cpu, memory, part * fgpu // 1000))
    return tuple(found)
