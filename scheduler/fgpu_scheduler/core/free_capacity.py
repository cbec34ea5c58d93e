"""The free capacity of a resource group's nodes and the placement of requests on it, kept from plan to plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import Node, Quota, Request, RequestCount, Session, Snapshot
from fgpu_scheduler.core.pending_queue import FreeAmounts
from fgpu_scheduler.core.persistent_map import PersistentMap, part_of_name
from fgpu_scheduler.core.placement import NodeFree, Score, best_fit
from fgpu_scheduler.core.placer import Placer
from fgpu_scheduler.core.release_schedule import Release
from fgpu_scheduler.core.scores.cluster_totals import ClusterTotals
from fgpu_scheduler.core.scores.placements import FixedScore, ScoreFactory, score_for

#: The sessions of an empty node: the same object each time.
NOBODY: Mapping[int, Session] = {}


class FreeCapacity:
    """The free capacity of a resource group's nodes during a pass, kept from plan to plan.

    `lay` brings it to a snapshot. It keeps only what was computed from the same objects that the snapshot holds (nodes,
    sessions on a node, counts of requests) and computes the rest again, so it needs no notice of changes.
    """

    def __init__(self) -> None:
        self._nodes: tuple[Node, ...] | None = None
        #: The sessions on each node when its free capacity was counted.
        self._on_node = PersistentMap[str, Mapping[int, Session]](part_of_name)
        #: The nodes where a pass has changed the free capacity since then.
        self._changed: dict[str, None] = {}
        #: What the score was made from: the placing policy and the counts of requests.
        self._scored: tuple[ScoreFactory, tuple[RequestCount, ...]] | None = None
        self._cluster: ClusterTotals | None = None
        #: The free capacity of each node, by node id.
        self.left: dict[str, NodeFree] = {}
        #: The same as three numbers per node, for a quick check before the placer's.
        self._rooms: dict[str, FreeAmounts] = {}
        #: The known ends of sessions on each node, computed when first needed.
        self.ends: dict[str, tuple[Release, ...]] = {}
        #: The time and the quotas for which ``ends`` holds.
        self._ends_by: tuple[int, tuple[Quota, ...]] = 0, ()
        self.score: Score = best_fit
        self.placer = Placer((), score=best_fit)

    def lay(self, snapshot: Snapshot, resource_group: str, placing: ScoreFactory) -> None:
        """Bring the free capacity to a snapshot. ``resource_group`` must be the same in every call."""
        alike = self._nodes is snapshot.nodes
        if (
            not alike
            or self._scored is None
            or self._scored[0] != placing
            or self._scored[1] is not snapshot.request_counts
        ):
            if not isinstance(placing, FixedScore) and (self._cluster is None or not alike):
                self._cluster = ClusterTotals.of(
                    n for n in snapshot.nodes if n.resource_group == resource_group
                )
            self.score = score_for(placing, snapshot, resource_group, self._cluster)
            self._scored = placing, snapshot.request_counts
        on_node = snapshot.index.on_node
        now_s, quotas = self._ends_by
        if not alike or snapshot.now_s < now_s or snapshot.quotas is not quotas:
            self.ends = {}
        self._ends_by = snapshot.now_s, snapshot.quotas
        if alike:
            self.placer.score_by(self.score)
            changed = self._changed | dict.fromkeys(on_node.changed_keys(self._on_node))
            for node_id in changed:
                self.ends.pop(node_id, None)
                if node_id in self.left:
                    there = on_node.get(node_id, NOBODY)
                    self.put(placement.free_on_node(self.left[node_id].node, there))
                    self.placer.update(self.left[node_id])
            self._on_node, self._changed = on_node, {}
            return
        self._nodes, self._on_node, self._changed = snapshot.nodes, on_node, {}
        own = [node for node in snapshot.nodes if node.resource_group == resource_group]
        self.left = {node.id: placement.free_on_node(node, on_node.get(node.id, NOBODY)) for node in own}
        self._rooms = {node_id: _room(node) for node_id, node in self.left.items()}
        self.placer = Placer(tuple(self.left.values()), score=self.score)
        self.least_capacity = min((d.capacity_milli for node in own for d in node.devices), default=0)
        self.devices = frozenset((d.capacity_milli, d.memory_mib) for node in own for d in node.devices)

    def put(self, left: NodeFree) -> None:
        """Set the free capacity of a node. The caller updates the placer, unless the placer made the change."""
        node_id = left.node.id
        self.left[node_id] = left
        self._rooms[node_id] = _room(left)
        self._changed[node_id] = None

    def room(self, node_id: str) -> FreeAmounts:
        """Return the free amounts of a node."""
        return self._rooms[node_id]

    def copy(self) -> FreeCapacity:
        """Return an independent copy."""
        other = copy(self)
        other.left, other._rooms, other._changed = dict(self.left), dict(self._rooms), dict(self._changed)
        other.placer = self.placer.copy()
        return other

    def has_room(self, asked: Request) -> bool:
        """Return whether any node has enough CPU, memory and fGPU. Only the placer knows whether the request fits."""
        cpu, memory = asked.cpu_milli, asked.memory_mib
        fgpu = min(asked.fgpu_milli, self.least_capacity)
        # Not any(), as in `UnschedulableRequests`.
        for room in self._rooms.values():  # noqa: SIM110
            if room[0] >= cpu and room[1] >= memory and room[2] >= fgpu:
                return True
        return False


class PlanCache:
    """A cache of each resource group's `FreeCapacity` between plans. It makes plans faster and does not change them."""

    def __init__(self) -> None:
        self._grounds: dict[str, FreeCapacity] = {}

    def left(self, resource_group: str) -> tuple[NodeFree, ...]:
        """Return the free capacity of each node after the last plan or pass."""
        ground = self._grounds.get(resource_group)
        return () if ground is None else tuple(ground.left.values())

    @contextmanager
    def ground(
        self, snapshot: Snapshot, resource_group: str, placing: ScoreFactory
    ) -> Iterator[FreeCapacity]:
        """Lend the free capacity of a snapshot. If the caller's block raises, it is dropped: it may be half changed."""
        ground = self._grounds.pop(resource_group, None) or FreeCapacity()
        ground.lay(snapshot, resource_group, placing)
        yield ground
        self._grounds[resource_group] = ground


def _room(left: NodeFree) -> FreeAmounts:
    return left.cpu_milli, left.memory_mib, max((d.fgpu_milli for d in left.devices), default=0)
