"""Image pulls that the Hub starts before a launch needs them, and what it publishes about images for the service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

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
from fgpuspawner.images.availability import (
    AVAILABLE,
    NOTHING_KNOWN,
    WANTED,
    Availabilities,
    Availability,
    Where,
)
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.pull_state import STALE_AFTER_S, Phase, PullState, write_pulls

log = logging.getLogger("fgpu.images")

LOOK_EVERY_S = 15.0
QUIET_S = 0.5
"""Shortest time between two rounds of pre-pulls."""
AGAIN_AFTER_S = 300.0
"""How long a failed or finished pre-pull is not repeated."""
WRITE_EVERY_S = 1.0
AVAILABILITY_EVERY_S = 3.0
ASK_EVERY_S = 15.0
"""Interval between two questions to the engine while no image is being pulled and no image or node is new."""
NO_SESSION = 0

PLACED = (SessionState.SCHEDULED, *LAUNCHING)

Pull = tuple[int, str, str]
"""A session, a node and an image reference."""


class Prefetch:
    """Pre-pulls the images of waiting requests, so that they can start at once. Runs in the Hub's event loop.

    It serves the first ``first`` requests of each resource group, on every node of the group that could hold the
    session. A pull that has begun continues while its request waits, even if the request loses its position. It is
    cancelled when the request ends, and when the request is placed on another node.
    """

    def __init__(
        self, engine: Engine, queue: Queue, *, first: int, catalogue: Callable[[], Catalogue]
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._first = first
        self._catalogue = catalogue
        #: What the owners of waiting sessions are told about failed pulls, by session.
        self.failed: dict[int, PullState] = {}
        self._running: dict[Pull, asyncio.Task[None]] = {}
        #: By node and reference: until when no pull is repeated there.
        self._not_again: dict[tuple[str, str], float] = {}
        #: Outcome of the last pull, by node and reference; None: the node has the image.
        self._outcomes: dict[tuple[str, str], PullFailed | None] = {}
        #: The pulls (node and reference) that each waiting session needs.
        self._needed: dict[int, list[tuple[str, str]]] = {}
        #: Sessions that waited in the last round.
        self._seen: frozenset[int] = frozenset()

    def begin(self, background: Background) -> None:
        if self._first and self._engine.capabilities.fetches_images:
            background.run(self._always(), failed="Pre-pulling of images has ended")

    async def _always(self) -> None:
        failures = Failures(log, "The images to pre-pull are not known now", level=logging.DEBUG)
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
        needed = self._pulls_for(await self._in_order(waiting), before, snapshot.nodes)
        live = {s.id: s for s in snapshot.sessions}
        for pull in [pull for pull in self._running if not _needs(live.get(pull[0]), pull[1])]:
            self._running.pop(pull).cancel()
        for session_id in self._needed.keys() - self._seen:
            del self._needed[session_id]
            self.failed.pop(session_id, None)
        for session_id in {session_id for session_id, _, _ in needed}:
            self._needed[session_id] = [pull[1:] for pull in needed if pull[0] == session_id]
        now_s = asyncio.get_running_loop().time()
        for pull, image in needed.items():
            if pull not in self._running and self._not_again.get(pull[1:], 0) <= now_s:
                self._running[pull] = asyncio.create_task(self._pull(pull, image))
        return bool(self._seen - before)

    async def _in_order(self, waiting: Sequence[Session]) -> Sequence[Session]:
        # A long queue is slow to forecast, so it is done only if the order matters.
        if max(Counter(s.request.resource_group for s in waiting).values(), default=0) <= self._first:
            return waiting
        places = {session_id: n for n, session_id in enumerate((await self._queue.outlook()).forecasts)}
        return sorted(waiting, key=lambda s: places.get(s.id, len(places)))

    def _pulls_for(
        self, waiting: Iterable[Session], before: Collection[int], nodes: Sequence[Node]
    ) -> Mapping[Pull, Image]:
        """Return the pulls for waiting sessions, which are given in the order of the queues."""
        served: Counter[str] = Counter()
        found: dict[Pull, Image] = {}
        for session in waiting:
            group = session.request.resource_group
            image = self._catalogue().get(session.request.image)
            # A held session may never be resumed.
            if session.held or image is None or not image.reference or served[group] >= self._first:
                continue
            served[group] += 1
            if session.id in before:
                found |= {
                    (session.id, node.id, image.reference): image for node in _nodes_for(session, nodes)
                }
        return found

    async def _pull(self, pull: Pull, image: Image) -> None:
        session_id, node_id, _ = pull
        outcome: PullFailed | None = None
        try:
            if not await self._engine.has_image(image, node_id):
                self.failed.pop(session_id, None)
                await self._engine.fetch_image(image, node_id, session_id, ahead=True)
        except PullFailed as e:
            log.warning("Session %d waits, and its image could not be pre-pulled: %s", session_id, e)
            outcome = e
        except EngineSilent as e:
            log.debug("Node %s: %s", node_id, e)
            self._running.pop(pull, None)
            return
        self._outcomes[pull[1:]] = outcome
        for other, pulls in self._needed.items():
            if pull[1:] in pulls:
                self._report(other, pulls)
        self._not_again[pull[1:]] = asyncio.get_running_loop().time() + AGAIN_AFTER_S
        self._running.pop(pull, None)

    def _report(self, session_id: int, pulls: Iterable[tuple[str, str]]) -> None:
        """Tell the owner that the pull failed, unless a node that could hold the session has the image."""
        known = [self._outcomes[pull] for pull in pulls if pull in self._outcomes]
        self.failed.pop(session_id, None)
        if known and (failed := [why for why in known if why is not None]) == known:
            self.failed[session_id] = PullState(Phase.FAILED, trouble=str(failed[0]))


def _needs(session: Session | None, node_id: str) -> bool:
    """Return whether a session still needs a pull that was started for it on this node."""
    if session is None:
        return False
    placed = session.placement
    # The launch of a placed session will wait for the pull itself in a moment.
    return session.state is SessionState.PENDING or (
        session.state in PLACED and placed is not None and placed.node_id == node_id
    )


def _nodes_for(session: Session, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that take sessions and could hold this one if they were empty."""
    asked = session.request
    return [
        node
        for node in nodes
        if node.state is NodeState.READY
        and (not asked.gpu_models or any(accepts_model(asked, d.model) for d in node.devices))
        and could_ever_fit(asked, [node])
    ]


