"""Placing many requests, one after the other: what `placement.place` decides, kept between requests.

Each distinct state of a node is scored once for each shape of request, and after a placement only the
node that changed is looked at again.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from fgpu_scheduler.core.model import Device, NodeState, Placement, Request, Share
from fgpu_scheduler.core.placement import (
    MAX_SHARES,
    DeviceFree,
    Free,
    NodeFree,
    Room,
    Score,
    devices_needed,
)
from fgpu_scheduler.core.units import share_compute_percent, share_memory_mib

KEPT_SHAPES = 2000
KEPT_STATES = 1 << 17
"""Bounds of what is kept: beyond them all of it is dropped, and found again when needed."""


class _Kind(NamedTuple):
    """What decides of alike nodes: the group that may use them, None for nobody, and devices by uuid."""

    resource_group: str | None
    devices: tuple[tuple[int, int], ...]
    """Capacity and memory of each."""


_DeviceState = tuple[int, int, int, int]
"""fGPU, memory, compute and shares that are free."""


class _State(NamedTuple):
    kind: _Kind
    cpu_milli: int
    memory_mib: int
    devices: tuple[_DeviceState, ...]

    def room(self) -> Room:
        free = tuple(d[0] for d in self.devices)
        return Room(self.cpu_milli, self.memory_mib, free, tuple(d[0] for d in self.kind.devices))


class _Fit(NamedTuple):
    """The best placement on a node in some state."""

    score: tuple[int, ...]
    taken: tuple[int, ...]
    leaves: _State


_Shape = tuple[str, int, int, int]


class _Ranking:
    """The nodes that fit one shape, best first; entries of nodes that changed since are stale."""

    __slots__ = ("fits", "heap", "seen")

    def __init__(self) -> None:
        self.fits: dict[int, _Fit | None] = {}
        self.heap: list[tuple[tuple[int, ...], int, int]] = []
        self.seen = -1
        """How much of the changes is taken in; -1 where none is."""


class Placer:
    """What is left of every node, and where the next request goes.

    `place` takes what it proposes. `update` puts in a node as it is now, after a release say. Requests
    and updates in the same order give the same placements, those of `placement.place`.
    """

    def __init__(self, left: Free, *, score: Score) -> None:
        self._score = score
        self._nodes = list(left)
        self._at = {node.node.id: at for at, node in enumerate(left)}
        self._devices = [sorted((d.device for d in n.devices), key=lambda d: d.uuid) for n in left]
        self._ids: dict[_State, int] = {}
        self._states: list[_State] = []
        self._rooms: list[Room] = []
        self._state = [self._intern(_state_of(node)) for node in left]
        self._changes: list[int] = []
        self._changed = [0] * len(left)
        """For each node the number of its last change, so that only that entry counts."""
        self._rankings: dict[_Shape, _Ranking] = {}

    def place(self, request: Request) -> Placement | None:
        """Take the best placement of ``request``, or return None if none fits."""
        ranking = self._ranked(request)
        heap = ranking.heap
        if not heap:
            return None
        _, at, _ = heap[0]
        fit = ranking.fits[self._state[at]]
        assert fit is not None
        self._change(at, fit.leaves)
        devices = self._devices[at]
        shares = tuple(_share(devices[i], request.fgpu_milli, len(fit.taken)) for i in fit.taken)
        return Placement(self._nodes[at].node.id, shares)

    def fits(self, request: Request) -> bool:
        """Return whether ``request`` would be placed now."""
        return bool(self._ranked(request).heap)

    def update(self, node: NodeFree) -> None:
        """Put in what is left of a node that was handed in at first.

        Raises:
            KeyError: there is no such node.
        """
        at = self._at[node.node.id]
        self._nodes[at] = node
        self._devices[at] = sorted((d.device for d in node.devices), key=lambda d: d.uuid)
        self._change(at, _state_of(node))

    @property
    def left(self) -> Free:
        """What is left of every node, in the order handed in."""
        return tuple(_node_of(node, self._states[self._state[at]]) for at, node in enumerate(self._nodes))

    def _intern(self, state: _State) -> int:
        number = self._ids.get(state)
        if number is None:
            number = self._ids[state] = len(self._states)
            self._states.append(state)
            self._rooms.append(state.room())
        return number

    def _change(self, at: int, state: _State) -> None:
        if len(self._states) > KEPT_STATES or len(self._changes) > KEPT_STATES:
            self._forget()
        self._state[at] = self._intern(state)
        self._changes.append(at)
        self._changed[at] = len(self._changes)

    def _forget(self) -> None:
        current = [self._states[number] for number in self._state]
        self._ids, self._states, self._rooms = {}, [], []
        self._state = [self._intern(state) for state in current]
        self._rankings = {}
        self._changes = []
        self._changed = [0] * len(self._nodes)

    def _ranked(self, request: Request) -> _Ranking:
        """Return the ranking for a request, with every change taken in and its best entry valid."""
        shape = request.resource_group, request.fgpu_milli, request.cpu_milli, request.memory_mib
        ranking = self._rankings.get(shape)
        if ranking is None:
            if len(self._rankings) >= KEPT_SHAPES:
                self._rankings = {}
            ranking = self._rankings[shape] = _Ranking()
        now, state, changed, fits = len(self._changes), self._state, self._changed, ranking.fits
        behind = now - ranking.seen
        if ranking.seen < 0 or behind >= len(state) or len(ranking.heap) > 4 * len(state):
            ranking.heap = []
            for at, number in enumerate(state):
                fit = fits[number] if number in fits else self._fit(ranking, shape, number)
                if fit is not None:
                    ranking.heap.append((fit.score, at, changed[at]))
            heapify(ranking.heap)
        else:
            for number_of, at in enumerate(self._changes[ranking.seen :], ranking.seen + 1):
                if changed[at] == number_of:
                    number = state[at]
                    fit = fits[number] if number in fits else self._fit(ranking, shape, number)
                    if fit is not None:
                        heappush(ranking.heap, (fit.score, at, number_of))
        ranking.seen = now
        heap = ranking.heap
        while heap and changed[heap[0][1]] != heap[0][2]:
            heappop(heap)
        return ranking

    def _fit(self, ranking: _Ranking, shape: _Shape, number: int) -> _Fit | None:
        state = self._states[number]
        before = self._rooms[number]
        best: _Fit | None = None
        for taken, leaves in _candidates(state, shape):
            score = self._score(before, leaves.room(), taken)
            if best is None or score < best.score:
                best = _Fit(score, taken, leaves)
        ranking.fits[number] = best
        return best


def _state_of(left: NodeFree) -> _State:
    devices = sorted(left.devices, key=lambda d: d.device.uuid)
    usable = left.node.state is NodeState.READY
    kind = _Kind(
        left.node.resource_group if usable else None,
        tuple((d.device.capacity_milli, d.device.memory_mib) for d in devices),
    )
    states = tuple((d.fgpu_milli, d.memory_mib, d.compute_percent, d.shares) for d in devices)
    return _State(kind, left.cpu_milli, left.memory_mib, states)


def _node_of(node: NodeFree, state: _State) -> NodeFree:
    by_uuid = sorted(node.devices, key=lambda d: d.device.uuid)
    free = {d.device.uuid: DeviceFree(d.device, *own) for d, own in zip(by_uuid, state.devices, strict=True)}
    devices = tuple(free[d.device.uuid] for d in node.devices)
    return NodeFree(node.node, state.cpu_milli, state.memory_mib, devices)


def _share(device: Device, fgpu_milli: int, devices: int) -> Share:
    return Share.of(device, fgpu_milli if devices == 1 else device.capacity_milli)


def _candidates(state: _State, shape: _Shape) -> list[tuple[tuple[int, ...], _State]]:
    """Return each way to fit that differs, as `placement.placements` does; of alike devices the first."""
    group, fgpu, request_cpu, request_memory = shape
    cpu, memory = state.cpu_milli - request_cpu, state.memory_mib - request_memory
    if state.kind.resource_group != group or cpu < 0 or memory < 0:
        return []
    if fgpu == 0:
        return [((), _State(state.kind, cpu, memory, state.devices))]
    found: list[tuple[tuple[int, ...], _State]] = []
    tried: dict[tuple[_DeviceState, tuple[int, int]], None] = {}
    whole: dict[int, list[int]] = {}
    for i, (device, own) in enumerate(zip(state.devices, state.kind.devices, strict=True)):
        capacity = own[0]
        if device[0] < min(fgpu, capacity):
            continue
        needed = devices_needed(fgpu, capacity_milli=capacity)
        if needed == 1:
            if (device, own) in tried:
                continue
            tried[device, own] = None
            taken: tuple[int, ...] = (i,)
        elif needed is not None and device[3] == MAX_SHARES:
            group_of = whole.setdefault(capacity, [])
            group_of.append(i)
            if len(group_of) != needed:
                continue
            taken = tuple(group_of)
        else:
            continue
        devices = list(state.devices)
        fits = True
        for j in taken:
            after = _less(state.devices[j], state.kind.devices[j], fgpu if needed == 1 else capacity)
            fits = fits and after is not None
            devices[j] = after or devices[j]
        if fits:
            found.append((taken, _State(state.kind, cpu, memory, tuple(devices))))
    return found


def _less(free: _DeviceState, own: tuple[int, int], fgpu_milli: int) -> _DeviceState | None:
    """Return what a share of ``fgpu_milli`` leaves of a device, or None where it does not fit."""
    capacity, total = own
    memory = share_memory_mib(fgpu_milli, capacity_milli=capacity, device_memory_mib=total)
    left = (
        free[0] - fgpu_milli,
        free[1] - memory,
        free[2] - share_compute_percent(fgpu_milli, capacity_milli=capacity),
        free[3] - 1,
    )
    return left if memory > 0 and min(left) >= 0 else None
