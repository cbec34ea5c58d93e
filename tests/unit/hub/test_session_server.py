"""Requests to a session's server, which may answer anything: the Hub's memory and time for it are limited."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace

import pytest
from jupyterhub import __version__ as hub_version
from jupyterhub._version import _check_version

from fgpuspawner.hub import session_server
from fgpuspawner.hub.session_server import MOST_BODY_BYTES, NoAnswer, ask, first_answer, wait_up

Answers = Callable[[asyncio.StreamWriter], Awaitable[None]]
MIB = 2**20
OK = b"HTTP/1.1 200 OK\r\n"


class Session:
    """A session's server with the same answer to every request; it counts them."""

    def __init__(self) -> None:
        self.asked = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/user/mallory/"


@contextlib.asynccontextmanager
async def session(answers: Answers) -> AsyncIterator[Session]:
    found = Session()
    serving: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                found.asked += 1
                await answers(writer)
                await writer.drain()
        finally:
            writer.close()

    # Not a coroutine: a connection that was taken is known in the same turn of the loop.
    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        serving.append(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        # One that was accepted in this turn of the loop is connected two turns later.
        await turns_of_the_loop(4)
        for task in serving:
            task.cancel()
        for writer in writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await asyncio.gather(*serving, return_exceptions=True)
        # A cancelled client notices now that its connection is gone, and closes it.
        await turns_of_the_loop(20)


async def turns_of_the_loop(number: int) -> None:
    """Let the event loop run this number of turns."""
    turn = asyncio.Event()
    for _ in range(number):
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()
        turn.clear()


def plain(answer: bytes) -> Answers:
    async def answers(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return answers


def endless(head: bytes, part: bytes, pause_s: float = 0.0) -> Answers:
    """Return a server that sends ``part`` again and again."""

    async def answers(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(part)
            await writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)

    return answers


FILL = b"x" * 62_500
LARGE_BODY = endless(OK + b"Content-Length: 100000000\r\n\r\n", FILL)
LARGE = [
    pytest.param(LARGE_BODY, id="length"),
    pytest.param(
        endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"f424\r\n" + FILL + b"\r\n"), id="chunks"
    ),
    pytest.param(endless(OK + b"\r\n", FILL), id="no length"),
    pytest.param(endless(OK, b"X-More: " + FILL[:1000] + b"\r\n"), id="headers"),
    pytest.param(endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), id="continue"),
]
SLOW_HEADERS = endless(OK + b"X-Slow: ", b"x", 0.05)
SLOW = [
    pytest.param(endless(OK + b"Content-Length: 1000\r\n\r\n", b"x", 0.05), id="slow body"),
    pytest.param(SLOW_HEADERS, id="slow headers"),
]


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Fail if more is held at any time than a few of the largest answers."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB


@pytest.mark.parametrize("answers", [*LARGE, *SLOW])
async def test_large_or_slow_answer_is_refused_cheaply(answers: Answers) -> None:
    async with session(answers) as server:
        begun = time.monotonic()
        with little_memory(), pytest.raises(NoAnswer):
            await ask(server.url, within_s=1.0)
        assert time.monotonic() - begun < 30, "its own limit is a second"


async def test_largest_answer_is_read_and_not_unpacked() -> None:
    body = b"x" * MOST_BODY_BYTES
    async with session(plain(OK + b"Connection: close\r\n\r\n" + body)) as server:
        assert (await ask(server.url)).body == body
    packed = gzip.compress(b"0" * 50_000_000)
    head = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with session(plain(head + packed)) as server:
        with little_memory():
            assert (await ask(server.url)).body == packed


async def test_redirects_are_not_followed() -> None:
    async with session(plain(OK + b"Content-Length: 0\r\n\r\n")) as elsewhere:
        leads = b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % elsewhere.url.encode()
        async with session(plain(leads)) as server:
            assert (await ask(server.url)).code == 302
        assert elsewhere.asked == 0


@pytest.mark.parametrize(
    "answers",
    [LARGE_BODY, plain(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"), plain(b"nonsense\r\n\r\n")],
)
async def test_server_with_wrong_answers_is_asked_less_often(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    enough = asyncio.Event()

    async def remembers(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) < 10:
            await sleep(0)
        else:
            # It is ended in a pause, in which no connection is open.
            enough.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(session_server.asyncio, "sleep", remembers)
    async with session(answers) as server:
        asks = asyncio.ensure_future(first_answer("127.0.0.1", server.port, "/"))
        async with asyncio.timeout(60):
            await enough.wait()
        asks.cancel()
        await asyncio.wait([asks])
    assert pauses == [min(0.03 * 2**n, 2.0) for n in range(10)]


@pytest.mark.parametrize(
    ("said", "kept"), [(hub_version, hub_version), ("nonsense", None), ("9" * 5000 + ".x", None)]
)
async def test_invalid_version_does_not_stop_the_hub(said: str, kept: str | None) -> None:
    head = OK + b"X-JupyterHub-Version: " + said.encode() + b"\r\nContent-Length: 0\r\n\r\n"
    async with session(plain(head)) as server:
        answer = await wait_up(SimpleNamespace(url=server.url), http=True, extra_path="api")
    assert answer.headers.get("X-JupyterHub-Version") == kept
    # What JupyterHub does with it: raised there, the Hub would end as it starts.
    _check_version(hub_version, answer.headers.get("X-JupyterHub-Version"), logging.getLogger("test"))


async def test_server_without_an_answer_times_out() -> None:
    async with session(SLOW_HEADERS) as server:
        with pytest.raises(TimeoutError):
            await wait_up(SimpleNamespace(url=server.url), timeout=0.5)


async def test_cancel_during_a_refused_connection_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The server's end cancels it. Lost, that end would wait for ever, and the share stay taken.
    refused = 0

    async def refuses(ip: str, port: int) -> None:
        nonlocal refused
        refused += 1
        if refused == 3:
            # After this refusal, and before the loop tells anybody of it.
            asyncio.get_running_loop().call_soon(waits.cancel)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", refuses)
    waits = asyncio.ensure_future(first_answer("127.0.0.1", 9, "/api"))
    done, _ = await asyncio.wait([waits], timeout=30)
    try:
        assert done
        assert waits.cancelled()
        assert refused == 3
    finally:
        while not waits.done():
            waits.cancel()
            await asyncio.wait([waits], timeout=1)
