"""Handlers: callers, log-ins, and turns of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application

from fgpuspawner.concurrency.turns import Turns
from fgpuspawner.service import handler
from fgpuspawner.service.handler import CONCURRENT_REQUESTS, MAX_ADDRESS_LENGTH, Handler, LogIns, server_of
from fgpuspawner.service.model import Viewer


@pytest.mark.parametrize(
    ("scopes", "server"),
    [
        (["access:servers!server=alice/", "read:servers!server=alice/"], ""),
        (["access:servers!server=alice/gpu-1"], "gpu-1"),
        (["access:servers!server=alice/with%20space"], "with space"),
        (["access:servers!user=alice"], None),
        (["access:servers!user=alice", "access:servers!server=bob/x"], None),
        (["access:servers!server=bob/x"], None),
        (["access:servers"], None),
        ([], None),
    ],
)
def test_server_of_a_token_is_the_one_it_opens(scopes: list[str], server: str | None) -> None:
    assert server_of("alice", scopes) == server


def test_abandoned_log_ins_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page request without a cookie begins a log-in, also from unknown clients."""
    monkeypatch.setattr(handler, "MAX_LOG_INS", 100)
    auth = LogIns(api_token="-", oauth_client_id="service-fgpu")
    ids = [auth.generate_state(f"/services/fgpu/?{number}") for number in range(1000)]
    assert len(auth._oauth_states) == 100
    assert [auth.get_next_url(one) for one in ids[-2:]] == ["/services/fgpu/?998", "/services/fgpu/?999"]
    long = auth.generate_state("/services/fgpu/?" + "x" * MAX_ADDRESS_LENGTH)
    assert auth.get_next_url(long) == auth.base_url


WORKED_ON: list[str] = []


class Waits(Handler):
    """Identifies callers without a Hub."""

    go_on: asyncio.Event

    async def prepare(self) -> None:
        self.viewer = Viewer(self.get_query_argument("user"))
        self.current_user = {"name": self.viewer.user}
        await self.wait_for_turn()

    async def get(self) -> None:
        WORKED_ON.append(str(self.viewer.user))
        if self.viewer.user == "fails":
            raise ValueError("as it happens")
        if self.viewer.user != "alice":
            await self.go_on.wait()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    WORKED_ON.clear()
    Waits.go_on = asyncio.Event()
    service = SimpleNamespace(turns=Turns(at_a_time=CONCURRENT_REQUESTS, most=20))
    server = HTTPServer(Application([("/", Waits, {"service": service})], log_function=lambda handler: None))
    (socket,) = bind_sockets(0, "127.0.0.1")
    server.add_sockets([socket])
    yield socket.getsockname()[1]
    Waits.go_on.set()
    server.stop()
    await server.close_all_connections()
    assert service.turns._lines == {}, "every turn is given back"


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(port: int, user: str) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /?user={user} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return reader, writer


async def status(connection: Connection) -> int:
    head = await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), 30)
    connection[1].close()
    return int(head.split()[1])


async def test_one_users_requests_do_not_delay_others_and_are_limited(port: int) -> None:
    many = [await ask(port, "mallory") for _ in range(20)]
    assert await status(await ask(port, "alice")) == 200
    assert WORKED_ON.count("mallory") == CONCURRENT_REQUESTS
    assert await status(await ask(port, "mallory")) == 429
    Waits.go_on.set()
    assert {await status(one) for one in many} == {200}
    assert WORKED_ON.count("mallory") == 20


async def test_failed_request_releases_its_turn(port: int) -> None:
    assert [await status(await ask(port, "fails")) for _ in range(CONCURRENT_REQUESTS + 1)] == [500] * (
        CONCURRENT_REQUESTS + 1
    )


async def test_abandoned_requests_are_not_run(port: int) -> None:
    many = [await ask(port, "mallory") for _ in range(19)]
    assert await status(await ask(port, "alice")) == 200
    for _, writer in many[CONCURRENT_REQUESTS:]:
        writer.transport.abort()
    # The server has read that they are gone when it has read this.
    assert await status(await ask(port, "alice")) == 200
    Waits.go_on.set()
    assert {await status(one) for one in many[:CONCURRENT_REQUESTS]} == {200}
    assert await status(await ask(port, "mallory")) == 200
    assert WORKED_ON.count("mallory") == CONCURRENT_REQUESTS + 1
