"""One value for many callers: read once, and kept for a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Callable, Generic, TypeVar

T = TypeVar("T")


class SharedRead(Generic[T]):
    """The result of `read`, at most `max_age_s` old, with one read at a time.

    A caller that leaves (a closed tab) does not cancel the read that others wait for.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        *,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._max_age_s = max_age_s
        self._clock = clock
        self._task: asyncio.Task[T] | None = None
        self._done_at = 0.0

    async def get(self) -> T:
        """Return the kept value, or wait for the read under way; its error is raised."""
        task = self._task
        if task is None or (task.done() and self._clock() - self._done_at >= self._max_age_s):
            task = self._task = asyncio.ensure_future(self._stamped())
        return await asyncio.shield(task)

    async def fresh(self) -> T:
        """Return a value read after this call, and keep it; its error is raised."""
        before = self._task
        if before is not None and not before.done():
            # A read that began earlier may have an older value.
            await asyncio.wait([before])
        task = self._task
        if task is before or task is None:
            task = self._task = asyncio.ensure_future(self._stamped())
        return await asyncio.shield(task)

    def forget(self) -> None:
        """Make the next `get` read again, because something here changed the answer."""
        self._task = None

    async def _stamped(self) -> T:
        try:
            return await self._read()
        finally:
            self._done_at = self._clock()
