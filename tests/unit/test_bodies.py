"""Bodies of requests: what is too large is dropped as it comes, and answered in words."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from fgpuspawner import bodies
from fgpuspawner.bodies import MOST_BYTES, bound_bodies


class Length(RequestHandler):
    def post(self) -> None:
        self.write(str(len(self.request.body)))


@pytest.fixture
async def port() -> AsyncIterator[int]:
    application = Application([("/", Length)])
    bound_bodies(application)
    server = HTTPServer(application)
    (socket,) = bind_sockets(0, "127.0.0.1")
    server.add_sockets([socket])
    yield socket.getsockname()[1]
    server.stop()
    await server.close_all_connections()


async def send(port: int, length: int, *, in_chunks: bool = False) -> tuple[int, bytes]:
    """Send a body of this length; return the answer's status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b"Transfer-Encoding: chunked" if in_chunks else b"Content-Length: %d" % length
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + said + b"\r\n\r\n")
    left, piece = length, b"x" * 65536
    while left:
        part = piece[:left]
        writer.write(b"%x\r\n%s\r\n" % (len(part), part) if in_chunks else part)
        await writer.drain()
        left -= len(part)
    if in_chunks:
        writer.write(b"0\r\n\r\n")
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("in_chunks", [False, True])
async def test_what_is_too_large_is_answered_in_words(port: int, in_chunks: bool) -> None:
    assert await send(port, MOST_BYTES, in_chunks=in_chunks) == (200, str(MOST_BYTES).encode())
    status, body = await send(port, MOST_BYTES + 1, in_chunks=in_chunks)
    assert status == 413
    said = json.loads(body)
    assert said["message"] == said["error"]["message"] == "the request has more than 1 MiB; send less"


async def test_what_is_too_large_is_not_kept(port: int) -> None:
    tracemalloc.start()
    try:
        answers = await asyncio.gather(*(send(port, 50_000_000) for _ in range(4)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [status for status, _ in answers] == [413] * 4
    assert peak < 20_000_000


@pytest.mark.parametrize(
    "said",
    [b"", b"POST / HTTP/1.1\r\nHost: x\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1234"],
)
async def test_who_sends_nothing_more_is_let_go(
    port: int, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "SLOWEST_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
