"""Runs the store in one worker thread and detects outages of its database.

A slow database thus never blocks the event loop, and writes keep the order in which they were requested.

An outage is detected only while calls wait:

1. A call that takes longer than `SLOW_AFTER_S` may be long, or wait behind others, or hang.
2. So a second thread with its own connection reads the store's version, one probe at a time for all slow calls.
3. If the probe takes longer than `NO_ANSWER_AFTER_S` or fails, the database counts as away until it answers a probe, or
   until the slow calls are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from fgpu_scheduler.errors import StoreUnavailable
from fgpu_scheduler.store.store import Store

log = logging.getLogger("fgpu.scheduler")

P = ParamSpec("P")
T = TypeVar("T")

SLOW_AFTER_S = 2.5
"""How long a call may take before the database is probed."""
NO_ANSWER_AFTER_S = 2.5
"""How long a probe may take before the database counts as away."""
AGAIN_S = 1.0
"""How often a step is retried while the database is away."""


class Outage:
    """True while a caller waits for a database that does not answer. Logs and reports each change once."""

    def __init__(self, changed: Callable[[], None]) -> None:
        #: The callers that wait: names of loops, futures of calls, tokens of repeated steps.
        self._waiting: set[object] = set()
        self._changed = changed

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def waits(self, caller: object) -> None:
        """Note that this caller gets no answer. Idempotent."""
        before = bool(self)
        self._waiting.add(caller)
        if not before:
            log.warning("The scheduler's database does not answer; calls wait for it, and nothing is lost")
            self._changed()

    def answered(self, caller: object) -> None:
        """Note that this caller got an answer or stopped waiting. Idempotent."""
        before = bool(self)
        self._waiting.discard(caller)
        if before and not self:
            log.info("The scheduler's database answers again")
            self._changed()


class StoreThread:
    """Runs functions of a store, one at a time; ``away`` is true while its database does not answer."""

    def __init__(self, store: Store, changed: Callable[[], None]) -> None:
        self._store = store
        self.away = Outage(changed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fgpu-store")
        # Its own thread and connection, so that a slow call is not taken for an outage.
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="fgpu-alive")
        self._answer: asyncio.Future[int] | None = None
        self._probes: set[asyncio.Task[None]] = set()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the store in its thread. Cancelling the caller does not stop a call that has begun."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        slow = loop.call_later(SLOW_AFTER_S, self._probe_soon, future)

        def answered(done: asyncio.Future[T]) -> None:
            slow.cancel()
            # The caller may be cancelled: read the exception, so that asyncio does not report it as never retrieved.
            _ = done.cancelled() or done.exception()

        future.add_done_callback(answered)
        return await asyncio.shield(future)

    async def patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await a step, and repeat it while the database is away."""
        caller = object()
        try:
            while True:
                try:
                    return await step()
                except StoreUnavailable as e:
                    log.debug("Trying on: %s", e)
                    self.away.waits(caller)
                    await asyncio.sleep(AGAIN_S)
        finally:
            self.away.answered(caller)

    @contextlib.contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """Log an error of a loop's round instead of raising it: the loop must survive an outage of the database."""
        try:
            yield
        except Exception as e:
            self.failed(what, e)
        else:
            self.away.answered(what)

    def failed(self, what: str, error: Exception) -> None:
        """Log why a round of a loop failed; an outage of the database is a warning only the first time."""
        if not isinstance(error, StoreUnavailable):
            log.error("%s failed; trying again", what, exc_info=error)
            return
        log.log(logging.DEBUG if self.away else logging.WARNING, "%s waits: %s", what, error)
        self.away.waits(what)

    async def stop(self) -> None:
        """Finish the calls that have begun, and accept no others."""
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        self._thread.shutdown(wait=True)
        self._prober.shutdown(wait=False)

    def _probe_soon(self, call: asyncio.Future[T]) -> None:
        task = asyncio.create_task(self._probe_while_running(call))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe_while_running(self, call: asyncio.Future[T]) -> None:
        try:
            while not call.done():
                if self._answer is None or self._answer.done():
                    # One probe at a time, for all slow calls.
                    loop = asyncio.get_running_loop()
                    self._answer = loop.run_in_executor(self._prober, self._store.version)
                    self._answer.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
                sign = self._answer
                await asyncio.wait(
                    (sign, call), timeout=NO_ANSWER_AFTER_S, return_when=asyncio.FIRST_COMPLETED
                )
                answers = sign.done() and sign.exception() is None
                if not call.done():
                    (self.away.answered if answers else self.away.waits)(call)
                    await asyncio.wait((call,), timeout=SLOW_AFTER_S)
        finally:
            self.away.answered(call)
