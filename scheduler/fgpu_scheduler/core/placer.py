"""The placement of many requests, one after the other, with the results of `placement.place`.

1. For each request shape the nodes are ranked once. With many nodes all are scored at once in a `NodeTable`, if the score
   has a batch form; the ranking begins with the best `RANKED` nodes.
2. A placement or an update changes one node. Each ranking scores only the changed nodes again, when it is next used.
3. When the ranked nodes are used up, all nodes are ranked again.
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
from fgpu_scheduler.core.scores.simple import batch_form
from fgpu_scheduler.core.shares import RequestShape, per_preferred_model, shape

#: Bounds of the caches: beyond them a cache is dropped, and filled again when needed.
KEPT_SHAPES = 2000
KEPT_CHANGES = 1 << 17
#: Up to this many nodes are scored one by one, which is faster than all at once.
FEW = 12
#: The least number of nodes in a new ranking; the others are ranked when these are used up.
RANKED = 128
#: Nodes with larger devices are scored one by one: batch scores keep a table with a number for each amount of a device.
LARGEST_CAPACITY_MILLI = 20_000

#: Score, node, the number of its last change, and the index of the first device taken.
_Entry = tuple[tuple[int, ...], int, int, int]
#: Score and node of the last entry of a ranking; nodes of equal score are in their order.
_Bound = tuple[tuple[int, ...], int]


class _Ranking:
    """The nodes that fit one shape, best first. Entries of nodes that have changed since are stale."""

    __slots__ = ("heap", "most", "seen", "share_of_kind")

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        #: The number of changes that are included; -1 if the nodes were never ranked.
        self.seen = -1
        #: The ranking leaves out the nodes after this bound; None if it has all.
        self.most: _Bound | None = None
        self.share_of_kind: ShareOfKind = {}

    def copy(self) -> _Ranking:
        other = copy(self)
        other.heap = list(self.heap)
        return other


class Placer:
    """The free amounts of every node, and the best placement of the next request.

    `place` claims the placement that it returns; `update` sets the free amounts of a node, after a release for
    example. The same calls in the same order give the same placements as `placement.place`.
    """

    def __init__(self, left: Free, *, score: Score) -> None:
        # Equal scores go to the lowest node id, so the order of the argument must not matter.
        left = tuple(sorted(left, key=lambda each: each.node.id))
        self._score = score
        self._many = batch_form(score)
        self._nodes = list(left)
        self._at = {node.node.id: at for at, node in enumerate(left)}
        self._changes: list[int] = []
        #: For each node the number of its last change: only its entry with that number is valid.
        self._changed = [0] * len(left)
        self._rankings: dict[RequestShape, _Ranking] = {}
        self._tables: dict[str, list[NodeTable]] | None = None
        self._table_of: list[NodeTable | None] = []
        #: The nodes that are in no table, once there are tables.
        self._single: list[int] = []

    def copy(self) -> Placer:
        """Return an independent copy."""
        other = copy(self)
        other._nodes, other._changes, other._changed = (
            list(self._nodes),
            list(self._changes),
            list(self._changed),
        )
        other._rankings = {asked: ranking.copy() for asked, ranking in self._rankings.items()}
        other._tables = None
        return other

    def place_elsewhere(self, request: Request, node_id: str) -> Placement | None:
        """Claim the best placement of ``request`` on any other node, or return None if none fits."""
        at = self._at[node_id]
        left = self._nodes[at]
        self._change(at, replace(left, cpu_milli=-1))  # Nothing fits there.
        where = self.place(request)
        self._change(at, left)
        return where

    def place(self, request: Request) -> Placement | None:
        """Claim the best placement of ``request``, or return None if none fits."""
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
        """Set the free amounts of a node.

        Raises:
            KeyError: there is no such node.
        """
        at = self._at[node.node.id]
        if node.node != self._nodes[at].node:
            # The table and the rankings were made with the old devices.
            self._tables = None
            self._rankings = {}
        self._change(at, node)

    def score_by(self, score: Score) -> None:
        """Use this score from now on."""
        if score is not self._score:
            self._score, self._many = score, batch_form(score)
            # Each is ranked again when it is next used.
            for ranking in self._rankings.values():
                ranking.seen, ranking.share_of_kind = -1, {}

    @property
    def left(self) -> Free:
        """The free amounts of every node, by id."""
        return tuple(self._nodes)

    def _change(self, at: int, left: NodeFree) -> None:
        if len(self._changes) >= KEPT_CHANGES:
            self._rankings = {}
            self._changes = []
            self._changed = [0] * len(self._nodes)
        self._nodes[at] = left
        self._changes.append(at)
        self._changed[at] = len(self._changes)
        table = self._table_of[at] if self._tables is not None else None
        if table is not None:
            table.put(at, left)

    def _ranked(self, asked: RequestShape) -> _Ranking:
        """Return the ranking for a shape, with every change included and a valid best entry."""
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
            for entry in self._score_changed(ranking, asked, [at for n, at in latest if changed[at] == n]):
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
        """Rank all nodes; if they are many, the worst ones are left out."""
        ranking.most = None
        if self._many is None or len(self._nodes) <= FEW:
            ranking.heap = self._score_nodes(ranking, asked, range(len(self._nodes)))
        else:
            if self._tables is None:
                self._tables = self._in_tables()
            ranking.heap = self._score_nodes(ranking, asked, self._single)
            for table in self._tables.get(asked.resource_group, ()):
                entries, most = self._score_table(asked, table, None, self._many)
                ranking.heap += entries
                if most is not None:
                    ranking.most = most if ranking.most is None else min(most, ranking.most)
        heapify(ranking.heap)

    def _score_changed(self, ranking: _Ranking, asked: RequestShape, nodes: list[int]) -> list[_Entry]:
        """Return an entry for each node that fits; nodes beyond the bound of the ranking may be left out."""
        if self._many is None or self._tables is None or len(nodes) <= FEW:
            return self._score_nodes(ranking, asked, nodes)
        own = self._tables.get(asked.resource_group, ())
        found = self._score_nodes(ranking, asked, [at for at in nodes if self._table_of[at] is None])
        for table in own:
            inside = [at for at in nodes if self._table_of[at] is table]
            if inside:
                found += self._score_table(asked, table, inside, self._many, most=ranking.most)[0]
        return found

    def _score_table(
        self,
        asked: RequestShape,
        table: NodeTable,
        nodes: Sequence[int] | None,
        batch: BatchScore,
        *,
        most: _Bound | None = None,
    ) -> tuple[list[_Entry], _Bound | None]:
        """Return the entries of the nodes that fit, and the bound if more were left out.

        Of given ``nodes``, those beyond ``most`` are left out: all nodes are ranked again before they could be used.
        """
        found = table.takes(asked, nodes)
        if found is None:
            return [], None
        fitting, takes = found
        scores, places = batch(takes), takes.place
        kept: Ints | None = None
        if nodes is None and fitting.size > 2 * RANKED:
            # Similar nodes have equal first scores, so more than RANKED nodes can remain here.
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

    def _score_nodes(self, ranking: _Ranking, asked: RequestShape, nodes: Iterable[int]) -> list[_Entry]:
        found: list[_Entry] = []
        for at in nodes:
            best = best_device_set(
                self._nodes[at], asked, score=self._score, share_of_kind=ranking.share_of_kind
            )
            if best is not None:
                score, taken = best
                found.append((score, at, self._changed[at], taken[0] if taken else 0))
        return found

    def _in_tables(self) -> dict[str, list[NodeTable]]:
        """Put the nodes into tables of one capacity each; the other nodes are scored one by one."""
        groups: dict[tuple[str, int], list[int]] = {}
        self._single, self._table_of = [], [None] * len(self._nodes)
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
            table = NodeTable({at: self._nodes[at] for at in nodes})
            for at in nodes:
                self._table_of[at] = table
            found.setdefault(group, []).append(table)
        return found
