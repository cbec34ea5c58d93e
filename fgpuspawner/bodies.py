"""How large and how slow a request may be: larger bodies are dropped as they come, and answered with 413 in words."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable
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

    That is before anything of this application sees it.
    """
    start = application.start_request

    def bounded(server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        if isinstance(request_conn, HTTP1Connection):
            # Tornado waits for an hour, and for a body for ever.
            request_conn.params.header_timeout = SLOWEST_S
            request_conn.set_body_timeout(SLOWEST_S)
        return _Bounded(start(server_conn, request_conn), request_conn)

    application.start_request = bounded  # type: ignore[method-assign]


class _Bounded(HTTPMessageDelegate):
    """Passes a request on, as long as its body is not too large."""

    def __init__(self, delegate: HTTPMessageDelegate, connection: HTTPConnection) -> None:
        self._delegate = delegate
        self._connection = connection
        self._bytes = 0
        self._most = MOST_BYTES
        self._nested = _Nested()

    def headers_received(self, start_line: Any, headers: HTTPHeaders) -> Awaitable[None] | None:
        if OWN.search(start_line.path):
            self._most = MOST_OWN_BYTES
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
            self._delegate.finish()

    def _refuse(self, status: int, reason: str, code: str, words: str) -> None:
        # The service's form of an error, and JupyterHub's.
        problem = {"code": code, "field": None, "message": words}
        body = json.dumps({"status": status, "message": words, "error": problem}).encode()
        headers = HTTPHeaders({"Content-Type": "application/json", "Content-Length": str(len(body))})
        self._connection.write_headers(ResponseStartLine("HTTP/1.1", status, reason), headers, body)
        self._connection.finish()

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
