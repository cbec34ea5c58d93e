"""The event stream's one watcher: it polls the event log while there are listeners, and sends each the changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from fgpu_scheduler import StoreUnavailable
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.reader import Changes, Reader

log = logging.getLogger(__name__)

EVERY_S = 0.3
MAX_LISTENERS = 10
"""Streams of one user at a time: a few tabs and their Lab servers. A browser itself opens six."""
MAX_BEHIND = 64
"""Batches that a listener may be behind; then its stream ends, and it resumes from its last event."""


class Listener:
    """One open stream. `next` returns the next changes, or None when the stream ends."""

    def __init__(self, who: str) -> None:
        self.who = who
        self._batches: asyncio.Queue[Changes | None] = asyncio.Queue(MAX_BEHIND)
        self._ended = False

    async def next(self, timeout_s: float) -> Changes | None:
        """Return the next batch, or None at the end; raises TimeoutError when nothing happened."""
        if self._ended and self._batches.empty():
            return None
        async with asyncio.timeout(timeout_s):
            return await self._batches.get()

    def tell(self, changes: Changes) -> None:
        """Queue a batch; end a listener that is too far behind."""
        try:
            self._batches.put_nowait(changes)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        self._ended = True
        with contextlib.suppress(asyncio.QueueFull):
            self._batches.put_nowait(None)


class Watcher:
    """Polls the store's event log, only while there are listeners."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._listeners: list[Listener] = []
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def listen(self, who: str) -> Listener:
        """Open a stream for ``who``, of everything after the newest event.

        Raises:
            Problem: 429, too many streams of theirs are open.
            StoreUnavailable: the event log cannot be read.
        """
        if sum(1 for listener in self._listeners if listener.who == who) >= MAX_LISTENERS:
            message = f"at most {MAX_LISTENERS} event streams per user; close one of the others"
            raise Problem(429, "too_many_streams", message)
        listener = Listener(who)
        self._listeners.append(listener)
        try:
            async with self._starting:
                if self._task is None or self._task.done():
                    watch = self._watch(await self._reader.last_event_id())
                    self._task = asyncio.create_task(watch)
        except BaseException:
            self.leave(listener)
            raise
        return listener

    def leave(self, listener: Listener) -> None:
        listener.end()
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def close(self) -> None:
        self._each(Listener.end)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _each(self, tell: Callable[[Listener], None]) -> None:
        for listener in tuple(self._listeners):
            tell(listener)

    async def _watch(self, seen: int) -> None:
        try:
            while self._listeners:
                if await self._reader.last_event_id() != seen:
                    changes = await self._reader.changes(seen)
                    if changes is None:
                        # Too many changes to send one by one: listeners read everything again.
                        changes = Changes(await self._reader.last_event_id(), ())
                    seen = changes.last_event_id
                    self._each(lambda listener, batch=changes: listener.tell(batch))  # type: ignore[misc]
                await asyncio.sleep(EVERY_S)
        except StoreUnavailable as e:
            # Listeners reconnect, and get the error there.
            log.warning("Event streams end: %s", e)
        except Exception:
            log.exception("Event streams end")
        self._each(Listener.end)
