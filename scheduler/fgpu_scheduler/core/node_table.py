"""The free amounts of many nodes as NumPy columns, so that a request is placed on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fgpu_scheduler.core.model import Device, Share, ShareMode
from fgpu_scheduler.core.placement import DeviceFree, NodeFree, by_uuid
from fgpu_scheduler.core.shares import RequestShape, accepts_model, devices_needed, is_explicit, shares_of

Ints = NDArray[np.int64]

#: Bound of the cached shapes; beyond it the cache is dropped, and filled again when needed.
KEPT_SHAPES = 2000

MODES = {None: 0, ShareMode.MEMORY: 1, ShareMode.MEMORY_COMPUTE: 2}


class PlacementBatch(NamedTuple):
    """The feasible placements of one request on some nodes.

    The columns up to ``devices`` have an element per node, the others one per placement.
    """

    capacity_milli: int
    devices_taken: int
    cpu_milli: Ints
    memory_mib: Ints
    cpu_after: Ints
    memory_after: Ints
    #: The free fGPU x 1000 of each device of each node; 0 where a node has fewer devices than others.
    free_milli: Ints
    #: The number of devices.
    devices: Ints
    #: The index of the node.
    row: Ints
    #: The index of the first device taken among the node's devices.
    place: Ints
    #: The free fGPU x 1000 of each device taken, before and after.
    before: Ints
    after: Ints
    #: One device of each kind.
    kinds: tuple[Device, ...]
    #: The kind of the first device taken; 0 if none is taken.
    kind: Ints

    def changed(self, table: Ints) -> Ints:
        """Return by how much the sum of ``table[free]`` over a node's devices changes."""
        return self.devices_taken * (table[self.after] - table[np.maximum(self.before, 0)])

    def sum_after(self) -> Ints:
        """Return the free fGPU x 1000 of the node's devices after the placement."""
        free = self.free_milli.sum(axis=1)[self.row]
        return np.asarray(free - self.devices_taken * (self.before - self.after))

    def whole_after(self) -> Ints:
        """Return the number of the node's devices without any share after the placement."""
        full = self.capacity_milli
        whole = np.count_nonzero(self.free_milli == full, axis=1)[self.row]
        return np.asarray(whole - self.devices_taken * ((self.before == full) & (self.after != full)))


#: A `placement.Score` for all placements of a batch: the same numbers as columns.
BatchScore = Callable[[PlacementBatch], tuple[Ints, ...]]


