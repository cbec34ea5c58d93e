"""Brings images to the engines that need them: one pull for all waiters of an image on a daemon.

1. A waiter is a session that is being launched, or one in the queue, with its image pre-pulled.
2. Each pull first asks the registry, then other engines that have the image, and retries what may pass.
3. Launched sessions come before queued ones, and keep one slot free if there are two.
4. When the last waiter leaves, the pull is stopped on the daemon too: its separate connection is cut
   (`fetch.py`), so no thread is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from docker.errors import ImageNotFound, NotFound

from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import EngineSilent, PullFailed
from fgpuspawner.engines.docker.client import FAILED
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.images.fetch import AT_WORK_S, EngineRequest, copy, fetch
from fgpuspawner.engines.docker.images.pull_output import Kind, PullMeter, Reason
from fgpuspawner.images.availability import Availability, Where
from fgpuspawner.images.labels import unlike
from fgpuspawner.images.model import Image
from fgpuspawner.images.pull_state import Phase, PullState
from fgpuspawner.settings.images import recipe_of

log = logging.getLogger("fgpu.images")

AGAIN_AFTER_S = (1.0, 4.0, 15.0)
"""Pauses before further tries. The session holds its share during them, so there are few."""
FINAL = (Kind.DISK_FULL, Kind.DIGEST)
"""Failures that a copy from another engine would not solve."""
AT_A_TIME = 3
"""Concurrent pulls of one engine and concurrent questions to registries: as many layers as an engine fetches at once.
"""
ASK_EVERY_S, ASK_REFUSED_EVERY_S, ASK_WITHIN_S = 30.0, 300.0, 20.0
"""Seconds between two questions to a registry, between two after a refusal, and for an answer."""
ASK_PATIENCE_S = 5.0
"""A later answer is used at the next call."""
NO_ANSWER = (Kind.ENGINE, Kind.REGISTRY, Kind.OTHER)
"""After these it is unknown whether the registry has the image."""
NOT_ASKED = Reason(Kind.REGISTRY, "it has not answered yet")
BROKE_OFF = "the registry broke off"
"""Shown while the engine itself retries."""

Found = Mapping[str, Any]
"""An engine's description of an image."""


