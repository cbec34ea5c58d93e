"""Waiting for what a cancelled caller must not leave in mid-air, and for what may never end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """Await something that is never cancelled; cancellations of the caller take effect when it is done."""
    task = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # A launch that is over its limit, and is then ended by its owner, is cancelled twice.
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


async def in_a_thread_of_its_own(
    function: Callable[..., T], *args: Any, cut: Callable[[], None] | None = None
) -> T:
    """Run what can take hours, such that no other call waits for a free thread, nor the Hub's end for it.

    A caller that is cancelled leaves it behind. ``cut`` is called then: it ends what the thread waits for, or the
    thread may be there for ever.
    """
    outcome: Future[T] = Future()
    # From here on a cancelled caller cannot cancel it, and does not hear of it either.
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
