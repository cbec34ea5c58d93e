"""Placing many requests, one after the other: what `placement.place` decides, kept between requests.

The nodes are ranked once for each shape of request, all of them at once where the score has a form for
that; after a placement only the node that changed is looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from fgpu_scheduler.core.columns import Columns, DeviceState, Ints, Many
from fgpu_scheduler.core.model import Device, NodeState, Placement, Request, Share
from fgpu_scheduler.core.placement import DeviceFree, Free, NodeFree, Room, Score, untouched
from fgpu_scheduler.core.scores.many import many_of
from fgpu_scheduler.core.shares import Shape, devices_needed, explicit, liked, shape, shares_of, takes_model

KEPT_SHAPES = 2000
KEPT_CHANGES = 1 << 17
"""Bounds of what is kept: beyond them all of it is dropped, and found again when needed."""

FEW = 12
"""Up to so many nodes are looked at one by one: that is faster than all at once."""

RANKED = 128
"""How many nodes a ranking begins with, at least; the others are ranked when these are used up."""

LARGEST_CAPACITY_MILLI = 20_000
"""Devices of more are looked at one by one: scores keep a number for each amount of a device."""


class _State(NamedTuple):
    """What is left of a node."""

    cpu_milli: int
    memory_mib: int
    devices: tuple[DeviceState, ...]
    """By uuid."""


_Entry = tuple[tuple[int, ...], int, int, int]
"""Score, node, the number of its last change, and the place of the first device taken."""


_Bound = tuple[tuple[int, ...], int]
"""Score and node of the last one that a ranking has: those of equal score are in order of their nodes."""


class _Alike:
    """Nodes that are alike while nobody is on them: the first of those stands for them all."""

    def __init__(self, untouched: _State) -> None:
        self.untouched = untouched
        self._heap: list[int] = []
        self._standing: dict[int, bool] = {}

    def add(self, at: int) -> bool:
        """Add an untouched node, in order of numbers; return whether it stands."""
        self._heap.append(at)
        self._standing[at] = len(self._heap) == 1
        return self._standing[at]

    def changed(self, at: int, untouched: bool) -> int | None:
        """Note what a node is now; return the one that begins to stand for the others, if any."""
        was = at in self._standing
        if untouched and not was:
            heappush(self._heap, at)
            self._standing[at] = True
        elif was and not untouched:
            del self._standing[at]
            while self._heap and self._heap[0] not in self._standing:
                heappop(self._heap)
            if self._heap and not self._standing[self._heap[0]]:
                self._standing[self._heap[0]] = True
                return self._heap[0]
        return None


class _Ranking:
    """The nodes that fit one shape, best first; entries of nodes that changed since are stale."""

    __slots__ = ("heap", "most", "seen", "shares")

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        self.seen = -1
        """How much of the changes is taken in; -1 where none is."""
        self.most: _Bound | None = None
        """Nodes are left out that come after this."""
        self.shares: dict[int, Share | None] = {}
        """What is taken of a device of each kind, where it is a part."""


class Placer:
    """What is left of every node, and where the next request goes.

    `place` takes what it proposes. `update` puts in a node as it is now, after a release say. Requests
    and updates in the same order give the same placements, those of `placement.place`.
    """

    def __init__(self, left: Free, *, score: Score) -> None:
        # Between nodes that the score finds equal, the first by id is taken: the order handed in decides nothing.
        left = tuple(sorted(left, key=lambda each: each.node.id))
        self._score = score
        self._many = many_of(score)
        self._nodes = list(left)
        self._at = {node.node.id: at for at, node in enumerate(left)}
        self._changes: list[int] = []
        self._changed = [0] * len(left)
        """For each node the number of its last change, so that only that entry counts."""
        self._rankings: dict[Shape, _Ranking] = {}
        self._devices = [_by_uuid(node) for node in left]
        self._capacities = [tuple(d.capacity_milli for d in devices) for devices in self._devices]
        self._models = [tuple(d.model for d in devices) for devices in self._devices]
        self._kind_of: dict[tuple[int, int, str, int], int] = {}
        self._kinds = [self._numbered(devices) for devices in self._devices]
        self._states = [_state_of(node) for node in left]
        self._columns: dict[str, list[Columns]] | None = None
        self._column_of: list[Columns | None] = []
        self._single: list[int] = []
        """The nodes that are in no columns, once there are any."""
        self._alike: list[_Alike | None] = []
        """For each node in columns, those that it is like while nobody is on it."""

    def place(self, request: Request) -> Placement | None:
        """Take the best placement of ``request``, or return None if none fits."""
        for asked in liked(shape(request)):
            heap = self._ranked(asked).heap
            if heap:
                return self._placed(asked, heap[0])
        return None

    def _placed(self, asked: Shape, best: _Entry) -> Placement:
        _, at, _, column = best
        state, devices = self._states[at], self._devices[at]
        taken = _taken(asked, state, devices, column)
        shares = shares_of(asked, [devices[i] for i in taken])
        assert shares is not None
        self._take(at, asked, taken, shares)
        return Placement(self._nodes[at].node.id, shares)

    def fits(self, request: Request) -> bool:
        """Return whether ``request`` would be placed now."""
        return any(self._ranked(asked).heap for asked in liked(shape(request)))

    def update(self, node: NodeFree) -> None:
        """Put in what is left of a node that was handed in at first.

        Raises:
            KeyError: there is no such node.
        """
        at = self._at[node.node.id]
        old, self._nodes[at] = self._nodes[at], node
        devices, state = _by_uuid(node), _state_of(node)
        if (old.node.state, old.node.resource_group, self._devices[at]) != (
            node.node.state,
            node.node.resource_group,
            devices,
        ):
            self._devices[at] = devices
            self._capacities[at] = tuple(d.capacity_milli for d in devices)
            self._models[at] = tuple(d.model for d in devices)
            self._kinds[at] = self._numbered(devices)
            # In a ranking nodes stand for others as they do in the columns.
            self._columns = None
            self._rankings = {}
        elif self._columns is not None and (columns := self._column_of[at]) is not None:
            columns.put(at, state.cpu_milli, state.memory_mib, state.devices)
        self._change(at, state)

    def score_by(self, score: Score) -> None:
        """Go by this score from now on."""
        if score is not self._score:
            self._score, self._many, self._rankings = score, many_of(score), {}

    @property
    def left(self) -> Free:
        """What is left of every node, by id."""
        return tuple(_node_of(*each) for each in zip(self._nodes, self._devices, self._states, strict=True))

    def _numbered(self, devices: tuple[Device, ...]) -> tuple[int, ...]:
        """Return the same number for devices of the same capacity, memory, model and number of shares."""
        kinds = ((d.capacity_milli, d.memory_mib, d.model, d.max_shares) for d in devices)
        return tuple(self._kind_of.setdefault(kind, len(self._kind_of)) for kind in kinds)

    def _take(self, at: int, asked: Shape, taken: Sequence[int], shares: Sequence[Share]) -> None:
        state = self._states[at]
        devices = list(state.devices)
        columns = self._column_of[at] if self._columns is not None else None
        for i, share in zip(taken, shares, strict=True):
            free = _less(devices[i], share)
            assert free is not None
            devices[i] = free
            if columns is not None:
                columns.put_device(at, i, free)
        cpu, memory = state.cpu_milli - asked.cpu_milli, state.memory_mib - asked.memory_mib
        if columns is not None:
            columns.put_host(at, cpu, memory)
        self._change(at, _State(cpu, memory, tuple(devices)))

    def _change(self, at: int, state: _State) -> None:
        if len(self._changes) >= KEPT_CHANGES:
            self._rankings = {}
            self._changes = []
            self._changed = [0] * len(self._nodes)
        self._states[at] = state
        self._note(at)
        alike = self._alike[at] if self._columns is not None else None
        if alike is not None:
            first = alike.changed(at, state == alike.untouched)
            columns = self._column_of[at]
            assert columns is not None
            columns.stand(at)
            if first is not None:
                columns.stand(first)
                self._note(first)

    def _note(self, at: int) -> None:
        self._changes.append(at)
        self._changed[at] = len(self._changes)

    def _ranked(self, asked: Shape) -> _Ranking:
        """Return the ranking for a shape, with every change taken in and its best entry valid."""
        ranking = self._rankings.get(asked)
        if ranking is None:
            if len(self._rankings) >= KEPT_SHAPES:
                self._rankings = {}
            ranking = self._rankings[asked] = _Ranking()
        now, changed = len(self._changes), self._changed
        behind = now - ranking.seen
        if ranking.seen < 0 or behind >= len(changed) or len(ranking.heap) > 4 * len(changed) + RANKED:
            self._rank(ranking, asked)
        elif behind:
            latest = enumerate(self._changes[ranking.seen :], ranking.seen + 1)
            for entry in self._looked_at(ranking, asked, [at for n, at in latest if changed[at] == n]):
                heappush(ranking.heap, entry)
        ranking.seen = now
        while not self._valid(ranking):
            self._rank(ranking, asked)
        return ranking

    def _valid(self, ranking: _Ranking) -> bool:
        """Drop stale entries; return whether the best of the others is the best of all nodes."""
        heap, changed = ranking.heap, self._changed
        while heap and changed[heap[0][1]] != heap[0][2]:
            heappop(heap)
        return ranking.most is None or (bool(heap) and heap[0][:2] <= ranking.most)

    def _rank(self, ranking: _Ranking, asked: Shape) -> None:
        """Rank all nodes; the worse ones are left out where they are many."""
        ranking.most = None
        if self._many is None or len(self._nodes) <= FEW:
            ranking.heap = self._one_by_one(ranking, asked, range(len(self._nodes)))
        else:
            if self._columns is None:
                self._columns = self._in_columns()
            ranking.heap = self._one_by_one(ranking, asked, self._single)
            for columns in self._columns.get(asked.resource_group, ()):
                entries, most = self._at_once(asked, columns, None, self._many)
                ranking.heap += entries
                if most is not None:
                    ranking.most = most if ranking.most is None else min(most, ranking.most)
        heapify(ranking.heap)

    def _looked_at(self, ranking: _Ranking, asked: Shape, nodes: list[int]) -> list[_Entry]:
        """Return an entry for each of the nodes that fits; those that the ranking leaves out may be left out."""
        if self._many is None or self._columns is None or len(nodes) <= FEW:
            return self._one_by_one(ranking, asked, nodes)
        own = self._columns.get(asked.resource_group, ())
        found = self._one_by_one(ranking, asked, [at for at in nodes if self._column_of[at] is None])
        for columns in own:
            inside = [at for at in nodes if self._column_of[at] is columns]
            if inside:
                found += self._at_once(asked, columns, inside, self._many, most=ranking.most)[0]
        return found

    def _at_once(
        self,
        asked: Shape,
        columns: Columns,
        nodes: Sequence[int] | None,
        many: Many,
        *,
        most: _Bound | None = None,
    ) -> tuple[list[_Entry], _Bound | None]:
        """Return the entries of the nodes that fit, and the bound where more were left out.

        Of some nodes, those beyond ``most`` are left out: nothing would be taken of them before all are ranked again.
        """
        found = columns.takes(asked, nodes)
        if found is None:
            return [], None
        fitting, takes = found
        scores, places = many(takes), takes.place
        kept: Ints | None = None
        if nodes is None and fitting.size > 2 * RANKED:
            # Many are equal in the first score, where nodes are alike.
            kept = np.flatnonzero(scores[0] <= np.partition(scores[0], RANKED)[RANKED])
            keys = fitting[kept], *(score[kept] for score in reversed(scores))
            kept = kept[np.lexsort(keys)[:RANKED]]
            most = tuple(int(score[kept[-1]]) for score in scores), int(fitting[kept[-1]])
        elif most is not None:
            kept = np.flatnonzero(scores[0] <= most[0][0])
        if kept is not None:
            fitting, places, scores = fitting[kept], places[kept], tuple(score[kept] for score in scores)
        numbers = fitting.tolist()
        changes = [self._changed[at] for at in numbers]
        listed = zip(*(score.tolist() for score in scores), strict=True)
        return list(zip(listed, numbers, changes, places.tolist(), strict=True)), most

    def _one_by_one(self, ranking: _Ranking, asked: Shape, nodes: Iterable[int]) -> list[_Entry]:
        found = []
        for at in nodes:
            node = self._nodes[at].node
            if node.resource_group == asked.resource_group and node.state is NodeState.READY:
                entry = self._fit(ranking, asked, at)
                if entry is not None:
                    found.append(entry)
        return found

    def _fit(self, ranking: _Ranking, asked: Shape, at: int) -> _Entry | None:
        """Return the best way to place on one node."""
        state, capacities = self._states[at], self._capacities[at]
        cpu, memory = state.cpu_milli - asked.cpu_milli, state.memory_mib - asked.memory_mib
        if cpu < 0 or memory < 0:
            return None
        free = tuple(d[0] for d in state.devices)
        models = self._models[at]
        before = Room(state.cpu_milli, state.memory_mib, free, capacities, models)
        found: _Entry | None = None
        for taken, left in self._ways(ranking, asked, at):
            score = self._score(before, Room(cpu, memory, left, capacities, models), taken)
            if found is None or score < found[0]:
                found = score, at, self._changed[at], taken[0] if taken else 0
        return found

    def _ways(
        self, ranking: _Ranking, asked: Shape, at: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield each way to fit that differs, and the fGPU that is free of each device after it.

        They are those of `placement.placements`, and of devices that are equally free the first.
        """
        fgpu, state, own, kinds = asked.fgpu_milli, self._states[at], self._devices[at], self._kinds[at]
        free = [d[0] for d in state.devices]
        if fgpu == 0 and not explicit(asked):
            yield (), tuple(free)
            return
        tried: list[tuple[int, DeviceState]] = []
        capacities: list[int] = []
        for i, left in enumerate(state.devices):
            capacity = own[i].capacity_milli
            if left[0] < min(fgpu, capacity) or left[3] < 1:
                continue
            if fgpu <= capacity:
                kind = kinds[i]
                if (kind, left) in tried:
                    continue
                tried.append((kind, left))
                if kind not in ranking.shares:
                    shares = shares_of(asked, (own[i],))
                    ranking.shares[kind] = shares[0] if shares else None
                share = ranking.shares[kind]
                after = _less(left, share) if share else None
                if after is not None:
                    yield (i,), (*free[:i], after[0], *free[i + 1 :])
            elif capacity not in capacities:
                capacities.append(capacity)
                needed = devices_needed(fgpu, capacity_milli=capacity)
                taken = _whole(asked, state, own, capacity, needed) if needed else ()
                if taken:
                    yield taken, tuple(0 if j in taken else milli for j, milli in enumerate(free))

    def _in_columns(self) -> dict[str, list[Columns]]:
        """Put the nodes into columns, except those that none can hold; they are looked at one by one."""
        groups: dict[tuple[str, int], list[int]] = {}
        self._single, self._column_of = [], [None] * len(self._nodes)
        self._alike = [None] * len(self._nodes)
        for at, (left, capacities) in enumerate(zip(self._nodes, self._capacities, strict=True)):
            if left.node.state is not NodeState.READY:
                continue
            if len(set(capacities)) == 1 and 0 < capacities[0] <= LARGEST_CAPACITY_MILLI:
                groups.setdefault((left.node.resource_group, capacities[0]), []).append(at)
            else:
                self._single.append(at)
        found: dict[str, list[Columns]] = {}
        for (group, _), nodes in groups.items():
            columns = Columns(nodes, [self._devices[at] for at in nodes])
            likes: dict[tuple[_State, tuple[int, ...]], _Alike] = {}
            for at in nodes:
                state, whole = self._states[at], _state_of(untouched(self._nodes[at].node))
                columns.put(at, *state)
                self._column_of[at] = columns
                key = whole, self._kinds[at]
                alike = self._alike[at] = likes.setdefault(key, _Alike(whole))
                columns.stand(at, stands=state != whole or alike.add(at))
            found.setdefault(group, []).append(columns)
        return found


