"""How large and how slow a request may be: larger bodies are dropped as they come, and answered with 413 in words."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPConnection, HTTPHeaders, HTTPMessageDelegate, ResponseStartLine
from tornado.web import Application

MOST_BYTES = 1 << 20
SLOWEST_S = 60.0
"""A request's headers are there by then, and its body as long after them. Who sends nothing is let go, too."""


def bound_bodies(application: Application) -> None:
    """Refuse what is larger than `MOST_BYTES` or slower than `SLOWEST_S`, before anything of this application sees it."""
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

    def headers_received(self, start_line: Any, headers: HTTPHeaders) -> Awaitable[None] | None:
        return self._delegate.headers_received(start_line, headers)

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        self._bytes += len(chunk)
        if self._bytes > MOST_BYTES:
            # What came before is let go, too.
            self._delegate.on_connection_close()
            return None
        return self._delegate.data_received(chunk)

    def finish(self) -> None:
        if self._bytes <= MOST_BYTES:
            self._delegate.finish()
            return
        words = f"the request has more than {MOST_BYTES >> 20} MiB; send less"
        # The service's form of an error, and JupyterHub's.
        problem = {"code": "too_large", "field": None, "message": words}
        body = json.dumps({"status": 413, "message": words, "error": problem}).encode()
        headers = HTTPHeaders({"Content-Type": "application/json", "Content-Length": str(len(body))})
        self._connection.write_headers(ResponseStartLine("HTTP/1.1", 413, "Payload Too Large"), headers, body)
        self._connection.finish()

    def on_connection_close(self) -> None:
        self._delegate.on_connection_close()
