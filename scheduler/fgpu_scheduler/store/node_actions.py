"""What administrators do with a node: the same from the page, through the API, and with ``fgpu node``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fgpu_scheduler.core.model import NodeState
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.audit import Audit
from fgpu_scheduler.store.store import Store


class NodeAction(StrEnum):
    """What may become of a node."""

    CORDON = "cordon"
    UNCORDON = "uncordon"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Step:
    """Of which state the node has to be, which one it then has, and what follows from that."""

    only: NodeState
    to: NodeState
    follows: str


STEPS = {
    NodeAction.CORDON: Step(NodeState.READY, NodeState.CORDONED, "takes no more sessions"),
    NodeAction.UNCORDON: Step(NodeState.CORDONED, NodeState.READY, "takes sessions again"),
    NodeAction.GONE: Step(NodeState.LOST, NodeState.GONE, "the Hub ends its sessions within a few seconds"),
}


def node_actions_of(state: NodeState) -> tuple[NodeAction, ...]:
    """Return what may be done with a node in this state."""
    return tuple(action for action, step in STEPS.items() if step.only is state)


def act_on_node(store: Store, node_id: str, action: NodeAction, *, by: str, now_s: int) -> str:
    """Do this with a node, write it into the audit log, and return in words what follows.

    Raises:
        BadSettings: there is no such node, or this is not for a node of its state.
        StoreUnavailable: the store cannot be written.
    """
    states = {n.id: n.state for n in store.snapshot(now_s).nodes}
    state = states.get(node_id)
    if state is None:
        there = ", ".join(states) or "none: the Hub has not started yet"
        raise BadSettings(f"there is no node {node_id!r}; the nodes are {there}")
    step = STEPS[action]
    # Also what it is at that instant: one that has just come back is not gone.
    was = store.set_node_state(node_id, step.to, now_s=now_s, only=step.only) if state is step.only else state
    if was is not step.only:
        raise BadSettings(f"node {node_id!r} is {was}; {action} is for a node that is {step.only}")
    Audit(store).add(
        actor=by,
        action=f"node.{action}",
        target=f"node {node_id}",
        details=f"{state} -> {step.to}",
        now_s=now_s,
    )
    return step.follows