def _by_uuid(left: NodeFree) -> tuple[Device, ...]:
    return tuple(sorted((d.device for d in left.devices), key=lambda device: device.uuid))


def _state_of(left: NodeFree) -> _State:
    devices = sorted(left.devices, key=lambda d: d.device.uuid)
    states = tuple((d.fgpu_milli, d.memory_mib, d.compute_percent, d.shares, d.mode) for d in devices)
    return _State(left.cpu_milli, left.memory_mib, states)


def _node_of(node: NodeFree, by_uuid: tuple[Device, ...], state: _State) -> NodeFree:
    free = {d.uuid: DeviceFree(d, *own) for d, own in zip(by_uuid, state.devices, strict=True)}
    devices = tuple(free[d.device.uuid] for d in node.devices)
    return NodeFree(node.node, state.cpu_milli, state.memory_mib, devices)


def _whole(
    asked: Shape, state: _State, own: tuple[Device, ...], capacity: int, needed: int
) -> tuple[int, ...]:
    """Return the places of the first untouched devices of a capacity, or none where they are too few."""
    found = [
        i
        for i, device in enumerate(own)
        if device.capacity_milli == capacity
        and state.devices[i][3] == device.max_shares
        and takes_model(asked, device.model)
    ][:needed]
    return tuple(found) if len(found) == needed and shares_of(asked, [own[i] for i in found]) else ()


def _taken(asked: Shape, state: _State, own: tuple[Device, ...], place: int) -> tuple[int, ...]:
    """Return the places of the devices that an entry of a ranking takes."""
    if asked.fgpu_milli == 0 and not explicit(asked):
        return ()
    capacity = own[place].capacity_milli
    needed = devices_needed(asked.fgpu_milli, capacity_milli=capacity)
    return (place,) if needed in (None, 1) else _whole(asked, state, own, capacity, needed)


def _less(free: DeviceState, share: Share) -> DeviceState | None:
    """Return what a share leaves of a device, or None where it does not fit."""
    fgpu, memory = free[0] - share.fgpu_milli, free[1] - share.memory_mib
    compute, shares = free[2] - share.compute_percent, free[3] - 1
    if fgpu < 0 or memory < 0 or compute < 0 or shares < 0 or free[4] not in (None, share.mode):
        return None
    return fgpu, memory, compute, shares, share.mode
