"""What follows from which nodes answer, for their states and for their sessions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fgpu_scheduler.core.lifecycle import LAUNCHING
from fgpu_scheduler.core.model import Node, NodeState, SessionState, Snapshot


@dataclass(frozen=True, slots=True)
class NodeChanges:
    """What one observation of the nodes changes."""

    lost: tuple[str, ...]
    back: tuple[str, ...]
    requeued: tuple[int, ...]
    """Sessions placed on a silent node and not launched yet: they are queued again."""
    gone: tuple[str, ...] = ()
    ended: tuple[int, ...] = ()
    """Sessions on nodes that an administrator declared gone: nothing of them runs."""


def node_changes(
    snapshot: Snapshot,
    reachable: Collection[str],
    launching: Collection[int],
    nodes_with_ghosts: Collection[str] = (),
    late: Collection[str] = (),
) -> NodeChanges:
    """Return what follows from which nodes answered. Pure.

    A silent node takes no sessions, and its sessions keep their shares because they may still run. A cordoned node stays
    cordoned. A node that answers again while it runs ghosts (``nodes_with_ghosts``) stays LOST until they have ended:
    they use capacity that would be given to others. Nothing is concluded about a ``late`` node.
    """
    silent = {n.id for n in snapshot.nodes if n.id not in reachable and n.id not in late}
    gone = {n.id for n in snapshot.nodes if n.state is NodeState.GONE}
    launched_on = {
        s.placement.node_id for s in snapshot.sessions if s.placement is not None and s.id in launching
    }
    return NodeChanges(
        lost=tuple(
            n.id
            for n in snapshot.nodes
            if n.id in silent and (n.state is NodeState.READY or (n.closed and n.state is NodeState.CORDONED))
        ),
        back=tuple(
            n.id
            for n in snapshot.nodes
            if n.state is NodeState.LOST and n.id in reachable and n.id not in nodes_with_ghosts
        ),
        requeued=tuple(
            s.id
            for s in snapshot.sessions
            if s.state is SessionState.SCHEDULED
            and s.id not in launching
            and s.placement is not None
            and s.placement.node_id in silent
        ),
        # Not while a launch there is in progress: GONE has to end that session too.
        gone=tuple(sorted(gone - launched_on)),
        ended=tuple(
            s.id
            for s in snapshot.sessions
            if s.state in (*LAUNCHING, SessionState.RUNNING, SessionState.TERMINATING)
            and s.id not in launching
            and s.placement is not None
            and s.placement.node_id in gone
        ),
    )


def filled_from_store(configured: Collection[Node], stored: Collection[Node]) -> tuple[Node, ...]:
    """Return the configured nodes by id, with the stored CPU, memory and devices of those that do not answer.

    The configured resource group counts. A node stored as LOST stays LOST until what it runs was observed.
    """
    before = {node.id: node for node in stored}
    found = []
    for node in sorted(configured, key=lambda n: n.id):
        old = before.get(node.id)
        if node.state is NodeState.LOST and old is not None:
            node = replace(
                node,
                cpu_milli=node.cpu_milli or old.cpu_milli,
                memory_mib=node.memory_mib or old.memory_mib,
                devices=node.devices or old.devices,
                closed=node.closed or old.closed,
            )
        if old is not None and old.state is NodeState.LOST:
            node = replace(node, state=NodeState.LOST)
        found.append(node)
    return tuple(found)
