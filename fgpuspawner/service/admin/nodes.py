"""Nodes for administrators: state, GPUs and sessions; cordon, uncordon, drain, gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from fgpu_scheduler import (
    HOLDING,
    MOST_MESSAGE_TEXT,
    MOST_REASON,
    UP,
    BadSettings,
    DeviceFree,
    FGPUError,
    Node,
    NodeAction,
    NodeState,
    Session,
    Store,
    act_on_gpu,
    act_on_node,
    compute_of,
    format_milli,
    free,
    gpu_action_of,
    node_actions_of,
    parked_mib,
)
from fgpuspawner import scopes
from fgpuspawner.isolation.choice import VERDICTS, Verdict
from fgpuspawner.service.admin import objects
from fgpuspawner.service.admin.base import AdminApi, AdminFormPage, AdminPage
from fgpuspawner.service.admin.objects import NodeChange, Nodes, NotEnded
from fgpuspawner.service.api.capacity import device_fields
from fgpuspawner.service.handler import Handler, needs
from fgpuspawner.service.model import NODE_WORDS, World
from fgpuspawner.service.problems import Problem, bad_argument, forbidden
from fgpuspawner.service.session_actions import end_session, write_audit
from fgpuspawner.text.sessions import session_name


def state_words(node: Node) -> str:
    """Return a node's state, to follow its name: "takes sessions"."""
    if node.closed and node.state is NodeState.CORDONED:
        return "takes no new sessions: its cluster has closed it"
    return NODE_WORDS[node.state]


def nodes_object(world: World, verdicts: Iterable[Verdict]) -> objects.Nodes:
    """Return every node with its GPUs and their sessions. For administrators only."""
    said = {verdict.node_id: verdict for verdict in verdicts}
    chosen = {own.node_id: own for own in world.isolation}
    left, parked = {n.node.id: n for n in free(world.snapshot)}, parked_mib(world.snapshot)
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
                parked_mib=parked.get(node.id, 0),
                sessions=len(sessions),
                devices=[_device(device, world) for device in room.devices],
                warnings=[
                    objects.Warned.of(s, user=s.request.user) for s in sessions if s.message and s.state in UP
                ],
            )
        )
    return objects.Nodes(nodes=found, simulated=world.simulated())


def on_node(world: World, node_id: str) -> list[Session]:
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
        **device_fields(left.device, world),
        action=gpu_action_of(left.device).value,
        health=health,
        problem="" if health is None else health.problem,
        sessions=[
            objects.DeviceSession.of(
                session,
                share,
                session.request,
                display_name=session_name(session.request),
                compute_percent=compute_of((share,)),
            )
            for session, share in world.held.get(left.device.uuid, ())
        ],
    )


log = logging.getLogger(__name__)

DRAIN = "drain"
CONCURRENT_ENDS = 8
"""Sessions of a drained node that are ended at a time."""
ANSWER_AFTER_S = 30.0
"""A drain that takes longer goes on in the background: a proxy gives up on an answer after a minute."""

_background_drains: set[asyncio.Task[None]] = set()
"""Keeps references to drains that go on after their answer; asyncio holds only weak ones."""


def number_words(number: float | None, unit: str = "") -> str:
    """Return a number for people: "45 °C"; "unknown" for None."""
    return "unknown" if number is None else f"{number:.0f} {unit}".strip()


async def nodes(handler: Handler) -> Nodes:
    service = handler.service
    verdicts = await asyncio.to_thread(VERDICTS.read, service.settings.data_path())
    found = nodes_object(await handler.administered_world(), verdicts)
    if not handler.viewer.admin:
        for node in found.nodes:
            node.actions = [action for action in node.actions if action != NodeAction.GONE]
    return found


async def administered_node(handler: Handler, node_id: str) -> Node:
    """Return a node that the caller administers, or raise `Problem` 404."""
    node = node_of(await handler.administered_world(), node_id)
    if node is None:
        raise Problem(404, "no_such_node", f"there is no node {node_id!r}", field="node")
    return node


def check_action(handler: Handler, action: str) -> None:
    """Refuse actions that a group's administrator must not do: others may depend on a machine that is declared gone."""
    if action == NodeAction.GONE and not handler.viewer.admin:
        raise forbidden(f"action: {needs(scopes.ADMIN)}", field="action")


async def change_node(
    handler: Handler, node_id: str, action: str, message: str = "", *, gpu: str | None = None
) -> NodeChange:
    """Act on a node or one of its GPUs; return the result in words, and the sessions that could not be ended."""
    if action == DRAIN and gpu is None:
        return await drain(handler, node_id, message)
    if action not in set(NodeAction):
        raise bad_argument("action", f"use one of {', '.join((*NodeAction, DRAIN))}")
    check_action(handler, action)
    if not handler.viewer.admin:
        await administered_node(handler, node_id)

    def act(store: Store, by: str, now_s: int) -> str:
        if gpu is None:
            return act_on_node(store, node_id, NodeAction(action), by=by, now_s=now_s)
        return act_on_gpu(store, node_id, gpu, NodeAction(action), reason=message, by=by, now_s=now_s)

    try:
        follows = await handler.change(act)
    except BadSettings as e:
        there = node_of(await handler.service.reader.world(), node_id) is not None
        status, code = (409, "node_refused") if there else (404, "no_such_node")
        raise Problem(status, code, str(e), field="node" if gpu is None else "gpu") from None
    return NodeChange(node=node_id, text=follows, failed=[])


