"""What administrators do with a node or one of its GPUs: the same on the page, through the API and by ``fgpu node``."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from fgpu_scheduler.core.model import Device, Node, NodeState
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.audit import Audit
from fgpu_scheduler.store.store import Store


class NodeAction(StrEnum):
    """What may become of a node."""

    CORDON = "cordon"
    UNCORDON = "uncordon"
    GONE = "gone"


class Change(NamedTuple):
    """The state that a node must be in, the state that it then gets, and the effect in words."""

    was: NodeState
    to: NodeState
    effect: str


CHANGES = {
    NodeAction.CORDON: Change(NodeState.READY, NodeState.CORDONED, "takes no new sessions"),
    NodeAction.UNCORDON: Change(NodeState.CORDONED, NodeState.READY, "takes sessions again"),
    NodeAction.GONE: Change(NodeState.LOST, NodeState.GONE, "the Hub ends its sessions within a few seconds"),
}
MOST_REASON = 200
"""Characters of the reason for which a GPU is cordoned."""


def gpu_action_of(device: Device) -> NodeAction:
    """Return what may be done with a GPU as it is."""
    return NodeAction.UNCORDON if device.cordoned else NodeAction.CORDON


def node_actions_of(node: Node) -> tuple[NodeAction, ...]:
    """Return what may be done with a node as it is; nothing here opens what its cluster has closed."""
    if node.closed and node.state is NodeState.CORDONED:
        return ()
    return tuple(action for action, change in CHANGES.items() if change.was is node.state)


def act_on_node(store: Store, node_id: str, action: NodeAction, *, by: str, now_s: int) -> str:
    """Do this with a node, write it into the audit log, and return in words what follows.

    Raises:
        BadSettings: there is no such node, or this is not for a node of its state.
    """
    node = _node(store, node_id, now_s)
    change = CHANGES[action]
    # What it is at that instant: one that has just come back is not gone.
    was = store.set_node_state(node_id, change.to, now_s=now_s, only=change.was)
    if was is NodeState.READY and node.closed and action is NodeAction.UNCORDON:
        raise BadSettings(f"node {node_id!r} was closed by its cluster; open it there")
    if was is not change.was:
        raise BadSettings(f"node {node_id!r} is {was}; {action} is for a node that is {change.was}")
    Audit(store).add(
        actor=by,
        action=f"node.{action}",
        target=f"node {node_id}",
        group=node.resource_group,
        details=f"{was} -> {change.to}",
        now_s=now_s,
    )
    later = node.closed and action is NodeAction.UNCORDON
    return "takes sessions again once its cluster opens it" if later else change.effect


def act_on_gpu(
    store: Store, node_id: str, gpu: str, action: NodeAction, *, reason: str, by: str, now_s: int
) -> str:
    """Cordon or uncordon one GPU of a node, which is named by its index or UUID; return in words what follows.

    It is written into the audit log, with the reason.

    Raises:
        BadSettings: there is no such node or GPU, this is not for a GPU as it is, or the reason is too long.
    """
    node = _node(store, node_id, now_s)
    device = next((d for d in node.devices if gpu in (d.uuid, str(d.index))), None)
    if device is None:
        there = ", ".join(str(d.index) for d in node.devices) or "none"
        raise BadSettings(f"node {node_id!r} has no GPU {gpu!r}; its GPUs are {there}")
    reason = " ".join(reason.split())
    if len(reason) > MOST_REASON:
        raise BadSettings(f"reason: at most {MOST_REASON} characters")
    name = f"GPU {device.index} of node {node_id!r}"
    if action is not gpu_action_of(device):
        if action is NodeAction.GONE:
            raise BadSettings(f"{name}: use cordon or uncordon; gone is for a node")
        raise BadSettings(f"{name} is {'' if device.cordoned else 'not '}cordoned already")
    cordons = action is NodeAction.CORDON
    store.set_cordon(device.uuid, reason if cordons else None, now_s=now_s)
    Audit(store).add(
        actor=by,
        action=f"gpu.{action}",
        target=f"GPU {device.index} of node {node_id}",
        group=node.resource_group,
        details=f"{device.uuid}: {reason}" if reason else device.uuid,
        now_s=now_s,
    )
    return "takes no new sessions" if cordons else "takes sessions again"


def _node(store: Store, node_id: str, now_s: int) -> Node:
    nodes = {n.id: n for n in store.snapshot(now_s).nodes}
    if node_id not in nodes:
        there = ", ".join(nodes) or "none: the Hub has not started yet"
        raise BadSettings(f"there is no node {node_id!r}; the nodes are {there}")
    return nodes[node_id]
