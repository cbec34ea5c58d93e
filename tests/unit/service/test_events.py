"""An event stream ends when its token is revoked."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application
from worlds import Build

from fgpuspawner.service.api import events
from fgpuspawner.service.api.events import Events
from fgpuspawner.service.model import Viewer, World
from fgpuspawner.service.reader import Changes
from fgpuspawner.service.stream import Listener


class Revoked(Events):
    """A stream of a user with a token that has been revoked."""

    async def prepare(self) -> None:
        self.current_user = {"name": "alice"}
        self.viewer = Viewer("alice", groups=("default",))

    async def _still_allowed(self) -> bool:
        return False


class Reader:
    async def last_event_id(self) -> int:
        return 0

    async def world(self) -> World:
        return Build().world()


class Watcher:
    """Gives out one listener."""

    def __init__(self) -> None:
        self.listener = Listener("alice")

    async def listen(self, who: str) -> Listener:
        return self.listener

    def leave(self, listener: Listener) -> None:
        listener.end()


@pytest.mark.parametrize("busy", [False, True])
def test_stream_ends_with_its_token_during_constant_events(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEEPALIVE_S", 0.5)

    async def listen() -> None:
        watcher = Watcher()

        async def happen() -> None:
            for event_id in itertools.count(1):
                watcher.listener.tell(Changes(event_id, ()))
                await asyncio.sleep(0.02)

        service = SimpleNamespace(reader=Reader(), watcher=watcher)
        server = HTTPServer(Application([("/events", Revoked, {"service": service})]))
        socket, port = bind_unused_port()
        server.add_sockets([socket])
        happening = asyncio.create_task(happen()) if busy else None
        try:
            answer = await AsyncHTTPClient(force_instance=True).fetch(
                f"http://127.0.0.1:{port}/events", request_timeout=30.0
            )
            # It ended, and had told what there was.
            assert b"event: queue" in answer.body
        finally:
            if happening is not None:
                happening.cancel()
            server.stop()
            await server.close_all_connections()

    asyncio.run(listen())
