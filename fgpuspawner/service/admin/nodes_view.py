"""Nodes and their GPUs as administrators see them: state, isolation, and who is on each. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from fgpu_scheduler import (
    HOLDING,
    DeviceFree,
    Node,
    NodeState,
    Session,
    SessionState,
    compute_of,
    format_milli,
    free,
    gpu_action_of,
    node_actions_of,
)
from fgpuspawner.isolation.verified import Verdict
from fgpuspawner.service.api.capacity import device_object
from fgpuspawner.service.model import Json, World
from fgpuspawner.text.sessions import server_words

STATE_WORDS = {
    NodeState.READY: "takes sessions",
    NodeState.CORDONED: "takes no more sessions",
    NodeState.LOST: "does not answer",
    NodeState.GONE: "is gone: an administrator confirmed it",
}


def state_words(node: Node) -> str:
    """Return how a node is, after its name: "takes sessions"."""
    if node.closed and node.state is NodeState.CORDONED:
        return "takes no more sessions: its cluster has closed it"
    return STATE_WORDS[node.state]


def nodes_object(world: World, verdicts: Iterable[Verdict]) -> Json:
    """Return every node with its GPUs and the sessions on them. For administrators only."""
    said = {verdict.node_id: verdict for verdict in verdicts}
    chosen = {own.node_id: own for own in world.isolation}
    left = {n.node.id: n for n in free(world.snapshot)}
    found = []
    for node in world.snapshot.nodes:
        own, verdict, room = chosen.get(node.id), said.get(node.id), left[node.id]
        sessions = on_node(world, node.id)
        found.append(
            {
                "name": node.id,
                "group": node.resource_group,
                "state": node.state.value,
                "state_text": state_words(node),
                "closed": node.closed,
                "actions": [action.value for action in node_actions_of(node)],
                "can_drain": bool(sessions) and node.state in (NodeState.READY, NodeState.CORDONED),
                "isolation": own.backend if own else None,
                "reason": own.reason if own else None,
                "verified": _verdict(verdict),
                "cpu_total": format_milli(node.cpu_milli),
                "cpu_used": format_milli(max(0, node.cpu_milli - room.cpu_milli)),
                "memory_mib_total": node.memory_mib,
                "memory_mib_used": max(0, node.memory_mib - room.memory_mib),
                "sessions": len(sessions),
                "devices": [_device(device, world) for device in room.devices],
                "warnings": [
                    {"id": s.id, "user": s.request.user, "message": s.message}
                    for s in sessions
                    if s.message and s.state is SessionState.RUNNING
                ],
            }
        )
    return {"nodes": found, "simulated": world.simulated()}


def on_node(world: World, node_id: str) -> list[Session]:
    """Return the sessions that hold something of a node, by id."""
    return [
        s
        for s in world.snapshot.sessions
        if s.state in HOLDING and s.placement is not None and s.placement.node_id == node_id
    ]


def node_of(world: World, node_id: str) -> Node | None:
    """Return the node of this name."""
    return next((n for n in world.snapshot.nodes if n.id == node_id), None)


def _verdict(verdict: Verdict | None) -> Json | None:
    if verdict is None:
        return None
    said = {key: getattr(verdict, key) for key in ("session_id", "backend", "at_s")}
    return {**said, "in_force": not verdict.problems, "problems": list(verdict.problems)}


def _device(left: DeviceFree, world: World) -> Json:
    health = world.gpus.of(left.device.uuid, world.snapshot.now_s)
    return {
        **device_object(left),
        # An administrator may have made the unit smaller since.
        "fgpu_used": format_milli(max(0, left.device.capacity_milli - left.fgpu_milli)),
        "cordon_reason": left.device.cordon_reason,
        "action": gpu_action_of(left.device).value,
        "health": None if health is None else asdict(health),
        "problem": "" if health is None else health.problem,
        "sessions": [
            {
                "id": session.id,
                "user": session.request.user,
                "server_name": session.request.server_name,
                "display_name": server_words(session),
                "state": session.state.value,
                "fgpu": format_milli(share.fgpu_milli),
                "memory_mib": share.memory_mib,
                "compute_percent": compute_of((share,)),
            }
            for session, share in world.held.get(left.device.uuid, ())
        ],
    }
