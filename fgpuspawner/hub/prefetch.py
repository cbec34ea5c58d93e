"""The images of those who wait are fetched beforehand, so that they start as soon as it is their turn.

The rule is simple: for the first few of each resource group's queue, on every node of the group that could hold the
session. What was begun is kept while the request waits, wherever in the queue it gets. A request that is ended
is no waiter any more; nor is one that has its place, but on the node of that place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fgpu_scheduler import (
    LAUNCHING,
    Node,
    NodeState,
    Queue,
    Session,
    SessionState,
    could_ever_fit,
    takes_model,
)
from fgpuspawner.concurrency.background import Background, Failures
from fgpuspawner.engines.base import Engine, EngineSilent, PullFailed
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.pull_state import Phase, PullState

log = logging.getLogger("fgpu.images")

LOOK_EVERY_S = 15.0
QUIET_S = 0.5
"""Between two looks, however much changes."""
AGAIN_AFTER_S = 300.0
"""What could not be pre-pulled is not tried again for so long, nor what was there looked for."""

PLACED = (SessionState.SCHEDULED, *LAUNCHING)

Wish = tuple[int, str, str]
"""A session, a node, and a reference."""


class Prefetch:
    """Fetches. To be run in the Hub's event loop."""

    def __init__(
        self,
        engine: Engine,
        queue: Queue,
        *,
        first: int,
        catalogue: Callable[[], Catalogue],
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._first = first
        self._catalogue = catalogue
        self.failed: dict[int, PullState] = {}
        """What the owners of waiting sessions are told whose image could not be fetched, by session."""
        self._waiting: dict[Wish, asyncio.Task[None]] = {}
        self._not_again: dict[tuple[str, str], float] = {}
        self._outcomes: dict[tuple[str, str], PullFailed | None] = {}
        """What became of the last try; None: the node has it."""
        self._wishes: dict[int, list[tuple[str, str]]] = {}
        """Where the image of each session is wished for that waits."""
        self._seen: frozenset[int] = frozenset()

    def begin(self, background: Background) -> None:
        """Look after the queue from now on, if anything is to be fetched beforehand."""
        if self._first and self._engine.capabilities.fetches_images:
            background.run(self._always(), failed="Images are not pre-pulled any more")

    async def _always(self) -> None:
        failures = Failures(log, "Whose image is to be fetched is not known now", level=logging.DEBUG)
        async for _ in self._queue.changes(at_least_every_s=LOOK_EVERY_S):
            again = True
            while again:
                try:
                    again = await self.look()
                    failures.worked()
                except Exception as e:
                    # It is looked at again soon.
                    failures.failed(e)
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
            self.failed.pop(session_id, None)
        self._wishes |= _by_session(wished)
        now_s = asyncio.get_running_loop().time()
        for wish, image in wished.items():
            if wish not in self._waiting and self._not_again.get(wish[1:], 0) <= now_s:
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
        places = {session_id: n for n, session_id in enumerate((await self._queue.outlook()).forecasts)}
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
            for node in nodes_for(session, nodes):
                found[session.id, node.id, image.reference] = image
        return found

    def _kept(self, live: Mapping[int, Session]) -> frozenset[Wish]:
        """Return which of the sessions that wait still need what they wait for."""
        return frozenset(wish for wish in self._waiting if self._needs(live.get(wish[0]), wish[1]))

    def _needs(self, session: Session | None, node_id: str) -> bool:
        if session is None:
            return False
        if session.state is SessionState.PENDING:
            return True
        placed = session.placement
        # Its launch becomes a waiter of its own in a moment.
        return session.state in PLACED and placed is not None and placed.node_id == node_id

    async def _fetched(self, wish: Wish, image: Image) -> None:
        session_id, node_id, _ = wish
        loop = asyncio.get_running_loop()
        try:
            if not await self._engine.has_image(image, node_id):
                self.failed.pop(session_id, None)
                await self._engine.fetch_image(image, node_id, session_id, ahead=True)
        except PullFailed as e:
            log.warning("Session %d waits, and its image could not be pre-pulled: %s", session_id, e)
            self._outcomes[wish[1:]] = e
        except EngineSilent as e:
            log.debug("Node %s: %s", node_id, e)
            self._waiting.pop(wish, None)
            return
        else:
            self._outcomes[wish[1:]] = None
        for other, wishes in self._wishes.items():
            if wish[1:] in wishes:
                self._tell(other, wishes)
        self._not_again[wish[1:]] = loop.time() + AGAIN_AFTER_S
        self._waiting.pop(wish, None)

    def _tell(self, session_id: int, wishes: Iterable[tuple[str, str]]) -> None:
        """Tell the owner that the image could not be fetched, unless a node that could hold the session has it."""
        known = [self._outcomes[wish] for wish in wishes if wish in self._outcomes]
        failed = [why for why in known if why is not None]
        self.failed.pop(session_id, None)
        if failed and len(failed) == len(known):
            self.failed[session_id] = PullState(Phase.FAILED, trouble=str(failed[0]))


def _by_session(wished: Iterable[Wish]) -> dict[int, list[tuple[str, str]]]:
    found: dict[int, list[tuple[str, str]]] = {}
    for session_id, node_id, reference in wished:
        found.setdefault(session_id, []).append((node_id, reference))
    return found


def nodes_for(session: Session, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that take sessions and could hold this one if nothing else ran there."""
    asked = session.request
    return [
        node
        for node in nodes
        if node.state is NodeState.READY
        and (not asked.gpu_models or any(takes_model(asked, d.model) for d in node.devices))
        and could_ever_fit(asked, [node])
    ]
