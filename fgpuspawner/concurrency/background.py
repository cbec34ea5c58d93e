"""Background tasks: ownership, periodic steps, and failures that are logged once.

A loop in a long-lived process must survive every exception of its steps. Nothing awaits it, so whatever it does not log
is lost. So every such loop is one call of `Background`, which logs failures and continues.
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
"""Errors with a sufficient message; others are logged with their traceback."""


class Failures:
    """Logs why a repeated step fails: each reason once, until it works or fails for another reason.

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
        """Log the error unless it equals the last logged one."""
        said = repr(error)
        if said == self._said:
            self._log.debug("%s, as before: %s", self._failed, error)
        elif isinstance(error, self._foreseen):
            self._log.log(self._level, "%s: %s", self._failed, error)
        else:
            self._log.error("%s: %r", self._failed, error, exc_info=error)
        self._said = said

    def worked(self) -> None:
        """Log the next failure even if it equals the last one."""
        self._said = ""


async def until_it_works(step: Callable[[], Awaitable[T]], *, every_s: float, failures: Failures) -> T:
    while True:
        try:
            return await step()
        except Exception as e:
            failures.failed(e)
        await asyncio.sleep(every_s)


class Background:
    """The background tasks of one owner, who closes it. For one running event loop."""

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
        """Run a coroutine in a task and return the task; its exception is logged."""
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
        """Repeat a step, with a pause between the end of one and the beginning of the next.

        Args:
            seconds: the pause.
            step: the step. Whatever it raises is logged, and the next one follows.
            failed: how the log line begins then.
            first_after_s: the pause before the first step.
            again_after_s: the pause after a failed step, if different.
            wake: ends a pause early. It is cleared when a step begins, so an event during a step causes another step.
            foreseen: errors that are logged in one line, as ``level``; others as errors with their traceback.
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
                    # A cancellation of something that the step awaited, not of this task, ends nothing here.
                    if isinstance(e, asyncio.CancelledError) and own.cancelling():
                        raise
                    failures.failed(e)
                    pause_s = seconds if again_after_s is None else again_after_s
                else:
                    failures.worked()

        return self.run(repeat(), failed=failed)

    async def close(self) -> None:
        # In a loop, as a task that ends may start others.
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
