"""How large a request's body may be: larger ones are dropped as they come, and answered with 413 in words."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

from tornado.httputil import HTTPConnection, HTTPHeaders, HTTPMessageDelegate, ResponseStartLine
from tornado.web import Application

MOST_BYTES = 1 << 20


def bound_bodies(application: Application) -> None:
    """Refuse what is larger than `MOST_BYTES`, before anything of this application sees it."""
    start = application.start_request

    def bounded(server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
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
