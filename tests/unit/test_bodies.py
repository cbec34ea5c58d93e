"""Bodies of requests: what is too large is dropped as it comes, and answered in words."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPConnection, HTTPHeaders
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from fgpuspawner import bodies
from fgpuspawner.bodies import DEEPEST, MOST_BYTES, MOST_OWN_BYTES, bound_bodies, client_address

BEGUN: list[str] = []


class Length(RequestHandler):
    def post(self) -> None:
        self.write(str(len(self.request.body)))

    def get(self) -> None:
        BEGUN.append(self.request.headers["X-Forwarded-For"])


@pytest.fixture
async def port() -> AsyncIterator[int]:
    BEGUN.clear()
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
async def test_large_body_gets_413_with_a_message(port: int, in_chunks: bool) -> None:
    assert await send(port, MOST_BYTES, in_chunks=in_chunks) == (200, str(MOST_BYTES).encode())
    status, body = await send(port, MOST_BYTES + 1, in_chunks=in_chunks)
    assert status == 413
    said = json.loads(body)
    assert said["message"] == said["error"]["message"] == "the request has more than 1 MiB; send less"


@pytest.mark.parametrize("path", ["server", "servers/x", "servers/x?y=1", "tokens", "activity"])
async def test_user_options_have_a_smaller_limit(port: int, path: str) -> None:
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
async def test_deeply_nested_user_options_are_refused(
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


async def test_large_body_is_dropped_while_it_arrives(port: int) -> None:
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
async def test_silent_client_is_disconnected(port: int, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SLOWEST_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_idle_connection_of_a_proxy_takes_its_next_request(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "SLOWEST_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.5)
    writer.close()


async def test_requests_start_in_turn_by_address(port: int) -> None:
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(301)]
    mallory = ["10.0.0.1", "203.0.113.7, 10.0.0.1"]
    for number, (_, writer) in enumerate(connections):
        # What a client says of itself is before what its proxy says of it.
        said = "10.0.0.2" if number == 300 else mallory[number % 2]
        writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: {said}\r\n\r\n".encode())
    for reader, writer in connections:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert BEGUN.index("10.0.0.2") < 50
    assert len(BEGUN) == 301


async def test_request_of_a_gone_client_is_not_started(port: int) -> None:
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
    for _, writer in connections:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 10.0.0.1\r\n\r\n")
    for _, writer in connections[1:]:
        writer.transport.abort()
    assert (await connections[0][0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    connections[0][1].close()
    assert (await send(port, 5))[0] == 200
    assert len(BEGUN) < 300


@pytest.mark.parametrize(
    ("peer", "said", "address"),
    [
        ("127.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("172.17.0.1", "1.2.3.4, 10.0.0.1", "10.0.0.1"),
        ("127.0.0.1", "10.0.0.1, 10.9.9.9", "10.0.0.1"),
        ("127.0.0.1", None, "127.0.0.1"),
        ("172.17.0.9", "10.0.0.1", "172.17.0.9"),
        ("172.17.0.9", None, "172.17.0.9"),
    ],
)
def test_only_a_local_proxy_sets_the_client_address(peer: str, said: str | None, address: str) -> None:
    context = SimpleNamespace(address=(peer, 4711), trusted_downstream={"10.9.9.9"})
    stream = SimpleNamespace(socket=SimpleNamespace(getsockname=lambda: ("172.17.0.1", 8081)))
    connection = cast(HTTPConnection, SimpleNamespace(context=context, stream=stream))
    headers = HTTPHeaders({} if said is None else {"X-Forwarded-For": said})
    assert client_address(connection, headers) == address
