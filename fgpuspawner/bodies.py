"""Limits on the size and duration of requests, and a fair order of their starts.

Larger bodies are dropped while they arrive, and answered with 413. Requests start one at a time, in turn by client
address, so a thousand requests of one address delay others by one request only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any
from weakref import WeakSet

from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPConnection, HTTPHeaders, HTTPMessageDelegate, ResponseStartLine
from tornado.web import Application

MOST_BYTES = 1 << 20
OWN = re.compile(r"/api/users/[^/]+/.")
MOST_OWN_BYTES = 1 << 16
"""What every user may write for themselves (options of servers, notes of tokens) is stored by the Hub without end."""
DEEPEST = 64
"""Deepest nesting of lists and objects there. The Hub would parse deeper JSON, write it into its database, and then
fail to read that row where its own stack is deeper, and every later query with it.
"""
BRACKETS = re.compile(rb'\\.?|["\[\]{}]', re.DOTALL)
SLOWEST_S = 60.0
"""Time for the headers of a connection's first request, and for the body of each request. So clients that connect and
say nothing are disconnected.

A later request may come within an hour (Tornado's own limit): proxies keep connections, and answer 503 if one is closed
just as they send a request on it.
"""


def bound_bodies(application: Application) -> None:
    """Refuse requests that are larger than `MOST_BYTES` (or `MOST_OWN_BYTES`) or slower than `SLOWEST_S`.

    That happens before the application sees them. Accepted requests are started in turn.
    """
    start, turns = application.start_request, _RoundRobin()
    begun: WeakSet[object] = WeakSet()

    def bounded(server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        if isinstance(request_conn, HTTP1Connection):
            if server_conn not in begun:
                begun.add(server_conn)
                # All connections share one object of parameters.
                request_conn.params = copy(request_conn.params)
                request_conn.params.header_timeout = SLOWEST_S
            # Tornado itself waits for a body without end.
            request_conn.set_body_timeout(SLOWEST_S)
        return _Bounded(start(server_conn, request_conn), request_conn, turns)

    application.start_request = bounded  # type: ignore[method-assign]


class _Bounded(HTTPMessageDelegate):
    """Passes a request on unless its body is too large."""

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
            # Also drop what has arrived.
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
        # In the service's error format and JupyterHub's.
        problem = {"code": code, "field": None, "message": words}
        body = json.dumps({"status": status, "message": words, "error": problem}).encode()
        headers = HTTPHeaders({"Content-Type": "application/json", "Content-Length": str(len(body))})
        self._connection.write_headers(ResponseStartLine("HTTP/1.1", status, reason), headers, body)
        self._connection.finish()

    def _begin(self) -> None:
        stream = getattr(self._connection, "stream", None)
        if stream is None or stream.closed():
            # The client has disconnected.
            self._delegate.on_connection_close()
        else:
            self._delegate.finish()

    def on_connection_close(self) -> None:
        self._delegate.on_connection_close()


class _Nested:
    """Measures the nesting of JSON that arrives in pieces."""

    def __init__(self) -> None:
        self.deepest = self._depth = 0
        self._in_text = self._escaped = False

    def read(self, chunk: bytes) -> None:
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
    """Starts waiting requests: one in each round of the event loop, in turn by address."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def wait(self, who: str, begin: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.setdefault(who, deque()).append(begin)

    def _next(self) -> None:
        who = next(iter(self._waiting))
        line = self._waiting.pop(who)
        begin = line.popleft()
        if line:
            # Behind the other addresses.
            self._waiting[who] = line
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        begin()


def client_address(connection: HTTPConnection, headers: HTTPHeaders) -> str:
    """Return a request's client address: from a proxy on this machine, otherwise the connection's own.

    A client that connects directly could forge the header.
    """
    context = getattr(connection, "context", None)
    stream = getattr(connection, "stream", None)
    if context is None or stream is None or stream.socket is None or not context.address:
        return ""
    peer, here = str(context.address[0]), str(stream.socket.getsockname()[0])
    if peer != here and not is_loopback(peer):
        return peer
    said = [ip.strip() for ip in headers.get("X-Forwarded-For", "").split(",")]
    return next((ip for ip in reversed(said) if ip not in context.trusted_downstream), "") or peer


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
