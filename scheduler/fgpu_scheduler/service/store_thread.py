"""The store in its one worker thread, and whether its database answers, as far as those who need it now can tell.

So a slow database never stops the event loop, and writes are in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from fgpu_scheduler.errors import StoreUnavailable
from fgpu_scheduler.store.store import Store

log = logging.getLogger("fgpu.scheduler")

P = ParamSpec("P")
T = TypeVar("T")

SLOW_AFTER_S = 2.5
"""When something has waited for the store for longer than this, the database is asked for a sign of life."""
NO_ANSWER_AFTER_S = 2.5
"""A database that takes longer than this for that sign is away, as far as those who wait are told."""
AGAIN_S = 1.0
"""So often a step is tried again while the database is away."""


class Outage:
    """True while somebody waits for the database in vain. Tells of both turns, once each."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._waiting: set[object] = set()
        self._changed = changed

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def lacks(self, who: object) -> None:
        """Note that ``who`` needs the database and gets no answer. Idempotent."""
        before = bool(self)
        self._waiting.add(who)
        if not before:
            log.warning("The scheduler's database does not answer; what needs it waits, and nothing is lost")
            self._changed()

    def has(self, who: object) -> None:
        """Note that ``who`` has had an answer, or waits for none any more. Idempotent."""
        before = bool(self)
        self._waiting.discard(who)
        if before and not self:
            log.info("The scheduler's database answers again")
            self._changed()


class StoreThread:
    """Runs functions of a store, one after the other; ``away`` only while its database gives no sign of life."""

    def __init__(self, store: Store, changed: Callable[[], None]) -> None:
        self._store = store
        self.away = Outage(changed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fgpu-store")
        # Its own thread and connection: nothing that is slow in the others is taken for an outage.
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="fgpu-alive")
        self._answer: asyncio.Future[int] | None = None
        self._probes: set[asyncio.Task[None]] = set()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the store in its thread. Once begun it is finished, cancelled or not."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        slow = loop.call_later(SLOW_AFTER_S, self._probe_soon, future)

        def answered(done: asyncio.Future[T]) -> None:
            slow.cancel()
            # Whoever asked may have left: an outage then is nothing that Python need complain of.
            _ = done.cancelled() or done.exception()

        future.add_done_callback(answered)
        return await asyncio.shield(future)

    async def patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """Try a step again, as long as the database is away."""
        who = object()
        try:
            while True:
                try:
                    return await step()
                except StoreUnavailable as e:
                    log.debug("Trying on: %s", e)
                    self.away.lacks(who)
                    await asyncio.sleep(AGAIN_S)
        finally:
            self.away.has(who)

    def failed(self, what: str, error: Exception) -> None:
        """Log why a round of one of the loops failed. Of an outage of the database the first time only."""
        if not isinstance(error, StoreUnavailable):
            log.error("%s failed; trying again", what, exc_info=error)
            return
        log.log(logging.DEBUG if self.away else logging.WARNING, "%s waits: %s", what, error)
        self.away.lacks(what)

    async def stop(self) -> None:
        """Finish what has begun, and begin no more."""
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        self._thread.shutdown(wait=True)
        self._prober.shutdown(wait=False)

    def _probe_soon(self, call: asyncio.Future[T]) -> None:
        """Find out, while a call goes on, whether the database is away: it may just as well be long, or behind others."""
        task = asyncio.create_task(self._probe_while_running(call))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe_while_running(self, call: asyncio.Future[T]) -> None:
        try:
            while not call.done():
                if self._answer is None or self._answer.done():
                    # Once at a time, for all who doubt.
                    loop = asyncio.get_running_loop()
                    self._answer = loop.run_in_executor(self._prober, self._store.version)
                    self._answer.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
                sign = self._answer
                await asyncio.wait(
                    (sign, call), timeout=NO_ANSWER_AFTER_S, return_when=asyncio.FIRST_COMPLETED
                )
                answers = sign.done() and sign.exception() is None
                if not call.done():
                    (self.away.has if answers else self.away.lacks)(call)
                    await asyncio.wait((call,), timeout=SLOW_AFTER_S)
        finally:
            self.away.has(call)
