"""Placing many requests, one after the other: what `placement.place` decides, kept between requests.

Each distinct state of a node is scored once for each shape of request, and after a placement only the
node that changed is looked at again.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from fgpu_scheduler.core.model import Device, NodeState, Placement, Request, Share, ShareMode
from fgpu_scheduler.core.placement import DeviceFree, Free, NodeFree, Room, Score
from fgpu_scheduler.core.shares import Shape, devices_needed, explicit, shape, shares_of

KEPT_SHAPES = 2000
KEPT_STATES = 1 << 17
"""Bounds of what is kept: beyond them all of it is dropped, and found again when needed."""


class _Kind(NamedTuple):
    """What decides of alike nodes: the group that may use them, None for nobody, and devices by uuid."""

    resource_group: str | None
    devices: tuple[Device, ...]
    """Each without its name: alike devices are equal here."""


_DeviceState = tuple[int, int, int, int, ShareMode | None]
"""fGPU, memory, compute and shares that are free, and the mode of those that are not."""


class _State(NamedTuple):
    kind: _Kind
    cpu_milli: int
    memory_mib: int
    devices: tuple[_DeviceState, ...]

    def room(self) -> Room:
        free = tuple(d[0] for d in self.devices)
        return Room(self.cpu_milli, self.memory_mib, free, tuple(d.capacity_milli for d in self.kind.devices))


class _Fit(NamedTuple):
    """The best placement on a node in some state."""

    score: tuple[int, ...]
    taken: tuple[int, ...]
    leaves: _State


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
        self._rankings: dict[Shape, _Ranking] = {}

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
        shares = shares_of(request, [devices[i] for i in fit.taken])
        assert shares is not None
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
        asked = shape(request)
        ranking = self._rankings.get(asked)
        if ranking is None:
            if len(self._rankings) >= KEPT_SHAPES:
                self._rankings = {}
            ranking = self._rankings[asked] = _Ranking()
        now, state, changed, fits = len(self._changes), self._state, self._changed, ranking.fits
        behind = now - ranking.seen
        if ranking.seen < 0 or behind >= len(state) or len(ranking.heap) > 4 * len(state):
            ranking.heap = []
            for at, number in enumerate(state):
                fit = fits[number] if number in fits else self._fit(ranking, asked, number)
                if fit is not None:
                    ranking.heap.append((fit.score, at, changed[at]))
            heapify(ranking.heap)
        else:
            for number_of, at in enumerate(self._changes[ranking.seen :], ranking.seen + 1):
                if changed[at] == number_of:
                    number = state[at]
                    fit = fits[number] if number in fits else self._fit(ranking, asked, number)
                    if fit is not None:
                        heappush(ranking.heap, (fit.score, at, number_of))
        ranking.seen = now
        heap = ranking.heap
        while heap and changed[heap[0][1]] != heap[0][2]:
            heappop(heap)
        return ranking

    def _fit(self, ranking: _Ranking, asked: Shape, number: int) -> _Fit | None:
        state = self._states[number]
        before = self._rooms[number]
        best: _Fit | None = None
        for taken, leaves in _candidates(state, asked):
            score = self._score(before, leaves.room(), taken)
            if best is None or score < best.score:
                best = _Fit(score, taken, leaves)
        ranking.fits[number] = best
        return best


def _state_of(left: NodeFree) -> _State:
    devices = sorted(left.devices, key=lambda d: d.device.uuid)
    usable = left.node.state is NodeState.READY
    kind = _Kind(left.node.resource_group if usable else None, tuple(_nameless(d.device) for d in devices))
    states = tuple((d.fgpu_milli, d.memory_mib, d.compute_percent, d.shares, d.mode) for d in devices)
    return _State(kind, left.cpu_milli, left.memory_mib, states)


def _nameless(device: Device) -> Device:
    return replace(device, uuid="", node_id="", index=0)


def _node_of(node: NodeFree, state: _State) -> NodeFree:
    by_uuid = sorted(node.devices, key=lambda d: d.device.uuid)
    free = {d.device.uuid: DeviceFree(d.device, *own) for d, own in zip(by_uuid, state.devices, strict=True)}
    devices = tuple(free[d.device.uuid] for d in node.devices)
    return NodeFree(node.node, state.cpu_milli, state.memory_mib, devices)


def _candidates(state: _State, asked: Shape) -> list[tuple[tuple[int, ...], _State]]:
    """Return each way to fit that differs, as `placement.placements` does; of alike devices the first."""
    cpu, memory = state.cpu_milli - asked.cpu_milli, state.memory_mib - asked.memory_mib
    if state.kind.resource_group != asked.resource_group or cpu < 0 or memory < 0:
        return []
    own, fgpu = state.kind.devices, asked.fgpu_milli
    if fgpu == 0 and not explicit(asked):
        return [((), _State(state.kind, cpu, memory, state.devices))]
    found: list[tuple[tuple[int, ...], _State]] = []
    tried: dict[tuple[_DeviceState, Device], None] = {}
    whole: dict[int, list[int]] = {}
    for i, (free, device) in enumerate(zip(state.devices, own, strict=True)):
        capacity = device.capacity_milli
        if free[0] < min(fgpu, capacity) or asked.gpu_model not in (None, device.model):
            continue
        needed = devices_needed(fgpu, capacity_milli=capacity)
        if needed == 1:
            if (free, device) in tried:
                continue
            tried[free, device] = None
            taken: tuple[int, ...] = (i,)
        elif needed is not None and free[3] == device.max_shares:
            group = whole.setdefault(capacity, [])
            group.append(i)
            if len(group) != needed:
                continue
            taken = tuple(group)
        else:
            continue
        shares = shares_of(asked, [own[j] for j in taken])
        if shares is None:
            continue
        devices = list(state.devices)
        fits = True
        for j, share in zip(taken, shares, strict=True):
            after = _less(state.devices[j], share)
            fits = fits and after is not None
            devices[j] = after or devices[j]
        if fits:
            found.append((taken, _State(state.kind, cpu, memory, tuple(devices))))
    return found


def _less(free: _DeviceState, share: Share) -> _DeviceState | None:
    """Return what a share leaves of a device, or None where it does not fit."""
    amounts = (
        free[0] - share.fgpu_milli,
        free[1] - share.memory_mib,
        free[2] - share.compute_percent,
        free[3] - 1,
    )
    return (*amounts, share.mode) if free[4] in (None, share.mode) and min(amounts) >= 0 else None
