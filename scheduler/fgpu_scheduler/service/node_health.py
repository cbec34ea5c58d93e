"""Which nodes answer: what follows for their state, and for the sessions that were to start there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fgpu_scheduler.core.lifecycle import LAUNCHING
from fgpu_scheduler.core.model import Node, NodeState, SessionState, Snapshot


@dataclass(frozen=True, slots=True)
class NodeChanges:
    """What one look at the nodes changes."""

    lost: tuple[str, ...]
    back: tuple[str, ...]
    requeued: tuple[int, ...]
    """Sessions with a place on a node that does not answer, of which nothing was started: back to their places."""
    gone: tuple[str, ...] = ()
    ended: tuple[int, ...] = ()
    """Sessions of nodes of which an administrator says that they are gone: nothing of them runs any more."""


def node_changes(
    snapshot: Snapshot,
    reachable: Collection[str],
    launching: Collection[int],
    nodes_with_ghosts: Collection[str] = (),
    late: Collection[str] = (),
) -> NodeChanges:
    """Return what follows from which nodes answered. Pure.

    A node that does not answer takes nothing more, and keeps the shares of what it runs: nobody knows whether that
    has ended. A node that an administrator cordoned stays so. ``nodes_with_ghosts`` are the nodes that still run what belongs to
    nobody: one that is back takes nothing before that has ended, because it would use what is promised to others. Of one
    that is ``late`` nothing is known yet.
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
        # Not before the last launch there has come to nothing: until then the word still ends sessions.
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
    """Return the nodes with what the store remembers of those that do not answer, sorted by their ids.

    What is configured of such a node (its resource group) counts; of CPU, memory and devices what was there last. One
    that was LOST stays so until it has been seen what it still runs.
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
