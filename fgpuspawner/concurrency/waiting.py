"""Waiting for what a cancelled caller must not leave in mid-air, and for what may never end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tornado.httpclient import AsyncHTTPClient, HTTPClientError

T = TypeVar("T")

PROBE_EVERY_S = 0.03
PROBE_TIMEOUT_S = 5


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


async def it_answers(ip: str, port: int, path: str) -> None:
    """Return when a server answers HTTP there, other than with an error of its own (status 500 and above)."""
    client = AsyncHTTPClient(force_instance=True)
    url = f"http://{ip}:{port}{path}"
    try:
        while True:
            try:
                # A refused connection costs a tenth of a refused request.
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    _, writer = await asyncio.open_connection(ip, port)
                writer.close()
                answer = await client.fetch(
                    url, request_timeout=PROBE_TIMEOUT_S, follow_redirects=False, raise_error=False
                )
                if answer.code < 500:
                    return
            # TimeoutError is an OSError; tornado's own is an HTTPClientError, whatever `raise_error` says.
            except (OSError, HTTPClientError):
                pass
            await asyncio.sleep(PROBE_EVERY_S)
    finally:
        client.close()