async def drain(handler: Handler, node_id: str, message: str) -> NodeChange:
    """Cordon a node, and end its sessions with a message to their owners.

    Ends not requested after `ANSWER_AFTER_S` still happen; the log has their failures.
    """
    node = await administered_node(handler, node_id)
    there = on_node(await handler.service.reader.world(), node_id)
    if not all(handler.viewer.may_administer(s.request.resource_group) for s in there):
        message = f"node {node_id!r} still has sessions of another resource group; cordon it, or ask an administrator"
        raise forbidden(f"{message} (scope {scopes.ADMIN})", field="node")
    if node.state is NodeState.READY:
        await change_node(handler, node_id, NodeAction.CORDON)
    elif node.state is not NodeState.CORDONED:
        message = f"node {node_id!r} is {node.state}; drain is for a node that answers"
        raise Problem(409, "node_refused", message, field="node")
    sessions = on_node(await handler.service.reader.world(), node_id)
    details = f"{len(sessions)} sessions" + (f": {message}" if message else "")
    await write_audit(handler, "node.drain", f"node {node_id}", group=node.resource_group, details=details)
    gate = asyncio.Semaphore(CONCURRENT_ENDS)
    failed: list[NotEnded] = []

    async def end(session: Session) -> None:
        async with gate:
            try:
                await end_session(handler, str(session.id), message=message or f"node {node_id} is drained")
            except (Problem, FGPUError) as e:
                # Any error: the other sessions are still ended, and all failures are reported.
                found = handler.problem_of(500, e)
                if found.code != "already_ended":
                    log.warning("Node %s is drained, but session %d: %s", node_id, session.id, found.message)
                    failed.append(NotEnded(session_id=session.id, message=found.message))

    tasks = [asyncio.create_task(end(session)) for session in sessions]
    _background_drains.update(tasks)
    for task in tasks:
        task.add_done_callback(_background_drains.discard)
    going_on = (await asyncio.wait(tasks, timeout=ANSWER_AFTER_S))[1] if tasks else ()
    ended = len(sessions) - len(failed) - len(going_on)
    text = f"takes no new sessions; {ended} of {len(sessions)} sessions are being ended"
    if going_on:
        text += f", and {len(going_on)} follow"
    return NodeChange(node=node_id, text=text, failed=sorted(failed, key=lambda one: one.session_id))


class NodesPage(AdminFormPage):
    for_groups = True

    async def show(self, trouble: Problem | None = None) -> None:
        self.render(
            "admin_nodes.html",
            found=await nodes(self),
            trouble=trouble,
            longest_reason=MOST_REASON,
            number_words=number_words,
        )

    async def submit(self) -> None:
        gpu = self.field("gpu") or None
        message = self.field("message")[:MOST_MESSAGE_TEXT]
        found = await change_node(self, self.field("node"), self.field("action"), message, gpu=gpu)
        if found.failed:
            said = "; ".join(f"session {one.session_id}: {one.message}" for one in found.failed)
            await self.show(Problem(409, "not_all_ended", f"not all of its sessions could be ended: {said}"))
            return
        self.back()


class ConfirmPage(AdminPage):
    """Asks before a node is drained or declared gone: both end sessions."""

    for_groups = True

    async def get(self, action: str) -> None:
        check_action(self, action)
        node = await administered_node(self, self.get_query_argument("node", ""))
        sessions = on_node(await self.administered_world(), node.id)
        more = {"longest": MOST_MESSAGE_TEXT, "session_name": session_name}
        self.render("admin_node.html", node=node, action=action, sessions=sessions, **more)


class NodesApi(AdminApi):
    for_groups = True

    async def get(self) -> None:
        self.answer(await nodes(self))


class OneNodeApi(AdminApi):
    for_groups = True

    async def post(self, node_id: str) -> None:
        given = self.body(("action", "message", "gpu"))
        action, message, gpu = given.get("action"), given.get("message") or "", given.get("gpu")
        if gpu is not None and not isinstance(gpu, str):
            raise bad_argument("gpu", "a text: the index or the UUID of one of its GPUs")
        if not isinstance(action, str) or not isinstance(message, str) or len(message) > MOST_MESSAGE_TEXT:
            raise bad_argument("action", f"a word; message: a text of at most {MOST_MESSAGE_TEXT} characters")
        found = await change_node(self, node_id, action, message, gpu=gpu)
        simulated = (await self.administered_world()).simulated()
        self.answer(found.model_copy(update={"simulated": simulated}))
