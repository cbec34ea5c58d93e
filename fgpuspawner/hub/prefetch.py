"""Pre-pulls the images of waiting requests, so that they can start at once.

For the first ``prefetch`` requests of each resource group, on every node of the group that could hold the session. A
pull that has begun continues while its request waits, wherever it moves in the queue. It is cancelled when the request
ends, and when it is placed on another node.
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
    accepts_model,
    could_ever_fit,
)
from fgpuspawner.concurrency.background import Background, Failures
from fgpuspawner.engines.base import Engine, EngineSilent, PullFailed
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.pull_state import Phase, PullState

log = logging.getLogger("fgpu.images")

LOOK_EVERY_S = 15.0
QUIET_S = 0.5
"""Shortest time between two rounds."""
AGAIN_AFTER_S = 300.0
"""How long a failed or finished pull is not looked at again."""

PLACED = (SessionState.SCHEDULED, *LAUNCHING)

Wish = tuple[int, str, str]
"""A session, a node and an image reference."""


class Prefetch:
    """Starts and cancels the pulls. Runs in the Hub's event loop."""

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
        #: What the owners of waiting sessions are told about failed pulls, by session.
        self.failed: dict[int, PullState] = {}
        self._waiting: dict[Wish, asyncio.Task[None]] = {}
        self._not_again: dict[tuple[str, str], float] = {}
        #: Outcome of the last try; None: the node has the image.
        self._outcomes: dict[tuple[str, str], PullFailed | None] = {}
        #: The pulls that each waiting session needs.
        self._wishes: dict[int, list[tuple[str, str]]] = {}
        self._seen: frozenset[int] = frozenset()

    def begin(self, background: Background) -> None:
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
                    # The next round comes soon.
                    failures.failed(e)
                    again = False
                await asyncio.sleep(QUIET_S)

    async def look(self) -> bool:
        """Start the pulls that are needed now, and cancel those that are not.

        Returns whether a session waits that did not in the last round. A new request may be placed in a moment, so its
        pulls start only in the next round.
        """
        snapshot = await self._queue.snapshot()
        waiting = [s for s in snapshot.sessions if s.state is SessionState.PENDING]
        before, self._seen = self._seen, frozenset(s.id for s in waiting)
        wished = self._wished(await self._in_order(waiting), before, snapshot.nodes)
        live = {s.id: s for s in snapshot.sessions}
        for wish in [wish for wish in self._waiting if not self._needs(live.get(wish[0]), wish[1])]:
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
        # A long queue is slow to forecast, so it is done only if the order matters.
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
        """Return the pulls for waiting sessions, which are given in the order of the queues."""
        left: dict[str, int] = {}
        found: dict[Wish, Image] = {}
        for session in waiting:
            group = session.request.resource_group
            image = self._catalogue().get(session.request.image)
            # A held session may never be resumed.
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

    def _needs(self, session: Session | None, node_id: str) -> bool:
        if session is None:
            return False
        if session.state is SessionState.PENDING:
            return True
        placed = session.placement
        # The launch will wait for the pull itself in a moment.
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
        """Tell the owner that the pull failed, unless a node that could hold the session has the image."""
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
    """Return the nodes that take sessions and could hold this one if they were empty."""
    asked = session.request
    return [
        node
        for node in nodes
        if node.state is NodeState.READY
        and (not asked.gpu_models or any(accepts_model(asked, d.model) for d in node.devices))
        and could_ever_fit(asked, [node])
    ]
