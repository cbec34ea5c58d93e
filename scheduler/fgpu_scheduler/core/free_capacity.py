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
from fgpu_scheduler.core.reservations import Release
from fgpu_scheduler.core.scores.placements import FixedScore, ScoreFactory, score_for
from fgpu_scheduler.core.scores.workload import ClusterTotals

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
        self._on_node = PersistentMap[str, Mapping[int, Session]](part_of_name)
        #: The nodes where a pass has changed the free capacity since then.
        self._changed: dict[str, None] = {}
        #: What the score was made from: the placement policy and the counts of requests.
        self._score_inputs: tuple[ScoreFactory, tuple[RequestCount, ...]] | None = None
        self._totals: ClusterTotals | None = None
        #: The free capacity of each node, by node id.
        self.nodes: dict[str, NodeFree] = {}
        #: The same as three numbers per node, for a quick check before the placer's.
        self._amounts: dict[str, FreeAmounts] = {}
        #: The known ends of sessions on each node, computed when first needed.
        self.ends: dict[str, tuple[Release, ...]] = {}
        #: The time and the quotas for which ``ends`` holds.
        self._ends_inputs: tuple[int, tuple[Quota, ...]] = 0, ()
        self.score: Score = best_fit
        self.placer = Placer((), score=best_fit)

    def refresh(self, snapshot: Snapshot, resource_group: str, factory: ScoreFactory) -> None:
        """Bring the free capacity to a snapshot. ``resource_group`` must be the same in every call."""
        same_nodes = self._nodes is snapshot.nodes
        inputs = self._score_inputs
        if (
            not same_nodes
            or inputs is None
            or inputs[0] != factory
            or inputs[1] is not snapshot.request_counts
        ):
            if not isinstance(factory, FixedScore) and (self._totals is None or not same_nodes):
                self._totals = ClusterTotals.of(
                    n for n in snapshot.nodes if n.resource_group == resource_group
                )
            self.score = score_for(factory, snapshot, resource_group, self._totals)
            self._score_inputs = factory, snapshot.request_counts
        on_node = snapshot.index.on_node
        now_s, quotas = self._ends_inputs
        if not same_nodes or snapshot.now_s < now_s or snapshot.quotas is not quotas:
            self.ends = {}
        self._ends_inputs = snapshot.now_s, snapshot.quotas
        if same_nodes:
            self.placer.score_by(self.score)
            changed = self._changed | dict.fromkeys(on_node.changed_keys(self._on_node))
            for node_id in changed:
                self.ends.pop(node_id, None)
                if node_id in self.nodes:
                    there = on_node.get(node_id, NO_SESSIONS)
                    self.put(placement.free_on_node(self.nodes[node_id].node, there))
                    self.placer.update(self.nodes[node_id])
            self._on_node, self._changed = on_node, {}
            return
        self._nodes, self._on_node, self._changed = snapshot.nodes, on_node, {}
        own = [node for node in snapshot.nodes if node.resource_group == resource_group]
        self.nodes = {n.id: placement.free_on_node(n, on_node.get(n.id, NO_SESSIONS)) for n in own}
        self._amounts = {node_id: _amounts(node) for node_id, node in self.nodes.items()}
        self.placer = Placer(tuple(self.nodes.values()), score=self.score)
        self.least_capacity = min((d.capacity_milli for node in own for d in node.devices), default=0)
        self.devices = frozenset((d.capacity_milli, d.memory_mib) for node in own for d in node.devices)

    def put(self, left: NodeFree) -> None:
        """Set the free capacity of a node. The caller updates the placer, unless the placer made the change."""
        node_id = left.node.id
        self.nodes[node_id] = left
        self._amounts[node_id] = _amounts(left)
        self._changed[node_id] = None

    def amounts(self, node_id: str) -> FreeAmounts:
        """Return the free amounts of a node."""
        return self._amounts[node_id]

    def copy(self) -> FreeCapacity:
        """Return an independent copy."""
        other = copy(self)
        other.nodes, other._amounts, other._changed = (
            dict(self.nodes),
            dict(self._amounts),
            dict(self._changed),
        )
        other.placer = self.placer.copy()
        return other

    def may_fit(self, asked: Request) -> bool:
        """Return whether any node has enough CPU, memory and fGPU. Only the placer knows whether the request fits."""
        cpu, memory = asked.cpu_milli, asked.memory_mib
        fgpu = min(asked.fgpu_milli, self.least_capacity)
        # Not any(), as in `UnschedulableRequests`.
        for amounts in self._amounts.values():
            if amounts[0] >= cpu and amounts[1] >= memory and amounts[2] >= fgpu:
                return True
        return False


class PlanCache:
    """The `FreeCapacity` of each resource group, kept between plans. It makes plans faster and does not change them."""

    def __init__(self) -> None:
        self._groups: dict[str, FreeCapacity] = {}

    def nodes_of(self, resource_group: str) -> tuple[NodeFree, ...]:
        """Return the free capacity of each node after the last plan or pass."""
        capacity = self._groups.get(resource_group)
        return () if capacity is None else tuple(capacity.nodes.values())

    @contextmanager
    def free_capacity(
        self, snapshot: Snapshot, resource_group: str, factory: ScoreFactory
    ) -> Iterator[FreeCapacity]:
        """Lend the free capacity of a snapshot. If the caller's block raises, it is dropped: it may be half changed."""
        capacity = self._groups.pop(resource_group, None) or FreeCapacity()
        capacity.refresh(snapshot, resource_group, factory)
        yield capacity
        self._groups[resource_group] = capacity


def _amounts(left: NodeFree) -> FreeAmounts:
    return left.cpu_milli, left.memory_mib, max((d.fgpu_milli for d in left.devices), default=0)
