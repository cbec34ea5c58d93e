"""One launch of a placed session: a commit before its first effect, and one after its last."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable

from fgpu_scheduler import EndCause, FGPUError, Requeued, Session, duration
from fgpuspawner.engines.base import (
    Ended,
    Endpoint,
    EngineSilent,
    Launched,
    LaunchFailed,
    LaunchSpec,
    NotBound,
    ServerToken,
)
from fgpuspawner.hub.inherited import LOG_SAYS_WHY, UNFORESEEN
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.hub.session_probes import prove
from fgpuspawner.hub.session_server import first_answer
from fgpuspawner.images.model import Image
from fgpuspawner.isolation.base import Prepared

log = logging.getLogger("fgpu")

LOOK_EVERY_S = 0.5
"""How often to ask whether a server has ended or is within reach."""
ENDING_KNOWN_S = 2.0
"""For this long after a server's end its engine may still say that it runs."""

Describe = Callable[[Session, Image, Prepared], Awaitable[LaunchSpec]]


class Launch:
    """The launch of one session. ``describe`` returns its launch spec; ``path`` and ``token`` are those of its server.

    1. The state PREPARING is committed, before anything has an effect outside of the database.
    2. Remains of an earlier attempt are removed, the session's files are written, a missing image is pulled.
    3. The engine starts the server. The launch waits for its first answer and for the proof of its limits.
    4. The state RUNNING is committed, with the server's address.
    """

    def __init__(
        self,
        runtime: Runtime,
        session: Session,
        describe: Describe,
        *,
        path: str,
        token: ServerToken | None,
    ) -> None:
        self._runtime = runtime
        self._engine = runtime.engine
        self._describe = describe
        self._path = path
        self._token = token
        #: The session as last committed.
        self.session = session
        #: The image that is being pulled, if any.
        self.fetching: Image | None = None
        #: For the metrics: "cold", "warm" (a container of the pool) or "fetched" (after a pull of the image).
        self._start_kind = "cold"

    async def run(self) -> Session:
        """Return the session, RUNNING, when its server answers and its limits are proved.

        After a cancellation it has no further effects once it returns.

        Raises:
            LaunchFailed: it failed; the message is for the owner.
            Requeued: the session has lost its shares, or the engine did not give it them; it waits again.
        """
        with self._runtime.queue.launching(self.session.id):
            return await self._launch_and_commit()

    async def _launch_and_commit(self) -> Session:
        queue, limit_s = self._runtime.queue, self._runtime.settings.launch_timeout_s
        began_s = time.monotonic()
        try:
            self.session = await queue.prepare(self.session.id)
            async with asyncio.timeout(limit_s):
                launched = await self._start_server()
        except TimeoutError:
            within = f"within the launch limit of {duration(limit_s)}"
            if self.fetching is not None:
                words = f"image {self.fetching.reference} was not fetched {within}"
                raise LaunchFailed(words, EndCause.PULL_FAILED) from None
            raise LaunchFailed(f"the server did not answer {within}") from None
        except NotBound as e:
            # First the files: a pending session has none of a GPU's slots.
            await self._runtime.clear(self.session)
            await queue.give_back(self.session.id, self.session.attempt, str(e))
            raise Requeued(f"session {self.session.id} is back in the queue: {e}") from e
        except EngineSilent as e:
            raise LaunchFailed(f"{e}; ask for a new session", EndCause.NODE_LOST) from e
        except (FGPUError, asyncio.CancelledError):
            raise
        except Exception as e:
            log.exception("Launching session %d failed", self.session.id)
            # The error's text may come from an administrator's function and hold secrets.
            raise LaunchFailed(f"{UNFORESEEN} ({type(e).__name__}); {LOG_SAYS_WHY}") from e
        running = await queue.running(self.session.id, self.session.attempt, launched.to_json())
        self._runtime.metrics.started(running, way=self._start_kind, took_s=time.monotonic() - began_s)
        return running

    async def _start_server(self) -> Launched:
        session = self.session
        if session.attempt > 1 and not await self._engine.stop(session, now=True):
            raise LaunchFailed("what an earlier launch of this session left could not be removed")
        assert session.placement is not None
        if len(self._runtime.isolation.devices_of(session)) < len(session.placement.shares):
            # A GPU was removed between placement and launch.
            raise NotBound("the GPU is gone")
        prepared = await self._runtime.prepare(session)
        image = self._runtime.catalogue.of(session.request)
        if image is None:
            raise LaunchFailed(f"there is no image {session.request.image!r} any more", EndCause.PULL_FAILED)
        await self._fetch(image)
        spec = await self._describe(session, image, prepared)
        with self._runtime.metrics.engine.labels("start").time():
            endpoint = await self._engine.start(spec)
        if endpoint.warm:
            self._start_kind = "warm"
        await self._wait_until_ready(spec, endpoint)
        return Launched(endpoint.ip, endpoint.port, prepared.backend, self._token)

    async def _fetch(self, image: Image) -> None:
        """Pull the image to the session's node if it is missing there."""
        session, placement = self.session, self.session.placement
        assert placement is not None
        if await self._engine.has_image(image, placement.node_id):
            return
        self.fetching, self._start_kind = image, "fetched"
        self.session = await self._runtime.queue.pulling(session.id, session.attempt)
        try:
            # A cancelled session cancels its pull, which touches no GPU.
            with self._runtime.metrics.engine.labels("fetch").time():
                await self._engine.fetch_image(image, placement.node_id, session.id)
        except FGPUError as e:
            self.fetching = None
            raise LaunchFailed(str(e), EndCause.PULL_FAILED) from e
        self.fetching = None

    # -- until the server answers, with its limits in force ---------------------------------------------------

    async def _wait_until_ready(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        """Wait until the server answers and its limits are proved, concurrently if possible; raise the first failure."""
        runtime = self._runtime
        proof = functools.partial(prove, self._engine, runtime.isolation, runtime.settings, spec, endpoint)
        if not self._engine.capabilities.own_root:
            # A local process is limited by its environment, which the server's start can still change: verify afterwards.
            await self._answers(spec.session, endpoint)
            await proof()
            return
        answering = asyncio.ensure_future(self._answers(spec.session, endpoint))
        verifying = asyncio.ensure_future(proof())
        try:
            await asyncio.wait((answering, verifying), return_when=asyncio.FIRST_EXCEPTION)
            if not answering.done():
                # The probe fails where the server has ended, and the server's end says more: wait until it is known.
                await asyncio.wait((answering,), timeout=ENDING_KNOWN_S)
            if not answering.done() and await self._engine.ended(spec.session) is not None:
                await answering
            for task in (answering, verifying):
                if task.done():
                    task.result()
        finally:
            answering.cancel()
            verifying.cancel()
            await asyncio.gather(answering, verifying, return_exceptions=True)

    async def _answers(self, session: Session, endpoint: Endpoint) -> None:
        """Wait until the server answers HTTP; raise `LaunchFailed` as soon as the engine reports its end."""
        # Concurrently: a connection to a dead container hangs for seconds.
        answering = asyncio.ensure_future(first_answer(endpoint.ip, endpoint.port, self._path))
        ending = asyncio.ensure_future(self._ended(session))
        try:
            await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                ended = ending.result()
                cause = EndCause.OOM if ended.cause is EndCause.OOM else EndCause.LAUNCH_FAILED
                raise LaunchFailed(ended.message, cause)
            answering.result()
        finally:
            answering.cancel()
            ending.cancel()
            await asyncio.gather(answering, ending, return_exceptions=True)

    async def _ended(self, session: Session) -> Ended:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            ended = await self._engine.ended(session)
            if ended is not None:
                return ended.without_values(session)
