"""One long request to an engine, on its own connection, which can be cut at any time.

docker-py cannot cancel a request before its answer begins, and an engine that waits for a registry does not answer.
Closing docker-py's client (7.1) leaves the thread waiting and the engine asking the registry. Its stream also has no
limit on the length of a line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import docker

from fgpu_scheduler import FGPUError
from fgpuspawner.engines.docker.keepalive import KEEPALIVE

CONNECT_WITHIN_S = 10.0
SILENT_S = 180.0
"""An engine that is silent for this long is given up."""
AT_WORK_S = 3600.0
"""The same while it has a reason to be silent; keepalive notices a lost machine much sooner."""
LONGEST_LINE = 1 << 20
PIECE_BYTES = 1 << 18


class BrokenOff(FGPUError):
    """The engine did not answer, or its answer broke off."""

    code = "broken_off"


class EngineRefused(FGPUError):
    """The engine answered with an error."""

    code = "engine_refused"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EngineRequest:
    """One request and its answer. Every call but `cut` blocks; reading raises `BrokenOff` like `ask`."""

    def __init__(self, client: docker.APIClient, *, silent_s: float = SILENT_S) -> None:
        self._client = client
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._answer: http.client.HTTPResponse | None = None
        self._is_cut = False

    def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Iterable[bytes] | None = None,
    ) -> None:
        """Send the request and wait until the answer begins; then read it by `lines` or `pieces`.

        Raises:
            BrokenOff: the engine does not answer, is silent for too long, or the connection was cut.
            EngineRefused: it answers with an error.
        """
        sent = {"Host": "docker", **(headers or {})}
        if body is not None:
            sent["Transfer-Encoding"] = "chunked"
        with _as_broken_off():
            url = f"/v{self._client.api_version}{path}" + (f"?{urlencode(params)}" if params else "")
            connection = self._connect()
            try:
                connection.request(method, url, body, sent, encode_chunked=body is not None)
            except OSError:
                if body is None:
                    raise
                # An engine with a full disk answers early and stops reading.
            self._answer = connection.getresponse()
            if self._answer.status >= http.HTTPStatus.BAD_REQUEST:
                raise EngineRefused(self._answer.status, _message(self._answer.read(LONGEST_LINE)))

    def set_timeout(self, silent_s: float) -> None:
        """Change how long a silent engine is waited for."""
        self._silent_s = silent_s
        with self._lock:
            if self._socket is not None:
                self._socket.settimeout(silent_s)

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Yield the JSON objects of the answer."""
        for line in self._lines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found

    def _lines(self) -> Iterator[bytes]:
        left = b""
        for piece in self.pieces():
            *whole, left = (left + piece).split(b"\n")
            if len(left) > LONGEST_LINE:
                raise BrokenOff("the Docker engine's answer cannot be read: a line of it is too long")
            yield from whole
        yield left

    def pieces(self) -> Iterator[bytes]:
        """Yield the answer's bytes."""
        assert self._answer is not None
        while True:
            with _as_broken_off():
                # Not `readline`, which takes a broken answer for a complete one.
                piece = self._answer.read1(PIECE_BYTES)
            if not piece:
                break
            yield piece
        if self._is_cut:
            raise BrokenOff("the connection was cut")

    def cut(self) -> None:
        """End the request, from any thread: the engine notices and stops its work."""
        with self._lock:
            self._is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Not the TLS socket's own shutdown, which would break a concurrent read.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
        with self._lock:
            found, self._socket = self._socket, None
        if found is not None:
            found.close()

    def _connect(self) -> http.client.HTTPConnection:
        made = _connected(self._client)
        made.settimeout(self._silent_s)
        with self._lock:
            self._socket = made
            if self._is_cut:
                raise ConnectionAbortedError("the connection was cut")
        connection = http.client.HTTPConnection("docker")
        connection.sock = made
        return connection


def _connected(client: docker.APIClient) -> socket.socket:
    """Return a new connection to a client's engine, of the same kind."""
    path = getattr(getattr(client, "_custom_adapter", None), "socket_path", None)
    if path is not None:
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(CONNECT_WITHIN_S)
            made.connect(path)
        except OSError:
            made.close()
            raise
        return made
    url = urlsplit(client.base_url)
    if url.scheme not in ("http", "https") or not url.hostname or not url.port:
        raise OSError(f"{client.base_url} is no address of an engine that images can be fetched by")
    made = socket.create_connection((url.hostname, url.port), CONNECT_WITHIN_S)
    for option in KEEPALIVE:
        made.setsockopt(*option)
    if url.scheme == "http":
        return made
    try:
        return _trust(client).wrap_socket(made, server_hostname=url.hostname)
    except (OSError, ValueError):
        made.close()
        raise


def _trust(client: docker.APIClient) -> ssl.SSLContext:
    verify, cert = client.verify, client.cert
    context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert:
        context.load_cert_chain(*([cert] if isinstance(cert, str) else cert))
    return context


@contextlib.contextmanager
def _as_broken_off() -> Iterator[None]:
    try:
        yield
    except TimeoutError as e:
        raise BrokenOff("the Docker engine has been silent for too long") from e
    # Reading a socket that another thread closes raises ValueError.
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise BrokenOff(f"the Docker engine does not answer: {e or type(e).__name__}") from e


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip() or "no reason given"