class NodeTable:
    """Nodes of one resource group whose devices all have one capacity."""

    def __init__(self, left: Mapping[int, NodeFree]) -> None:
        """Begin with the free amounts of nodes, by their numbers."""
        nodes, devices = list(left), [[d.device for d in by_uuid(each)] for each in left.values()]
        self.capacity_milli = devices[0][0].capacity_milli
        self.nodes = np.array(nodes, dtype=np.int64)
        self._row = {node: row for row, node in enumerate(nodes)}
        rows, width = len(nodes), max(len(own) for own in devices)
        self._devices = np.array([len(own) for own in devices], dtype=np.int64)
        self._cpu = np.zeros(rows, dtype=np.int64)
        self._memory = np.zeros(rows, dtype=np.int64)
        # Missing devices have no free amounts.
        self._fgpu, self._gpu_memory, self._compute, self._shares, self._mode = (
            np.zeros((rows, width), dtype=np.int64) for _ in range(5)
        )
        self._full = np.array([[d.max_shares for d in own] + [-1] * (width - len(own)) for own in devices])
        self._known: dict[RequestShape, Ints] = {}
        kinds: dict[tuple[int, str], int] = {}
        found: list[Device] = []
        self._kind = np.zeros((rows, width), dtype=np.int64)
        for row, own in enumerate(devices):
            for column, device in enumerate(own):
                key = device.memory_mib, device.model
                if key not in kinds:
                    kinds[key] = len(kinds)
                    found.append(device)
                self._kind[row, column] = kinds[key]
        self._kinds = tuple(found)
        self._there: dict[int, tuple[DeviceFree, ...]] = {}
        for node, each in left.items():
            self.put(node, each)

    def put(self, node: int, left: NodeFree) -> None:
        """Set the free amounts of a node."""
        row, devices = self._row[node], by_uuid(left)
        self._cpu[row], self._memory[row] = left.cpu_milli, left.memory_mib
        for column, (free, before) in enumerate(zip_longest(devices, self._there.get(row, ()))):
            if free is not before:
                self._fgpu[row, column], self._gpu_memory[row, column] = free.fgpu_milli, free.memory_mib
                self._compute[row, column], self._shares[row, column] = free.compute_percent, free.shares
                self._mode[row, column] = MODES[free.mode]
        self._there[row] = devices

    def takes(
        self, asked: RequestShape, nodes: Sequence[int] | None = None
    ) -> tuple[Ints, PlacementBatch] | None:
        """Return the number of the node of each feasible placement, and the placements; None if there are none.

        ``nodes`` restricts the search. Of placements that no score can tell apart only the first is needed.
        """
        rows = self._with_host_capacity(asked, nodes)
        if not rows.size:
            return None
        if asked.fgpu_milli == 0 and not is_explicit(asked):
            count, own, place = 0, np.arange(rows.size), np.zeros(rows.size, dtype=np.int64)
            before = after = place
        else:
            needed = devices_needed(asked.fgpu_milli, capacity_milli=self.capacity_milli)
            if needed is None:
                return None
            count = needed
            own, place, before, after = (
                self._fractions(asked, rows) if count == 1 else self._whole_devices(asked, rows, count)
            )
        if not own.size:
            return None
        # Leave out the nodes without a feasible placement.
        starts = np.ones(own.size, dtype=np.bool_)
        starts[1:] = own[1:] != own[:-1]
        rows, row = rows[own[starts]], np.cumsum(starts) - 1
        ways = PlacementBatch(
            self.capacity_milli,
            count,
            self._cpu[rows],
            self._memory[rows],
            self._cpu[rows] - asked.cpu_milli,
            self._memory[rows] - asked.memory_mib,
            self._fgpu[rows],
            self._devices[rows],
            row,
            place,
            before,
            after,
            self._kinds,
            self._kind[rows[row], place] if count else place,
        )
        return self.nodes[rows[row]], ways

    def _with_host_capacity(self, asked: RequestShape, nodes: Sequence[int] | None) -> Ints:
        """Return the rows with enough CPU and memory."""
        if nodes is None:
            enough = (self._cpu >= asked.cpu_milli) & (self._memory >= asked.memory_mib)
            return np.flatnonzero(enough)
        rows = np.array([self._row[node] for node in nodes], dtype=np.int64)
        enough = (self._cpu[rows] >= asked.cpu_milli) & (self._memory[rows] >= asked.memory_mib)
        return np.asarray(rows[enough])

    def _fractions(self, asked: RequestShape, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        width = self._fgpu.shape[1]
        fgpu, memory, compute, mode = self._amounts(asked)
        alike = fgpu.size == 1
        free = self._fgpu[rows].ravel()
        where = np.flatnonzero(free >= (fgpu if alike else fgpu[self._kind[rows].ravel()]))
        own, place = where // width, where % width
        # Indexes into the flat arrays are read faster than pairs.
        at, before = rows[own] * width + place, free[where]
        kind = 0 if alike else self._kind.ravel()[at]
        after = before - fgpu[kind]
        fits = self._shares.ravel()[at] >= 1
        fits &= self._gpu_memory.ravel()[at] >= memory[kind]
        fits &= self._compute.ravel()[at] >= compute[kind]
        modes = self._mode.ravel()[at]
        fits &= (modes == 0) | (modes == mode[kind])
        # Of adjacent devices of a node that are equally free only the first is kept.
        if own.size > 1:
            same = (own[1:] == own[:-1]) & (before[1:] == before[:-1]) & (after[1:] == after[:-1])
            if len(self._kinds) > 1:
                kinds = self._kind.ravel()[at]
                same &= kinds[1:] == kinds[:-1]
            fits[1:] &= ~(same & fits[:-1])
        return own[fits], place[fits], before[fits], after[fits]

    def _amounts(self, asked: RequestShape) -> Ints:
        """Return the fGPU, memory, compute and mode of a share on each kind of device; one row if all are equal."""
        found = self._known.get(asked)
        if found is None:
            amounts = []
            for device in self._kinds:
                shares = shares_of(asked, (device,))
                # If the request fits on no device of this kind, more than any device has.
                share = shares[0] if shares else Share("", self.capacity_milli + 1, 0, 0)
                amounts.append((share.fgpu_milli, share.memory_mib, share.compute_percent, MODES[share.mode]))
            if len(set(amounts)) == 1:
                del amounts[1:]
            if len(self._known) >= KEPT_SHAPES:
                self._known = {}
            found = self._known[asked] = np.array(amounts, dtype=np.int64).T
        return found

    def _whole_devices(self, asked: RequestShape, rows: Ints, count: int) -> tuple[Ints, Ints, Ints, Ints]:
        untouched = self._shares[rows] == self._full[rows]
        if asked.gpu_models:
            untouched &= np.array([accepts_model(asked, d.model) for d in self._kinds])[self._kind[rows]]
        own = np.flatnonzero(np.count_nonzero(untouched, axis=1) >= count)
        before = np.full(own.size, self.capacity_milli, dtype=np.int64)
        return own, untouched[own].argmax(axis=1), before, np.zeros_like(before)
