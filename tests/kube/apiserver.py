"""A server of a test's own that answers in a cluster's place, and how it is asked and followed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from kubernetes_asyncio.client import Configuration

from fgpuspawner.engines.kubernetes.api import Api
from fgpuspawner.engines.kubernetes.mirror import Mirror

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[Api]:
    """A server that answers in a cluster's place, and how it is asked."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    api = Api(Configuration(host=f"http://127.0.0.1:{port}"))
    try:
        yield api
    finally:
        await api.close()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def followed(mirror: Mirror[Any]) -> AsyncIterator[None]:
    task = asyncio.create_task(mirror.follow())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