@dataclass(eq=False)
class _Pull:
    """The pull of one image to one daemon."""

    daemon: Daemon
    image: Image
    meter: PullMeter = field(default_factory=PullMeter)
    phase: Phase = Phase.FETCHING
    attempt: int = 1
    trouble: str | None = None
    waiters: dict[object, tuple[int, bool]] = field(default_factory=dict)
    """Session of each waiter, and whether it still waits in the queue."""
    in_line: bool = False
    task: asyncio.Task[Found] | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether no launched session needs it."""
        return all(ahead for _, ahead in self.waiters.values())

    def state(self) -> PullState:
        progress = self.meter.progress(time.monotonic())
        phase, trouble = self.phase, self.trouble
        if phase is Phase.FETCHING and progress.broke_off:
            phase, trouble = Phase.AGAIN, BROKE_OFF
        elif phase is Phase.FETCHING and progress.unpacks:
            phase = Phase.UNPACKING
        return PullState(phase, progress, self.attempt, trouble)


class Pulls:
    """All pulls of the Hub, for its event loop. Questions raise EngineSilent if a daemon does not answer."""

    def __init__(self, fleet: Fleet, *, at_a_time: int = AT_A_TIME) -> None:
        self._fleet = fleet
        #: Concurrent pulls of one daemon.
        self._at_a_time = at_a_time
        #: Called when a pull has moved on in a way that others wait for.
        self.changed: Callable[[], None] = lambda: None
        #: By daemon, reference and digest.
        self._pulls: dict[tuple[Daemon, str, str], _Pull] = {}
        #: The pulls that have their turn.
        self._going: set[_Pull] = set()
        #: Set when another pull may have its turn; then replaced.
        self._moved = asyncio.Event()
        #: Time and result of the last question to a registry; None: it has the image.
        self._asked: dict[tuple[Daemon, str], tuple[float, Reason | None]] = {}
        #: Questions to registries that are not answered yet.
        self._questions: dict[tuple[Daemon, str], asyncio.Task[None]] = {}
        self._asking: dict[Daemon, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_A_TIME))

    # -- for waiters ------------------------------------------------------------------------------------

    async def found(self, daemon: Daemon, image: Image) -> Found | None:
        """Return a daemon's description of an image; None if it lacks it or has another one of that name."""
        found = await self._inspect(daemon, image)
        return found if found is not None and _matches(image, found) else None

    async def availability(self, daemon: Daemon, image: Image) -> Availability:
        """Return where an image is for a daemon."""
        pull = self._pulls.get((daemon, image.reference, image.digest))
        if pull is not None:
            return Availability(Where.COMING, pull.state().words())
        other = await self._inspect(daemon, image)
        if other is not None and _matches(image, other):
            labels = (other.get("Config") or {}).get("Labels") or {}
            return Availability(Where.HERE, "" if image.owner else unlike(image, labels))
        if await self._other_source(daemon, image) is not None:
            return Availability(Where.FETCHABLE)
        silent = not all(one.answers for one in self._fleet.daemons)
        if image.owner:
            return Availability(Where.UNKNOWN if silent else Where.CANNOT, "no machine that answers has it")
        reason = await self._registry_reason(daemon, image.reference)
        if reason is None:
            return Availability(Where.FETCHABLE)
        where = Where.UNKNOWN if silent or reason.kind in NO_ANSWER else Where.CANNOT
        return Availability(where, _why(image, other, reason))

    async def _registry_reason(self, daemon: Daemon, reference: str) -> Reason | None:
        """Return why a registry does not give an image, by its last answer; None: it has it.

        A registry that has the image is not asked again until a pull fails, because each answer counts against its rate
        limit.
        """
        key = daemon, reference
        asked_s, reason = self._asked.get(key, (-math.inf, NOT_ASKED))
        refused = reason is not None and reason.kind in (Kind.NOT_FOUND, Kind.DENIED)
        due = time.monotonic() - asked_s >= (ASK_REFUSED_EVERY_S if refused else ASK_EVERY_S)
        if reason is not None and due:
            if key not in self._questions:
                self._questions[key] = asyncio.create_task(self._ask(daemon, reference))
            await asyncio.wait([self._questions[key]], timeout=ASK_PATIENCE_S)
        return self._asked.get(key, (0, NOT_ASKED))[1]

    async def _ask(self, daemon: Daemon, reference: str) -> None:
        try:
            async with self._asking[daemon]:
                request = EngineRequest(daemon.client, silent_s=ASK_WITHIN_S)
                reason = await in_a_thread_of_its_own(
                    fetch, request, daemon.client, reference, None, cut=request.cut
                )
                self._asked[daemon, reference] = time.monotonic(), reason
        finally:
            del self._questions[daemon, reference]

    async def ensure(self, daemon: Daemon, image: Image, waiter: int, *, ahead: bool = False) -> Found:
        """Wait until the engine has an image, and return its description. ``waiter`` is the session that needs it.

        With ``ahead`` the session still waits in the queue. Cancelling leaves the pull; the last to leave stops it.

        Raises:
            PullFailed: it could not be fetched.
        """
        key = (daemon, image.reference, image.digest)
        pull = self._pulls.get(key)
        if pull is None:
            pull = self._pulls[key] = _Pull(daemon, image)
            pull.task = asyncio.create_task(self._run_pull(pull))
            pull.task.add_done_callback(_retrieve_exception)
        assert pull.task is not None
        place = object()
        pull.waiters[place] = waiter, ahead
        self._move()
        try:
            return await asyncio.shield(pull.task)
        finally:
            del pull.waiters[place]
            if not pull.waiters:
                if self._pulls.get(key) is pull:
                    del self._pulls[key]
                pull.task.cancel()
            self._move()

    def states(self) -> dict[int, PullState]:
        """Return the progress of pulls by session; of several the most advanced."""
        states = [(pull.state(), pull) for pull in self._pulls.values()]
        states.sort(key=lambda one: _further(one[0]))
        return {session_id: state for state, pull in states for session_id, _ in pull.waiters.values()}

    # -- one pull -------------------------------------------------------------------------------------

    async def _run_pull(self, pull: _Pull) -> Found:
        try:
            other = await self._inspect(pull.daemon, pull.image)
            if other is not None and _matches(pull.image, other):
                return other
            reason = await self._bring(pull)
            self._asked[pull.daemon, pull.image.reference] = time.monotonic(), reason
            if reason is None:
                other = await self._inspect(pull.daemon, pull.image)
                if other is not None and _matches(pull.image, other):
                    return other
                if other is None:
                    words = "it was brought, and the engine does not know it by this name"
                    reason = Reason(Kind.NOT_FOUND, words)
        except EngineSilent as e:
            raise PullFailed(_unfetched(pull.image, "the Docker engine does not answer")) from e
        raise PullFailed(_why(pull.image, other, reason))

    async def _bring(self, pull: _Pull) -> Reason | None:
        """Bring the image in any possible way, with retries; return why none worked."""
        for pause_s in AGAIN_AFTER_S:
            reason = await self._try_once(pull)
            if reason is None or not reason.may_pass:
                return reason
            pull.phase, pull.trouble = Phase.AGAIN, reason.words()
            self._move()
            await asyncio.sleep(pause_s)
            pull.attempt += 1
        return await self._try_once(pull)

    async def _try_once(self, pull: _Pull) -> Reason | None:
        """Try every way once. If both fail, the registry's reason is returned."""
        if pull.image.owner:
            return await self._copied_from_its_own(pull)
        reason = await self._pulled(pull)
        if reason is None or reason.kind in FINAL:
            return reason
        log.warning("%s: image %s: %s", pull.daemon.address, pull.image.reference, reason.words())
        source = await self._other_source(pull.daemon, pull.image)
        if source is None:
            return reason
        copied = await self._copied(pull, source)
        if copied is None or copied.kind in FINAL:
            return copied
        log.warning("%s: copy of image %s: %s", pull.daemon.address, pull.image.reference, copied.words())
        return reason

    async def _pulled(self, pull: _Pull) -> Reason | None:
        def tell(told: Mapping[str, Any]) -> None:
            loop.call_soon_threadsafe(pull.meter.note, told, time.monotonic())

        loop = asyncio.get_running_loop()
        client = pull.daemon.client
        async with self._turn(pull):
            pull.phase = Phase.FETCHING
            self._move()
            log.info("%s fetches image %s", pull.daemon.address, pull.image.reference)
            request = EngineRequest(client)
            return await in_a_thread_of_its_own(
                fetch, request, client, pull.image.reference, tell, cut=request.cut
            )

    async def _copied_from_its_own(self, pull: _Pull) -> Reason | None:
        node_id = pull.image.node_id
        try:
            source = self._fleet.of_node(node_id)
        except EngineSilent as e:
            return Reason(Kind.NOT_FOUND, str(e))
        if source is pull.daemon:
            return Reason(Kind.NOT_FOUND, f"{source.address}, where it was made, no longer has it")
        if not source.answers:
            return Reason(Kind.ENGINE, f"{source.address}, which has it, does not answer now")
        return await self._copied(pull, source)

    async def _other_source(self, own: Daemon, image: Image) -> Daemon | None:
        """Return another engine from which a copy of the image would match."""
        if "@" in image.reference:
            return None
        for daemon in self._fleet.daemons:
            if daemon is not own and daemon.answers:
                with contextlib.suppress(EngineSilent):
                    found = await self.found(daemon, image)
                    # A registry's digest is lost in a copy; the engine's own id is not.
                    if found is not None and image.digest in ("", found.get("Id")):
                        return daemon
        return None

    async def _copied(self, pull: _Pull, source: Daemon) -> Reason | None:
        try:
            found = await self._inspect(source, pull.image)
        except EngineSilent as e:
            return Reason(Kind.ENGINE, f"{source.address}: {e}")
        if found is None:
            return Reason(Kind.NOT_FOUND, f"{source.address} no longer has it")
        total = int(found.get("Size") or 0)
        loop = asyncio.get_running_loop()

        def count(done: int) -> None:
            loop.call_soon_threadsafe(pull.meter.count, done, total, time.monotonic())

        async with self._turn(pull):
            pull.phase = Phase.COPYING
            self._move()
            log.info("%s gets image %s from %s", pull.daemon.address, pull.image.reference, source.address)
            # An engine sends nothing until it has gathered the whole image, and nothing while it loads one.
            requests = (
                EngineRequest(source.client, silent_s=AT_WORK_S),
                EngineRequest(pull.daemon.client, silent_s=AT_WORK_S),
            )

            def cut() -> None:
                for request in requests:
                    request.cut()

            return await in_a_thread_of_its_own(copy, *requests, pull.image.reference, count, cut=cut)

    async def _inspect(self, daemon: Daemon, image: Image) -> Found | None:
        try:
            return dict(await daemon.containers.call(daemon.client.inspect_image, image.reference))
        except (ImageNotFound, NotFound):
            return None
        except FAILED as e:
            raise EngineSilent(str(e)) from e

    # -- taking turns ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _turn(self, pull: _Pull) -> AsyncIterator[None]:
        pull.in_line = True
        try:
            while not self._is_next(pull):
                pull.phase = Phase.WAITING
                await self._moved.wait()
            pull.in_line = False
            self._going.add(pull)
            yield
        finally:
            pull.in_line = False
            self._going.discard(pull)
            self._move()

    def _is_next(self, pull: _Pull) -> bool:
        """Return whether it is a pull's turn: launches come first, and keep one slot free if there are two."""
        going = sum(other.daemon is pull.daemon for other in self._going)
        line = [one for one in self._pulls.values() if one.in_line and one.daemon is pull.daemon]
        launched = [other for other in line if not other.is_ahead]
        if launched:
            return launched[0] is pull and going < self._at_a_time
        return line[:1] == [pull] and going < max(1, self._at_a_time - 1)

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        self.changed()


