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
from fgpuspawner.bodies import DEEPEST, MOST_BYTES, MOST_OWN_BYTES, bound_bodies


class Length(RequestHandler):
    def post(self) -> None:
        self.write(str(len(self.request.body)))


@pytest.fixture
async def port() -> AsyncIterator[int]:
    application = Application([("/.*", Length)])
    bound_bodies(application)
    server = HTTPServer(application)
    (socket,) = bind_sockets(0, "127.0.0.1")
    server.add_sockets([socket])
    yield socket.getsockname()[1]
    server.stop()
    await server.close_all_connections()


async def send(port: int, length: int, *, in_chunks: bool = False, path: str = "/") -> tuple[int, bytes]:
    """Send a body of this length; return the answer's status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b"Transfer-Encoding: chunked" if in_chunks else b"Content-Length: %d" % length
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode() + said + b"\r\n\r\n")
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


@pytest.mark.parametrize("path", ["server", "servers/x", "servers/x?y=1", "tokens", "activity"])
async def test_what_a_user_has_the_hub_keep_is_smaller(port: int, path: str) -> None:
    path = f"/hub/api/users/mallory/{path}"
    assert (await send(port, MOST_OWN_BYTES, path=path))[0] == 200
    status, body = await send(port, MOST_OWN_BYTES + 1, path=path)
    assert (status, json.loads(body)["message"]) == (413, "the request has more than 64 KiB; send less")
    assert (await send(port, MOST_BYTES, path="/hub/api/users"))[0] == 200


DEEP, FLAT = b"[" * DEEPEST + b"]" * DEEPEST, b'{"a": [' + b"[]," * 5000 + b"[]]}"
IN_TEXT = b'["' + b"[" * 1000 + rb"\" \\\" [[{" + b"{" * 100 + b'"]'


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *((DEEP, 200), (FLAT, 200), (IN_TEXT, 200), (b"[" + DEEP + b"]", 400), (b'{"a":' * 900, 400)),
        *((b'["\\\\", ' + DEEP, 400), (b'["\\"' + DEEP, 200)),
    ],
)
@pytest.mark.parametrize("piece", [1, 3, 70_000])
async def test_what_a_user_has_the_hub_keep_is_not_nested_deep(
    port: int, body: bytes, status: int, piece: int
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /hub/api/users/mallory/server HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
    writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
    for first in range(0, len(body), piece):
        part = body[first : first + piece]
        writer.write(b"%x\r\n%s\r\n" % (len(part), part))
    writer.write(b"0\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert int(answer.split()[1]) == status
    assert (b"64 deep in each other" in answer) is (status == 400)


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
