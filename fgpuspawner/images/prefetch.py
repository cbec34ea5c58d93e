"""The images of those who wait are fetched beforehand, so that they start as soon as it is their turn.

The rule is simple: for the first few of each resource group's queue, on the engine of every node of the group that could
hold the session. What was begun is kept while the request waits, wherever in the queue it gets. A request that is ended
is no waiter any more; nor is one that has its place, but on the engine of that place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from fgpu_scheduler import LAUNCHING, FGPUError, Forecast, Node, NodeState, Session, SessionState, Snapshot
from fgpu_scheduler.core.placement import could_ever_fit
from fgpuspawner.containers import EngineSilent
from fgpuspawner.engines import Engine, Engines
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.pulls import PullFailed, Pulls

log = logging.getLogger("fgpu.images")

LOOK_EVERY_S = 15.0
QUIET_S = 0.5
"""Between two looks, however much changes."""
AGAIN_AFTER_S = 300.0
"""What could not be fetched beforehand is not tried again for so long, nor what was there looked for."""

PLACED = (SessionState.SCHEDULED, *LAUNCHING)

Wish = tuple[int, Engine, str]
"""A session, an engine, and a reference."""


class Queue(Protocol):
    """The scheduler, as far as it is asked here."""

    async def snapshot(self) -> Snapshot:
        """Return the live sessions, and the nodes."""
        ...

    async def forecasts(self) -> dict[int, Forecast]:
        """Return the forecast of every waiting session, by session, in the order of the queues."""
        ...

    def changes(self, *, at_least_every_s: float) -> AsyncIterator[None]:
        """Yield at once, and then whenever anything changed, or that much time has passed."""
        ...


class Prefetch:
    """Fetches. To be run in the Hub's event loop."""

    def __init__(
        self,
        pulls: Pulls,
        engines: Engines,
        queue: Queue,
        *,
        first: int,
        catalogue: Callable[[], Catalogue],
    ) -> None:
        self._pulls = pulls
        self._engines = engines
        self._queue = queue
        self._first = first
        self._catalogue = catalogue
        self._waiting: dict[Wish, asyncio.Task[None]] = {}
        self._not_again: dict[tuple[Engine, str], float] = {}
        self._outcomes: dict[tuple[Engine, str], PullFailed | None] = {}
        """What became of the last try; None: the engine has it."""
        self._wishes: dict[int, list[tuple[Engine, str]]] = {}
        """Where the image of each session is wished for that waits."""
        self._seen: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Look after the queue, for as long as this is not cancelled."""
        async for _ in self._queue.changes(at_least_every_s=LOOK_EVERY_S):
            again = True
            while again:
                try:
                    again = await self.look()
                except FGPUError as e:
                    # It is looked at again soon.
                    log.debug("Whose image is to be fetched is not known now: %s", e)
                    again = False
                except Exception:
                    # Nobody waits for this task: without it nothing is fetched until the Hub is started again.
                    log.exception("Whose image is to be fetched is not known now")
                    again = False
                await asyncio.sleep(QUIET_S)

    async def look(self) -> bool:
        """Begin what is to be fetched now, and leave what nobody needs any more.

        Return whether somebody waits who did not at the look before: they may have their place in a moment, and what they
        need elsewhere would have been begun for nothing.
        """
        snapshot = await self._queue.snapshot()
        waiting = [s for s in snapshot.sessions if s.state is SessionState.PENDING]
        before, self._seen = self._seen, frozenset(s.id for s in waiting)
        wished = self._wished(await self._in_order(waiting), before, snapshot.nodes)
        kept = self._kept({s.id: s for s in snapshot.sessions})
        for wish in [wish for wish in self._waiting if wish not in kept]:
            self._waiting.pop(wish).cancel()
        for session_id in self._wishes.keys() - self._seen:
            del self._wishes[session_id]
            self._pulls.failed(session_id, None)
        self._wishes |= _by_session(wished)
        now_s = asyncio.get_running_loop().time()
        for wish, image in wished.items():
            _, engine, reference = wish
            if wish not in self._waiting and self._not_again.get((engine, reference), 0) <= now_s:
                self._waiting[wish] = asyncio.create_task(self._fetched(wish, image))
        return bool(self._seen - before)

    async def _in_order(self, waiting: Sequence[Session]) -> Sequence[Session]:
        # A long queue takes long to forecast: only where it matters who is first.
        by_group: dict[str, int] = {}
        for session in waiting:
            group = session.request.resource_group
            by_group[group] = by_group.get(group, 0) + 1
        if max(by_group.values(), default=0) <= self._first:
            return waiting
        places = {session_id: n for n, session_id in enumerate(await self._queue.forecasts())}
        return sorted(waiting, key=lambda s: places.get(s.id, len(places)))

    def _wished(
        self, waiting: Iterable[Session], before: Collection[int], nodes: Sequence[Node]
    ) -> Mapping[Wish, Image]:
        """Return what is to be fetched for those who wait, given in the order of the queues."""
        left: dict[str, int] = {}
        found: dict[Wish, Image] = {}
        for session in waiting:
            group = session.request.resource_group
            image = self._catalogue().get(session.request.image)
            # One that nobody waits to launch may never be resumed.
            if session.held or image is None or not image.reference:
                continue
            if left.setdefault(group, self._first) <= 0:
                continue
            left[group] -= 1
            if session.id not in before:
                continue
            for engine in self._engines_of(nodes_for(session, nodes)):
                found[session.id, engine, image.reference] = image
        return found

    def _engines_of(self, nodes: Iterable[Node]) -> tuple[Engine, ...]:
        found: dict[Engine, None] = {}
        for node in nodes:
            try:
                engine = self._engines.of_node(node.id)
            except EngineSilent:
                continue
            if engine.answers:
                found[engine] = None
        return tuple(found)

    def _kept(self, live: Mapping[int, Session]) -> frozenset[Wish]:
        """Return which of the sessions that wait still need what they wait for."""
        return frozenset(wish for wish in self._waiting if self._needs(live.get(wish[0]), wish[1]))

    def _needs(self, session: Session | None, engine: Engine) -> bool:
        if session is None:
            return False
        if session.state is SessionState.PENDING:
            return True
        placed = session.placement
        # Its launch becomes a waiter of its own in a moment.
        return session.state in PLACED and placed is not None and placed.node_id in engine.address.node_ids

    async def _fetched(self, wish: Wish, image: Image) -> None:
        session_id, engine, reference = wish
        loop = asyncio.get_running_loop()
        try:
            if await self._pulls.here(engine, image) is None:
                await self._pulls.ensure(engine, image, session_id, ahead=True)
        except PullFailed as e:
            log.warning("Session %d waits, and its image could not be fetched beforehand: %s", session_id, e)
            self._outcomes[engine, reference] = e
        except EngineSilent as e:
            log.debug("%s: %s", engine.address, e)
        else:
            self._outcomes[engine, reference] = None
        for other, wishes in self._wishes.items():
            if (engine, reference) in wishes:
                self._tell(other, wishes)
        self._not_again[engine, reference] = loop.time() + AGAIN_AFTER_S
        self._waiting.pop(wish, None)

    def _tell(self, session_id: int, wishes: Iterable[tuple[Engine, str]]) -> None:
        """Tell the owner that the image could not be fetched, unless an engine that could hold the session has it."""
        known = [self._outcomes[wish] for wish in wishes if wish in self._outcomes]
        failed = [why for why in known if why is not None]
        self._pulls.failed(session_id, failed[0] if failed and len(failed) == len(known) else None)


def _by_session(wished: Iterable[Wish]) -> dict[int, list[tuple[Engine, str]]]:
    found: dict[int, list[tuple[Engine, str]]] = {}
    for session_id, engine, reference in wished:
        found.setdefault(session_id, []).append((engine, reference))
    return found


def nodes_for(session: Session, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that take sessions and could hold this one if nothing else ran there."""
    asked = session.request
    return [
        node
        for node in nodes
        if node.state is NodeState.READY
        and (asked.gpu_model is None or any(d.model == asked.gpu_model for d in node.devices))
        and could_ever_fit(asked, [node])
    ]
