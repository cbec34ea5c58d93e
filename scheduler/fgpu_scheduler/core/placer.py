"""The placement of many requests, one after the other, with the results of `placement.place`.

1. For each request shape the nodes are ranked once.
2. A placement or an update changes one node. Each ranking scores only the changed nodes again, when it is next used.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from heapq import heapify, heappop, heappush

from fgpu_scheduler.core.model import Placement, Request
from fgpu_scheduler.core.placement import (
    Free,
    NodeFree,
    Score,
    ShareOfKind,
    best_device_set,
    claimed,
    placement_of,
)
from fgpu_scheduler.core.shares import RequestShape, per_preferred_model, shape

#: Bounds of the caches: beyond them a cache is dropped, and filled again when needed.
KEPT_SHAPES = 2000
KEPT_CHANGES = 1 << 17

#: Score, node, the number of its last change, and the indexes of the devices taken.
_Entry = tuple[tuple[int, ...], str, int, tuple[int, ...]]
#: The free CPU and memory of a node, and the free fGPU of all its devices and of the one with most.
_Amounts = tuple[int, int, int, int]


class _Ranking:
    """The nodes that fit one shape, best first. Entries of nodes that have changed since are stale."""

    __slots__ = ("heap", "seen", "share_of_kind")

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        #: The number of changes that are included; -1 if the nodes were never ranked.
        self.seen = -1
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
        #: The free amounts of each node by its id, in the order of the ids.
        self.nodes = {node.node.id: node for node in sorted(left, key=lambda each: each.node.id)}
        self._score = score
        self._amounts = {node_id: _amounts(node) for node_id, node in self.nodes.items()}
        self._least_capacity = min((d.device.capacity_milli for n in left for d in n.devices), default=0)
        self._changes: list[str] = []
        #: For each node the number of its last change: only its entry with that number is valid.
        self._changed = dict.fromkeys(self.nodes, 0)
        self._rankings: dict[RequestShape, _Ranking] = {}

    def copy(self) -> Placer:
        """Return an independent copy."""
        other = copy(self)
        other.nodes, other._amounts = dict(self.nodes), dict(self._amounts)
        other._changes, other._changed = list(self._changes), dict(self._changed)
        other._rankings = {asked: ranking.copy() for asked, ranking in self._rankings.items()}
        return other

    def place(self, request: Request) -> Placement | None:
        """Claim the best placement of ``request``, or return None if none fits."""
        where = self.best(request)
        if where is not None:
            self.update(claimed(self.nodes[where.node_id], request, where))
        return where

    def best(self, request: Request, *, elsewhere: str | None = None) -> Placement | None:
        """Return the best placement of ``request``, on any node but ``elsewhere``, or None if none fits."""
        for asked in per_preferred_model(shape(request)):
            found = self._ranked(asked).heap
            if found and found[0][1] == elsewhere:
                found = sorted(e for e in found if e[1] != elsewhere and self._changed[e[1]] == e[2])
            if found:
                _, node_id, _, taken = found[0]
                return placement_of(self.nodes[node_id], asked, taken)
        return None

    def fits(self, request: Request) -> bool:
        """Return whether ``request`` would be placed now."""
        return any(self._ranked(asked).heap for asked in per_preferred_model(shape(request)))

    def update(self, left: NodeFree) -> None:
        """Set the free amounts of a node."""
        if len(self._changes) >= KEPT_CHANGES:
            self._rankings = {}
            self._changes = []
            self._changed = dict.fromkeys(self.nodes, 0)
        node_id = left.node.id
        self.nodes[node_id], self._amounts[node_id] = left, _amounts(left)
        self._changes.append(node_id)
        self._changed[node_id] = len(self._changes)

    def score_by(self, score: Score) -> None:
        """Use this score from now on."""
        if score is not self._score:
            self._score = score
            # Each is ranked again when it is next used.
            self._rankings = {}

    @property
    def left(self) -> Free:
        """The free amounts of every node, by id."""
        return tuple(self.nodes.values())

    def _ranked(self, asked: RequestShape) -> _Ranking:
        """Return the ranking for a shape, with every change included and a valid best entry."""
        ranking = self._rankings.get(asked)
        if ranking is None:
            if len(self._rankings) >= KEPT_SHAPES:
                self._rankings = {}
            ranking = self._rankings[asked] = _Ranking()
        heap, changed, now = ranking.heap, self._changed, len(self._changes)
        behind = now - ranking.seen
        if ranking.seen < 0 or behind >= len(changed) or len(heap) > 4 * len(changed):
            heap[:] = self._entries(ranking, asked, changed)
            heapify(heap)
        elif behind:
            latest = enumerate(self._changes[ranking.seen :], ranking.seen + 1)
            for entry in self._entries(ranking, asked, [i for n, i in latest if changed[i] == n]):
                heappush(heap, entry)
        ranking.seen = now
        while heap and changed[heap[0][1]] != heap[0][2]:
            heappop(heap)
        return ranking

    def _entries(self, ranking: _Ranking, asked: RequestShape, nodes: Iterable[str]) -> Iterable[_Entry]:
        score, shares, amounts = self._score, ranking.share_of_kind, self._amounts
        least = asked.cpu_milli, asked.memory_mib, asked.fgpu_milli
        on_one = min(asked.fgpu_milli, self._least_capacity)
        for node_id in nodes:
            cpu_milli, memory_mib, all_milli, most_milli = amounts[node_id]
            # Most nodes of a busy cluster end here.
            if cpu_milli < least[0] or memory_mib < least[1] or all_milli < least[2] or most_milli < on_one:
                continue
            best = best_device_set(self.nodes[node_id], asked, score=score, share_of_kind=shares)
            if best is not None:
                yield best[0], node_id, self._changed[node_id], best[1]


def _amounts(left: NodeFree) -> _Amounts:
    free = [max(0, d.fgpu_milli) for d in left.devices]
    return left.cpu_milli, left.memory_mib, sum(free), max(free, default=0)
