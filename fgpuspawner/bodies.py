"""How large and how slow a request may be, and whose is begun next.

Larger bodies are dropped as they come, and answered with 413 in words. Requests are begun one after the other, each time
of another address: a thousand of one address keep nobody else waiting for longer than one of them takes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPConnection, HTTPHeaders, HTTPMessageDelegate, ResponseStartLine
from tornado.web import Application

MOST_BYTES = 1 << 20
OWN = re.compile(r"/api/users/[^/]+/.")
MOST_OWN_BYTES = 1 << 16
"""What everybody may write for themselves, options of servers and notes of tokens, the Hub keeps for ever."""
DEEPEST = 64
"""So deep may lists and objects be in each other there. The Hub reads JSON, writes it into its database, and from then on
cannot read that row where its stack is higher: nor can it read anything else until it has noticed."""
BRACKETS = re.compile(rb'\\.?|["\[\]{}]', re.DOTALL)
SLOWEST_S = 60.0
"""A request's headers are there by then, and its body as long after them. Who sends nothing is let go, too."""


def bound_bodies(application: Application) -> None:
    """Refuse what is larger than `MOST_BYTES` (or `MOST_OWN_BYTES`) or slower than `SLOWEST_S`.

    That is before anything of this application sees it. What is not refused is begun in turn.
    """
    start, turns = application.start_request, _RoundRobin()

    def bounded(server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        if isinstance(request_conn, HTTP1Connection):
            # Tornado waits for an hour, and for a body for ever.
            request_conn.params.header_timeout = SLOWEST_S
            request_conn.set_body_timeout(SLOWEST_S)
        return _Bounded(start(server_conn, request_conn), request_conn, turns)

    application.start_request = bounded  # type: ignore[method-assign]


class _Bounded(HTTPMessageDelegate):
    """Passes a request on, as long as its body is not too large."""

    def __init__(self, delegate: HTTPMessageDelegate, connection: HTTPConnection, turns: _RoundRobin) -> None:
        self._delegate = delegate
        self._connection = connection
        self._turns = turns
        self._address = ""
        self._bytes = 0
        self._most = MOST_BYTES
        self._nested = _Nested()

    def headers_received(self, start_line: Any, headers: HTTPHeaders) -> Awaitable[None] | None:
        if OWN.search(start_line.path):
            self._most = MOST_OWN_BYTES
        self._address = client_address(self._connection, headers)
        return self._delegate.headers_received(start_line, headers)

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        self._bytes += len(chunk)
        if self._bytes > self._most:
            # What came before is let go, too.
            self._delegate.on_connection_close()
            return None
        if self._most == MOST_OWN_BYTES:
            self._nested.read(chunk)
        return self._delegate.data_received(chunk)

    def finish(self) -> None:
        if self._bytes > self._most:
            most = f"{self._most >> 20} MiB" if self._most >> 20 else f"{self._most >> 10} KiB"
            self._refuse(
                413, "Payload Too Large", "too_large", f"the request has more than {most}; send less"
            )
        elif self._nested.deepest > DEEPEST:
            self._delegate.on_connection_close()
            words = f"lists and objects are more than {DEEPEST} deep in each other; send something flatter"
            self._refuse(400, "Bad Request", "too_deep", words)
        else:
            self._turns.wait(self._address, self._begin)

    def _refuse(self, status: int, reason: str, code: str, words: str) -> None:
        # The service's form of an error, and JupyterHub's.
        problem = {"code": code, "field": None, "message": words}
        body = json.dumps({"status": status, "message": words, "error": problem}).encode()
        headers = HTTPHeaders({"Content-Type": "application/json", "Content-Length": str(len(body))})
        self._connection.write_headers(ResponseStartLine("HTTP/1.1", status, reason), headers, body)
        self._connection.finish()

    def _begin(self) -> None:
        stream = getattr(self._connection, "stream", None)
        if stream is None or stream.closed():
            # Who sent it has gone meanwhile.
            self._delegate.on_connection_close()
        else:
            self._delegate.finish()

    def on_connection_close(self) -> None:
        self._delegate.on_connection_close()


class _Nested:
    """How deep lists and objects are in each other in JSON that comes piece by piece."""

    def __init__(self) -> None:
        self.deepest = self._depth = 0
        self._in_text = self._escaped = False

    def read(self, chunk: bytes) -> None:
        """Go on with the next piece."""
        if self._escaped:
            chunk = b"\\" + chunk
            self._escaped = False
        for found in BRACKETS.findall(chunk):
            if found == b"\\":
                self._escaped = True
            elif found == b'"':
                self._in_text = not self._in_text
            elif self._in_text or len(found) > 1:
                continue
            elif found in b"[{":
                self._depth += 1
                self.deepest = max(self.deepest, self._depth)
            else:
                self._depth -= 1


class _RoundRobin:
    """Begins what waits: one in each round of the event loop, each time of the next address."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def wait(self, who: str, begin: Callable[[], None]) -> None:
        """Have something begun when it is its turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.setdefault(who, deque()).append(begin)

    def _next(self) -> None:
        who = next(iter(self._waiting))
        line = self._waiting.pop(who)
        begin = line.popleft()
        if line:
            # Behind all others.
            self._waiting[who] = line
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        begin()


def client_address(connection: HTTPConnection, headers: HTTPHeaders) -> str:
    """Return the address that a request is from: what a proxy on this machine says, and else the connection's own.

    Whoever connects directly could say anything.
    """
    context = getattr(connection, "context", None)
    stream = getattr(connection, "stream", None)
    if context is None or stream is None or stream.socket is None or not context.address:
        return ""
    peer, here = str(context.address[0]), str(stream.socket.getsockname()[0])
    if peer != here and not _is_loopback(peer):
        return peer
    said = [ip.strip() for ip in headers.get("X-Forwarded-For", "").split(",")]
    return next((ip for ip in reversed(said) if ip not in context.trusted_downstream), "") or peer


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
