"""What it costs to begin a node that is one of few: those that need such a node whole can go nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fgpu_scheduler.core.node_table import Ints
from fgpu_scheduler.core.scores.cluster_totals import ClusterTotals
from fgpu_scheduler.core.scores.workload import Workload

LEAST = 500
"""Nodes are scarce where so many thousandths of them will be asked for by those who can use no others.

Set on seeds 42 to 46 of bench/scheduler/openb.py: with 200, up to 0.6 points are lost where many ask for whole nodes.
"""


class ScarceNodes(NamedTuple):
    """Nodes that some need whole, for their CPU or memory, and what one costs: thousandths of a GPU.

    A node is one of them, and whole, while it has as much left as these amounts.
    """

    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    price: int


def scarce_nodes(workload: Workload, cluster: ClusterTotals) -> tuple[ScarceNodes, ...]:
    """Return the scarce nodes of a cluster by those who need all GPUs of one.

    They have at most half of all GPU. Whose requests fit on the same nodes count as one. The price is the GPU of a node
    times the part of all these nodes that will be asked for by those who need one whole and can use no others, if as
    much is asked for as the cluster has.
    """
    # Whoever asks for less than all GPUs of a node leaves room on it; whoever names a model pays for that.
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
    # All that could hold it would be filled by it.
    whole = able.any(axis=1) & ~(able & (hosts[None, :, 0] > amounts[:, 0, None])).any(axis=1)
    found = []
    for nodes in np.unique(able[whole], axis=0):
        if 2 * int(there[nodes].sum()) > cluster.capacity_milli:
            continue  # Most nodes are such: a price would only keep all of them empty for longer.
        own = amounts[whole & (able == nodes).all(axis=1)].min(axis=0)
        captive = int(demand[whole & ~(able & ~nodes).any(axis=1)].sum())
        part = min(
            1000, 1000 * captive * cluster.capacity_milli // max(1, everything * int(there[nodes].sum()))
        )
        if part >= LEAST:
            found.append(ScarceNodes(int(own[0]), int(own[1]), int(own[2]), part * int(own[0]) // 1000))
    return tuple(found)


def price_of(scarce: Sequence[ScarceNodes], fgpu_milli: int, cpu_milli: int, memory_mib: int) -> int:
    """Return the price of what is left of a node: 0 where it is none of them, or not whole any more."""
    return sum(
        one.price
        for one in scarce
        if fgpu_milli >= one.fgpu_milli and cpu_milli >= one.cpu_milli and memory_mib >= one.memory_mib
    )


def prices_of(scarce: Sequence[ScarceNodes], fgpu_milli: Ints, cpu_milli: Ints, memory_mib: Ints) -> Ints:
    """Return the price of what is left of each of many nodes, as `price_of` does."""
    found = np.zeros_like(fgpu_milli)
    for one in scarce:
        whole = (fgpu_milli >= one.fgpu_milli) & (cpu_milli >= one.cpu_milli) & (memory_mib >= one.memory_mib)
        found += one.price * whole
    return found