def _further(state: PullState) -> tuple[bool, float, int]:
    own = state.progress
    return state.phase is not Phase.FAILED, own.bytes_done / (own.bytes_total or 1 << 60), own.bytes_done


def digests(found: Found) -> tuple[str, ...]:
    """Return the digests of an image: its id, and those of registries."""
    repo = (str(name).rpartition("@")[2] for name in found.get("RepoDigests") or ())
    return (*dict.fromkeys(repo), str(found.get("Id", "")))


def wanted_digest(image: Image) -> str:
    return image.digest or image.reference.partition("@")[2]


def _matches(image: Image, found: Found) -> bool:
    wanted = wanted_digest(image)
    return not wanted or wanted in digests(found)


def _unfetched(image: Image, why: str) -> str:
    return f"image {image.reference} is not on the engine and could not be fetched: {why}"


def _why(image: Image, other: Found | None, reason: Reason | None) -> str:
    """Return why a session cannot have its image. ``other`` is what the engine has by its name, if anything."""
    if other is None:
        assert reason is not None
        recipe = recipe_of(image.reference)
        build = f"; build it there: fgpu images build {recipe}" if recipe else ""
        return _unfetched(image, reason.words()) + build
    there = " and ".join(digests(other))
    said = f"image {image.reference} is not the one that is wanted: the engine has {there}, "
    said += f"the catalogue wants {wanted_digest(image)}"
    return said if reason is None else f"{said}; fetching it failed: {reason.words()}"


def _retrieve_exception(task: asyncio.Task[Found]) -> None:
    # Mark an exception as retrieved: all waiters may have left.
    if not task.cancelled():
        task.exception()
