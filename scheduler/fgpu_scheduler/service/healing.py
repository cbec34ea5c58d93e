"""Reconciliation: heals differences between the recorded sessions and what the launcher observes.

A round (`Healer.round`) has these steps:

1. Note which launches and ends are in progress, and take a snapshot.
2. Observe the launcher, and take a second snapshot. `reconcile` judges what is missing by the first snapshot and what is
   a ghost by the second, because sessions move while the launcher answers.
3. Take silent nodes out of use, and nodes that answer again back into use.
4. Apply every `Healing` side by side. Stops and removals of ghosts go on in the background, because they may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from fgpu_scheduler.core.lifecycle import LAUNCHING, UP
from fgpu_scheduler.core.model import EndCause, Node, NodeState, SessionState, Snapshot
from fgpu_scheduler.core.reconcile import (
    Finish,
    Healing,
    Observed,
    ProcessGone,
    Remove,
    Stop,
    orphan_reason,
    reconcile,
)
from fgpu_scheduler.errors import BadSettings, InvalidTransition, StoreUnavailable
from fgpu_scheduler.ports import Launcher, Seen
from fgpu_scheduler.service.steps import Steps

log = logging.getLogger("fgpu.scheduler")

S = SessionState

REMOVERS = 4
"""How many ghosts are removed at a time: few, so that a thousand of them delay no launch."""


class Healer:
    """Runs the rounds of reconciliation."""

    def __init__(self, steps: Steps, launcher: Launcher) -> None:
        self._steps = steps
        self._launcher = launcher
        #: Stops, and removals of ghosts, by handle.
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._removing: dict[str, asyncio.Task[None]] = {}
        self._removers = asyncio.Semaphore(REMOVERS)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The background tasks of earlier rounds."""
        return [*self._removing.values(), *self._stopping.values()]

    async def round(self) -> None:
        """Compare the store with what the launcher observes, and heal the differences."""
        launching, ending = tuple(self._steps.being_launched), tuple(self._steps.being_ended)
        before = await self._steps.snapshot()
        seen = await self._launcher.observe()
        after = await self._steps.snapshot()
        await self.update_nodes(after, seen)
        healings = reconcile(
            before, after, seen.things, reachable=seen.nodes, launching=(*launching, *ending)
        )
        # Side by side: one that hangs delays only the next round.
        results = await asyncio.gather(
            *(self._heal(healing, ending) for healing in healings), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, InvalidTransition):
                raise result

    async def _heal(self, healing: Healing, ending: Sequence[int]) -> None:
        match healing:
            case Remove(thing, _):
                if thing.handle not in self._removing:
                    self._removing[thing.handle] = asyncio.create_task(self._remove_ghost(thing))
            case ProcessGone(session_id, attempt, cause, message):
                session = await self._steps.session(session_id)
                if session.attempt == attempt:
                    await self._steps.move(session, S.TERMINATING, expect=UP, cause=cause, message=message)
                    log.warning("Session %d lost its server: %s", session_id, message)
                    self._steps.reconcile_soon()
            case Stop(session_id, thing):
                if session_id not in ending and thing.handle not in self._stopping:
                    log.info("Stopping %s of session %d", thing.handle, session_id)
                    self._stopping[thing.handle] = asyncio.create_task(self._stop(thing))
            case Finish(session_id):
                await self._steps.gone(session_id)
            case _:
                assert_never(healing)

    async def _stop(self, thing: Observed) -> None:
        try:
            if await self._launcher.remove(thing):
                self._steps.reconcile_soon()
        except Exception as e:
            # The next round finds it again.
            self._steps.thread.failed("Stopping a session", e)
        finally:
            del self._stopping[thing.handle]

    async def update_nodes(self, snapshot: Snapshot, seen: Seen) -> None:
        """Take silent nodes out of use, and those that answer again back into use."""
        live = {s.id: s for s in snapshot.sessions}
        ghosts = [o for o in seen.things if o.alive and orphan_reason(o, live.get(o.session_id)) is not None]
        nodes_with_ghosts = {ghost.node_id for ghost in ghosts}
        changes = node_changes(
            snapshot, seen.nodes, tuple(self._steps.being_launched), nodes_with_ghosts, seen.late
        )
        for node_id in changes.lost:
            if await self._set_node_state(node_id, NodeState.LOST, only=NodeState.READY):
                words = "Node %s does not answer; its sessions keep their shares, and it takes no new ones"
                log.error(words, node_id)
        for node_id in changes.back:
            log.warning("Node %s answers again", node_id)
            await self._set_node_state(node_id, NodeState.READY, only=NodeState.LOST)
        for session_id in changes.requeued:
            with contextlib.suppress(InvalidTransition):
                await self._steps.move(
                    await self._steps.session(session_id), S.PENDING, expect=(S.SCHEDULED,)
                )
        for session_id in changes.ended:
            message = "the session's machine was lost, and the session with it"
            await self._steps.end(session_id, EndCause.NODE_LOST, message)
            await self._steps.gone(session_id)
        for node_id in changes.gone:
            # Last: if this process ends earlier, the next one does all of it again.
            log.warning("An administrator declared node %s gone; its sessions are ended", node_id)
            await self._set_node_state(node_id, NodeState.LOST, only=NodeState.GONE)
        if changes.lost or changes.back or changes.requeued or changes.gone:
            self._steps.nudge()
            self._steps.wake()

    async def _set_node_state(self, node_id: str, state: NodeState, *, only: NodeState) -> bool:
        """Set the node's state if it is still ``only``; return whether it was. An administrator may have changed it."""
        now_s = self._steps.clock.now_s()
        try:
            was = await self._steps.call(
                self._steps.store.set_node_state, node_id, state, now_s=now_s, only=only
            )
        except BadSettings:
            return False  # The node was deleted since the observation.
        return was is only

    async def _remove_ghost(self, ghost: Observed) -> None:
        try:
            async with self._removers:
                # Check again: the observation is old by now.
                session = await self._steps.call(self._steps.store.session, ghost.session_id)
                why = orphan_reason(ghost, session)
                if why is not None:
                    words = "Removing the ghost %s of session %d: %s"
                    log.warning(words, ghost.handle, ghost.session_id, why)
                    await self._launcher.remove(ghost)
        except Exception as e:
            # The next round finds it again.
            if not isinstance(e, StoreUnavailable):
                log.warning("The ghost %s could not be removed: %s", ghost.handle, e)
        finally:
            del self._removing[ghost.handle]


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
    placed = [(s, s.placement.node_id) for s in snapshot.sessions if s.placement is not None]
    launched_on = {node_id for s, node_id in placed if s.id in launching}
    idle = [(s, node_id) for s, node_id in placed if s.id not in launching]
    lost, back = [], []
    for node in snapshot.nodes:
        closed = node.closed and node.state is NodeState.CORDONED
        if node.id in silent and (node.state is NodeState.READY or closed):
            lost.append(node.id)
        if node.state is NodeState.LOST and node.id in reachable and node.id not in nodes_with_ghosts:
            back.append(node.id)
    may_run = (*LAUNCHING, *UP, S.TERMINATING)
    return NodeChanges(
        tuple(lost),
        tuple(back),
        requeued=tuple(s.id for s, node_id in idle if s.state is S.SCHEDULED and node_id in silent),
        # Not while a launch there is in progress: GONE has to end that session too.
        gone=tuple(sorted(gone - launched_on)),
        ended=tuple(s.id for s, node_id in idle if s.state in may_run and node_id in gone),
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
