"""Waits for work that a cancelled caller must not abandon, and for work that may never end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """Await something that is never cancelled; a cancellation of the caller takes effect afterwards."""
    task = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # A launch that exceeds its limit and is then ended by its owner is cancelled twice.
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


async def in_a_thread_of_its_own(
    function: Callable[..., T], *args: Any, cut: Callable[[], None] | None = None
) -> T:
    """Run a function that may take hours in a new thread: no other call waits for a free thread, nor does the Hub's
    end.

    A cancelled caller leaves the thread behind. ``cut`` is called then and must end what the thread waits for, or the
    thread may stay forever.
    """
    outcome: Future[T] = Future()
    # From here on a cancelled caller can neither cancel it nor see its result.
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(function(*args))
        except Exception as e:
            outcome.set_exception(e)

    threading.Thread(target=run, name="fgpu-long", daemon=True).start()
    try:
        return await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        if cut is not None:
            cut()
        raise
