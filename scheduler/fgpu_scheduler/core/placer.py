"""Placing many requests, one after the other: what `placement.place` decides, kept between requests.

The nodes are ranked once for each shape of request, all of them at once where the score has a form for
that; after a placement only the node that changed is looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from fgpu_scheduler.core.model import NodeState, Placement, Request
from fgpu_scheduler.core.node_table import BatchScore, Ints, NodeTable
from fgpu_scheduler.core.placement import (
    Free,
    NodeFree,
    Score,
    ShareOfKind,
    best_device_set,
    by_uuid,
    claimed,
    feasible_device_sets,
    placement_of,
)
from fgpu_scheduler.core.scores.batch import batch_form
from fgpu_scheduler.core.shares import RequestShape, per_preferred_model, shape

KEPT_SHAPES = 2000
KEPT_CHANGES = 1 << 17
"""Bounds of what is kept: beyond them all of it is dropped, and found again when needed."""

FEW = 12
"""Up to so many nodes are looked at one by one: that is faster than all at once."""

RANKED = 128
"""How many nodes a ranking begins with, at least; the others are ranked when these are used up."""

LARGEST_CAPACITY_MILLI = 20_000
"""Devices of more are looked at one by one: scores keep a number for each amount of a device."""

_Entry = tuple[tuple[int, ...], int, int, int]
"""Score, node, the number of its last change, and the place of the first device taken."""

_Bound = tuple[tuple[int, ...], int]
"""Score and node of the last one that a ranking has: those of equal score are in order of their nodes."""


class _EmptyNodes:
    """Nodes that are alike while nobody is on them: the first of those stands for them all."""

    def __init__(self) -> None:
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

    __slots__ = ("heap", "most", "seen", "share_of_kind")

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        self.seen = -1
        """How much of the changes is taken in; -1 where none is."""
        self.most: _Bound | None = None
        """Nodes are left out that come after this."""
        self.share_of_kind: ShareOfKind = {}

    def copy(self) -> _Ranking:
        other = copy(self)
        other.heap = list(self.heap)
        return other


class Placer:
    """What is left of every node, and where the next request goes.

    `place` takes what it proposes. `update` puts in a node as it is now, after a release say. Requests
    and updates in the same order give the same placements, those of `placement.place`.
    """

    def __init__(self, left: Free, *, score: Score) -> None:
        # Between nodes that the score finds equal, the first by id is taken: the order handed in decides nothing.
        left = tuple(sorted(left, key=lambda each: each.node.id))
        self._score = score
        self._many = batch_form(score)
        self._nodes = list(left)
        self._at = {node.node.id: at for at, node in enumerate(left)}
        self._changes: list[int] = []
        self._changed = [0] * len(left)
        """For each node the number of its last change, so that only that entry counts."""
        self._rankings: dict[RequestShape, _Ranking] = {}
        self._columns: dict[str, list[NodeTable]] | None = None
        self._column_of: list[NodeTable | None] = []
        self._single: list[int] = []
        """The nodes that are in no columns, once there are any."""
        self._empty_nodes: dict[int, _EmptyNodes] = {}
        """For each node in columns, those that it is like while nobody is on it."""

    def copy(self) -> Placer:
        """Return one that goes on from the same state."""
        other = copy(self)
        other._nodes, other._changes, other._changed = (
            list(self._nodes),
            list(self._changes),
            list(self._changed),
        )
        other._rankings = {asked: ranking.copy() for asked, ranking in self._rankings.items()}
        other._columns = None
        return other

    def place_elsewhere(self, request: Request, node_id: str) -> Placement | None:
        """Take the best placement of ``request`` on any node but this one, or return None if none fits."""
        at = self._at[node_id]
        left = self._nodes[at]
        self._change(at, replace(left, cpu_milli=-1))  # Nothing fits there.
        where = self.place(request)
        self._change(at, left)
        return where

    def place(self, request: Request) -> Placement | None:
        """Take the best placement of ``request``, or return None if none fits."""
        for asked in per_preferred_model(shape(request)):
            ranking = self._ranked(asked)
            if ranking.heap:
                _, at, _, first = ranking.heap[0]
                left = self._nodes[at]
                found = (
                    taken
                    for taken, _ in feasible_device_sets(left, asked, by_uuid(left), ranking.share_of_kind)
                )
                where = placement_of(left, asked, next(t for t in found if not t or t[0] == first))
                self._change(at, claimed(left, asked, where))
                return where
        return None

    def fits(self, request: Request) -> bool:
        """Return whether ``request`` would be placed now."""
        return any(self._ranked(asked).heap for asked in per_preferred_model(shape(request)))

    def update(self, node: NodeFree) -> None:
        """Put in what is left of a node that was handed in at first.

        Raises:
            KeyError: there is no such node.
        """
        at = self._at[node.node.id]
        if node.node != self._nodes[at].node:
            # In a ranking nodes stand for others as they do in the columns.
            self._columns = None
            self._rankings = {}
        self._change(at, node)

    def score_by(self, score: Score) -> None:
        """Go by this score from now on."""
        if score is not self._score:
            self._score, self._many = score, batch_form(score)
            # Not all dropped at once: that takes longer than the ranking of one.
            for ranking in self._rankings.values():
                ranking.seen, ranking.share_of_kind = -1, {}

    @property
    def left(self) -> Free:
        """What is left of every node, by id."""
        return tuple(self._nodes)

    def _change(self, at: int, left: NodeFree) -> None:
        if len(self._changes) >= KEPT_CHANGES:
            self._rankings = {}
            self._changes = []
            self._changed = [0] * len(self._nodes)
        self._nodes[at] = left
        self._note(at)
        columns = self._column_of[at] if self._columns is not None else None
        if columns is not None:
            columns.put(at, left)
            columns.stand(at)
            first = self._empty_nodes[at].changed(at, _nobody_on(left))
            if first is not None:
                columns.stand(first)
                self._note(first)

    def _note(self, at: int) -> None:
        self._changes.append(at)
        self._changed[at] = len(self._changes)

    def _ranked(self, asked: RequestShape) -> _Ranking:
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

    def _rank(self, ranking: _Ranking, asked: RequestShape) -> None:
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

    def _looked_at(self, ranking: _Ranking, asked: RequestShape, nodes: list[int]) -> list[_Entry]:
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
        asked: RequestShape,
        columns: NodeTable,
        nodes: Sequence[int] | None,
        batch: BatchScore,
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
        scores, places = batch(takes), takes.place
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

    def _one_by_one(self, ranking: _Ranking, asked: RequestShape, nodes: Iterable[int]) -> list[_Entry]:
        found: list[_Entry] = []
        for at in nodes:
            best = best_device_set(
                self._nodes[at], asked, score=self._score, share_of_kind=ranking.share_of_kind
            )
            if best is not None:
                score, taken = best
                found.append((score, at, self._changed[at], taken[0] if taken else 0))
        return found

    def _in_columns(self) -> dict[str, list[NodeTable]]:
        """Put the nodes into columns, except those that none can hold; they are looked at one by one."""
        groups: dict[tuple[str, int], list[int]] = {}
        self._single, self._column_of = [], [None] * len(self._nodes)
        for at, left in enumerate(self._nodes):
            if left.node.state is not NodeState.READY:
                continue
            capacities = {d.device.capacity_milli for d in left.devices}
            if len(capacities) == 1 and 0 < min(capacities) <= LARGEST_CAPACITY_MILLI:
                groups.setdefault((left.node.resource_group, capacities.pop()), []).append(at)
            else:
                self._single.append(at)
        found: dict[str, list[NodeTable]] = {}
        for (group, _), nodes in groups.items():
            columns = NodeTable({at: self._nodes[at] for at in nodes})
            likes: dict[object, _EmptyNodes] = {}
            for at in nodes:
                left = self._nodes[at]
                self._column_of[at] = columns
                alike = self._empty_nodes[at] = likes.setdefault(_as_it_is(left), _EmptyNodes())
                columns.stand(at, stands=not _nobody_on(left) or alike.add(at))
            found.setdefault(group, []).append(columns)
        return found


def _nobody_on(left: NodeFree) -> bool:
    """Return whether all of a node is free."""
    host = left.cpu_milli == left.node.cpu_milli and left.memory_mib == left.node.memory_mib
    return host and all(d.shares == d.device.shares_offered for d in left.devices)


def _as_it_is(left: NodeFree) -> object:
    """Return all that makes nodes differ on which nobody is."""
    kinds = (
        (d.device.capacity_milli, d.device.memory_mib, d.device.model, d.device.max_shares, d.device.cordoned)
        for d in by_uuid(left)
    )
    return left.node.cpu_milli, left.node.memory_mib, *kinds
