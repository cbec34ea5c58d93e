"""The free capacity of a resource group's nodes and the placement of requests on it, kept from plan to plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import Node, Quota, RequestCount, Session, Snapshot
from fgpu_scheduler.core.placement import NodeFree, Score, best_fit
from fgpu_scheduler.core.placer import Placer
from fgpu_scheduler.core.reservations import Release
from fgpu_scheduler.core.scores import ClusterTotals, score_for

#: The sessions of an empty node: always the same object.
NO_SESSIONS: Mapping[int, Session] = {}


class FreeCapacity:
    """The free capacity of a resource group's nodes during a pass, kept from plan to plan.

    `refresh` brings it to a snapshot. It keeps only what was computed from the same objects that the snapshot holds
    (nodes, sessions on a node, counts of requests) and computes the rest again, so it needs no notice of changes.
    """

    def __init__(self) -> None:
        self._nodes: tuple[Node, ...] | None = None
        #: The sessions on each node when its free capacity was counted.
        self._on_node: Mapping[str, Mapping[int, Session]] = {}
        #: The counts of requests that the score was made from.
        self._counts: tuple[RequestCount, ...] | None = None
        self._totals: ClusterTotals
        #: The free capacity of each node, by node id, before the passes since then have changed it.
        self._counted: dict[str, NodeFree] = {}
        #: The known ends of sessions on each node, computed when first needed.
        self.ends: dict[str, tuple[Release, ...]] = {}
        #: The time and the quotas for which ``ends`` holds.
        self._ends_inputs: tuple[int, tuple[Quota, ...]] = 0, ()
        self.score: Score = best_fit
        self.placer = Placer((), score=best_fit)

    def refresh(self, snapshot: Snapshot, resource_group: str) -> None:
        """Bring the free capacity to a snapshot. ``resource_group`` must be the same in every call."""
        same_nodes = self._nodes is snapshot.nodes
        if not same_nodes:
            own = [node for node in snapshot.nodes if node.resource_group == resource_group]
            self._totals = ClusterTotals.of(own)
        if not same_nodes or self._counts is not snapshot.request_counts:
            self.score = score_for(snapshot, resource_group, self._totals)
            self._counts = snapshot.request_counts
        on_node = snapshot.index.on_node
        now_s, quotas = self._ends_inputs
        if not same_nodes or snapshot.now_s < now_s or snapshot.quotas is not quotas:
            self.ends = {}
        self._ends_inputs = snapshot.now_s, snapshot.quotas
        if same_nodes:
            self.placer.score_by(self.score)
            before, counted = self._on_node, self._counted
            for node_id, left in self.placer.nodes.items():
                if on_node.get(node_id) is not before.get(node_id) or left is not counted[node_id]:
                    self.ends.pop(node_id, None)
                    there = on_node.get(node_id, NO_SESSIONS)
                    counted[node_id] = placement.free_on_node(left.node, there)
                    self.placer.update(counted[node_id])
            self._on_node = on_node
            return
        self._nodes, self._on_node = snapshot.nodes, on_node
        self._counted = {n.id: placement.free_on_node(n, on_node.get(n.id, NO_SESSIONS)) for n in own}
        self.placer = Placer(tuple(self._counted.values()), score=self.score)

    def copy(self) -> FreeCapacity:
        """Return an independent copy."""
        other = copy(self)
        other._counted, other.placer = dict(self._counted), self.placer.copy()
        return other


class PlanCache:
    """The `FreeCapacity` of each resource group, kept between plans. It makes plans faster and does not change them."""

    def __init__(self) -> None:
        self._groups: dict[str, FreeCapacity] = {}

    def nodes_of(self, resource_group: str) -> tuple[NodeFree, ...]:
        """Return the free capacity of each node after the last plan or pass."""
        capacity = self._groups.get(resource_group)
        return () if capacity is None else capacity.placer.left

    @contextmanager
    def free_capacity(self, snapshot: Snapshot, resource_group: str) -> Iterator[FreeCapacity]:
        """Lend the free capacity of a snapshot. If the caller's block raises, it is dropped: it may be half changed."""
        capacity = self._groups.pop(resource_group, None) or FreeCapacity()
        capacity.refresh(snapshot, resource_group)
        yield capacity
        self._groups[resource_group] = capacity
