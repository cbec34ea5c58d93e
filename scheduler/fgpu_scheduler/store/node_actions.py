"""Administrators' actions on a node or a GPU, shared by the page, the API and ``fgpu node``."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from fgpu_scheduler.core.model import Device, Node, NodeState
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.administration import Audit
from fgpu_scheduler.store.store import Store


class NodeAction(StrEnum):
    CORDON = "cordon"
    UNCORDON = "uncordon"
    GONE = "gone"


class NodeChange(NamedTuple):
    """The state that a node must be in, the state that it then gets, and the effect in words."""

    was: NodeState
    to: NodeState
    effect: str


CHANGES = {
    NodeAction.CORDON: NodeChange(NodeState.READY, NodeState.CORDONED, "takes no new sessions"),
    NodeAction.UNCORDON: NodeChange(NodeState.CORDONED, NodeState.READY, "takes sessions again"),
    NodeAction.GONE: NodeChange(
        NodeState.LOST, NodeState.GONE, "the Hub ends its sessions within a few seconds"
    ),
}
MOST_REASON = 200
"""The longest reason for cordoning a GPU, in characters."""


def gpu_action_of(device: Device) -> NodeAction:
    """Return the action that is possible on a GPU now."""
    return NodeAction.UNCORDON if device.cordoned else NodeAction.CORDON


def node_actions_of(node: Node) -> tuple[NodeAction, ...]:
    """Return the actions that are possible on a node now; only its cluster can open a node that it closed."""
    if node.closed and node.state is NodeState.CORDONED:
        return ()
    return tuple(action for action, change in CHANGES.items() if change.was is node.state)


def act_on_node(store: Store, node_id: str, action: NodeAction, *, by: str, now_s: int) -> str:
    """Act on a node, write it to the audit log, and return the effect in words.

    Raises:
        BadSettings: the node does not exist, or its state does not allow the action.
    """
    node = _node(store, node_id, now_s)
    change, opens_closed = CHANGES[action], node.closed and action is NodeAction.UNCORDON
    # Decide by its state at this moment: a node that has just come back is not gone.
    was = store.set_node_state(node_id, change.to, now_s=now_s, only=change.was)
    if was is NodeState.READY and opens_closed:
        raise BadSettings(f"node {node_id!r} was closed by its cluster; open it there")
    if was is not change.was:
        raise BadSettings(f"node {node_id!r} is {was}; {action} is for a node that is {change.was}")
    _record(store, f"node.{action}", f"node {node_id}", f"{was} -> {change.to}", node, by, now_s)
    return "takes sessions again once its cluster opens it" if opens_closed else change.effect


def act_on_gpu(
    store: Store, node_id: str, gpu: str, action: NodeAction, *, reason: str, by: str, now_s: int
) -> str:
    """Cordon or uncordon a node's GPU, given by index or UUID; return the effect in words.

    The action and its reason are written to the audit log.

    Raises:
        BadSettings: the node or GPU does not exist, its state does not allow the action, or the reason is too long.
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
    if action is NodeAction.GONE:
        raise BadSettings(f"{name}: use cordon or uncordon; gone is for a node")
    if action is not gpu_action_of(device):
        raise BadSettings(f"{name} is {'' if device.cordoned else 'not '}cordoned already")
    store.set_cordon(device.uuid, reason if action is NodeAction.CORDON else None, now_s=now_s)
    details = f"{device.uuid}: {reason}" if reason else device.uuid
    _record(store, f"gpu.{action}", f"GPU {device.index} of node {node_id}", details, node, by, now_s)
    return CHANGES[action].effect


def _record(store: Store, action: str, target: str, details: str, node: Node, by: str, now_s: int) -> None:
    group = node.resource_group
    Audit(store).add(actor=by, action=action, target=target, group=group, details=details, now_s=now_s)


def _node(store: Store, node_id: str, now_s: int) -> Node:
    nodes = {n.id: n for n in store.snapshot(now_s).nodes}
    if node_id not in nodes:
        there = ", ".join(nodes) or "none: the Hub has not started yet"
        raise BadSettings(f"there is no node {node_id!r}; the nodes are {there}")
    return nodes[node_id]