class ImageWatch:
    """Polls which node has which image, publishes that, and starts the pulls that administrators ask for."""

    def __init__(
        self,
        engine: Engine,
        catalogue: Callable[[], Catalogue],
        nodes: Callable[[], Sequence[Node]],
        background: Background,
        *,
        data: Path,
    ) -> None:
        self._engine, self._catalogue, self._nodes = engine, catalogue, nodes
        self._background, self._data = background, data
        #: The administrators' pulls that have been started. Those of an earlier Hub are not repeated.
        self._started = WANTED.read(data)
        self._seen: object = None
        #: The last answer.
        self.available = NOTHING_KNOWN

    def begin(self) -> None:
        self._background.every(
            AVAILABILITY_EVERY_S, self.look, failed="Which images can start is not known now"
        )

    async def look(self) -> None:
        """Start the pulls that were asked for since the last round, then ask where each image is, if due."""
        images, nodes = self._catalogue().images, [node.id for node in self._nodes()]
        wanted = await asyncio.to_thread(WANTED.read, self._data)
        for image in images:
            if wanted.get(image.slug) != self._started.get(image.slug):
                for node_id in nodes:
                    pulling = self._engine.fetch_image(image, node_id, NO_SESSION, ahead=True)
                    self._background.run(pulling, failed=f"Image {image.slug} does not come to {node_id}")
        self._started = wanted
        now_s, now = time.time(), (images, nodes, wanted)
        is_young = abs(now_s - self.available.at_s) < ASK_EVERY_S
        if is_young and now == self._seen and not self.available.moving:
            return
        answers = await asyncio.gather(*(self._at(image, node_id) for image in images for node_id in nodes))
        found = iter(answers)
        known = {i.slug: {n: one for n in nodes if (one := next(found)) != Availability()} for i in images}
        self.available, self._seen = Availabilities(now_s, known), now
        await asyncio.to_thread(AVAILABLE.write, self._data, self.available)

    async def _at(self, image: Image, node_id: str) -> Availability:
        try:
            return await self._engine.availability(image, node_id)
        except EngineSilent as e:
            return Availability(Where.UNKNOWN, str(e))


class PullProgressFile:
    """Publishes the progress of the pulls that sessions wait for: ``states()``, by session, every second."""

    def __init__(self, data: Path, states: Callable[[], Mapping[int, PullState]]) -> None:
        self._data = data
        self._states = states
        # Pulls of the last run ended with it.
        write_pulls(data, {}, now_s=0)
        self._written: Mapping[int, PullState] = {}
        self._written_at_s = 0.0

    def begin(self, background: Background) -> None:
        background.every(
            WRITE_EVERY_S, self._write, failed="The progress of pulls cannot be written", foreseen=(OSError,)
        )

    async def _write(self) -> None:
        states = self._states()
        old = time.monotonic() - self._written_at_s >= STALE_AFTER_S / 2
        if states != self._written or (states and old):
            await asyncio.to_thread(write_pulls, self._data, states, now_s=time.time())
            self._written, self._written_at_s = states, time.monotonic()
