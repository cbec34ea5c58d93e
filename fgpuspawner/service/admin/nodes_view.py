"""Nodes and their GPUs for administrators: state, isolation, and sessions. Pure."""

from __future__ import annotations

from collections.abc import Iterable

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
from fgpuspawner.service.admin import objects
from fgpuspawner.service.api.capacity import device_fields
from fgpuspawner.service.model import World
from fgpuspawner.text.sessions import server_words

STATE_WORDS = {
    NodeState.READY: "takes sessions",
    NodeState.CORDONED: "takes no new sessions",
    NodeState.LOST: "does not answer",
    NodeState.GONE: "is gone: an administrator confirmed it",
}


def state_words(node: Node) -> str:
    """Return a node's state, to follow its name: "takes sessions"."""
    if node.closed and node.state is NodeState.CORDONED:
        return "takes no new sessions: its cluster has closed it"
    return STATE_WORDS[node.state]


def nodes_object(world: World, verdicts: Iterable[Verdict]) -> objects.Nodes:
    """Return every node with its GPUs and their sessions. For administrators only."""
    said = {verdict.node_id: verdict for verdict in verdicts}
    chosen = {own.node_id: own for own in world.isolation}
    left = {n.node.id: n for n in free(world.snapshot)}
    found = []
    for node in world.snapshot.nodes:
        own, verdict, room = chosen.get(node.id), said.get(node.id), left[node.id]
        sessions = on_node(world, node.id)
        found.append(
            objects.Node.of(
                node,
                name=node.id,
                group=node.resource_group,
                state_text=state_words(node),
                actions=[action.value for action in node_actions_of(node)],
                can_drain=bool(sessions) and node.state in (NodeState.READY, NodeState.CORDONED),
                isolation=own.backend if own else None,
                reason=own.reason if own else None,
                verified=verdict and objects.Verified.of(verdict, in_force=not verdict.problems),
                cpu_total=format_milli(node.cpu_milli),
                cpu_used=format_milli(max(0, node.cpu_milli - room.cpu_milli)),
                memory_mib_total=node.memory_mib,
                memory_mib_used=max(0, node.memory_mib - room.memory_mib),
                sessions=len(sessions),
                devices=[_device(device, world) for device in room.devices],
                warnings=[
                    objects.Warned.of(s, user=s.request.user)
                    for s in sessions
                    if s.message and s.state is SessionState.RUNNING
                ],
            )
        )
    return objects.Nodes(nodes=found, simulated=world.simulated())


def on_node(world: World, node_id: str) -> list[Session]:
    """Return the sessions that hold something of a node, by id."""
    return [
        s
        for s in world.snapshot.sessions
        if s.state in HOLDING and s.placement is not None and s.placement.node_id == node_id
    ]


def node_of(world: World, node_id: str) -> Node | None:
    return next((n for n in world.snapshot.nodes if n.id == node_id), None)


def _device(left: DeviceFree, world: World) -> objects.NodeDevice:
    health = world.gpus.of(left.device.uuid, world.snapshot.now_s)
    return objects.NodeDevice.of(
        left.device,
        **device_fields(left),
        action=gpu_action_of(left.device).value,
        health=health,
        problem="" if health is None else health.problem,
        sessions=[
            objects.DeviceSession.of(
                session,
                share,
                session.request,
                display_name=server_words(session),
                compute_percent=compute_of((share,)),
            )
            for session, share in world.held.get(left.device.uuid, ())
        ],
    )
