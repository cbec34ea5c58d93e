"""Background tasks: who owns them, steps that are repeated, and failures that are logged once.

A loop of a long-lived process must outlive whatever one of its steps raises, and nobody awaits it: what it does not log
is never heard of. So every such loop is one line with a `Background`, which logs and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fgpu_scheduler import FGPUError

T = TypeVar("T")
FORESEEN = (FGPUError,)
"""Errors whose message is all that there is to say; any other is logged with its trace."""


class Failures:
    """Logs why something fails that is tried again and again: each reason once, until it works or fails otherwise.

    ``failed`` begins the line: "The catalogue could not be read again".
    """

    def __init__(
        self,
        log: logging.Logger,
        failed: str,
        *,
        foreseen: tuple[type[BaseException], ...] = FORESEEN,
        level: int = logging.WARNING,
    ) -> None:
        self._log = log
        self._failed = failed
        self._foreseen = foreseen
        self._level = level
        self._said = ""

    def failed(self, error: BaseException) -> None:
        """Log it, unless this was the last that was logged."""
        said = repr(error)
        if said == self._said:
            self._log.debug("%s, as before: %s", self._failed, error)
        elif isinstance(error, self._foreseen):
            self._log.log(self._level, "%s: %s", self._failed, error)
        else:
            self._log.error("%s: %r", self._failed, error, exc_info=error)
        self._said = said

    def worked(self) -> None:
        """What fails from now on is new."""
        self._said = ""


async def until_it_works(step: Callable[[], Awaitable[T]], *, every_s: float, failures: Failures) -> T:
    """Return what a step returns, beginning it again after each failure."""
    while True:
        try:
            return await step()
        except Exception as e:
            failures.failed(e)
        await asyncio.sleep(every_s)


class Background:
    """The background tasks of one owner, who closes it; to be used in one running event loop."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        failed: str,
        foreseen: tuple[type[BaseException], ...] = FORESEEN,
    ) -> asyncio.Task[T]:
        """Run this beside all others, and return its task. What it raises is logged, also if nobody awaits it."""
        task = asyncio.create_task(coroutine, name=failed)
        failures = Failures(self._log, failed, foreseen=foreseen)

        def done(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                failures.failed(error)

        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    def every(
        self,
        seconds: float,
        step: Callable[[], Awaitable[object]],
        *,
        failed: str,
        first_after_s: float = 0.0,
        again_after_s: float | None = None,
        wake: asyncio.Event | None = None,
        foreseen: tuple[type[BaseException], ...] = FORESEEN,
        level: int = logging.WARNING,
    ) -> asyncio.Task[None]:
        """Run a step again and again, with so many seconds between the end of one and the beginning of the next.

        Args:
            seconds: the pause.
            step: what is repeated. Whatever it raises is logged, and the next one follows.
            failed: how the line of the log begins then.
            first_after_s: the pause before the first one.
            again_after_s: the pause after one that failed, if that is another.
            wake: ends a pause early. It is cleared as a step begins, so what sets it during one has another follow.
            foreseen: errors that are logged in one line, as ``level``; others are, with their trace, as errors.
        """
        failures = Failures(self._log, failed, foreseen=foreseen, level=level)

        async def repeat() -> None:
            own = asyncio.current_task()
            assert own is not None
            pause_s = first_after_s
            while True:
                await _pause(pause_s, wake)
                if wake is not None:
                    wake.clear()
                pause_s = seconds
                try:
                    await step()
                except (Exception, asyncio.CancelledError) as e:
                    # Something that the step awaited was cancelled, and not this task: that ends nothing here.
                    if isinstance(e, asyncio.CancelledError) and own.cancelling():
                        raise
                    failures.failed(e)
                    pause_s = seconds if again_after_s is None else again_after_s
                else:
                    failures.worked()

        return self.run(repeat(), failed=failed)

    async def close(self) -> None:
        """Cancel all of them, and wait until each has ended."""
        # Again, because one that ends may begin others.
        while tasks := [task for task in self._tasks if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pause(seconds: float, wake: asyncio.Event | None) -> None:
    if wake is None:
        await asyncio.sleep(seconds)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
