"""Brings an image to an engine, from a registry or another engine, by requests that can be cut at any time.

docker-py cannot cancel a request before its answer begins, and an engine that waits for a registry does not answer.
Closing docker-py's client (7.1) leaves the thread waiting and the engine asking the registry. Its stream also has no
limit on the length of a line. So each long request has its own connection. Everything blocks but `EngineRequest.cut`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import docker
from docker.auth import encode_header, load_config, resolve_authconfig, resolve_repository_name
from docker.errors import DockerException
from docker.utils import parse_repository_tag

from fgpu_scheduler import FGPUError
from fgpuspawner.engines.docker.client import KEEPALIVE
from fgpuspawner.engines.docker.images.pull_output import Kind, Reason, reason

CONNECT_WITHIN_S = 10.0
SILENT_S = 180.0
"""An engine that is silent for this long is given up."""
AT_WORK_S = 3600.0
"""The same while it has a reason to be silent; keepalive notices a lost machine much sooner."""
LONGEST_LINE = 1 << 20
PIECE_BYTES = 1 << 18
COUNTED_EVERY_S = 0.2
MOVING = {"Pulling fs layer", "Downloading", "Verifying Checksum", "Extracting"}
"""States of a layer after which the engine soon reports more."""


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
        #: Guards the connection and whether it was cut, which other threads change.
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
            connection = http.client.HTTPConnection("docker")
            connection.sock = self._connect()
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

    def _connect(self) -> socket.socket:
        made = _connected(self._client)
        made.settimeout(self._silent_s)
        with self._lock:
            self._socket = made
            if self._is_cut:
                raise ConnectionAbortedError("the connection was cut")
        return made


def _connected(client: docker.APIClient) -> socket.socket:
    """Return a new connection to a client's engine, of the same kind."""
    path, url = (
        getattr(getattr(client, "_custom_adapter", None), "socket_path", None),
        urlsplit(client.base_url),
    )
    with contextlib.ExitStack() as failing:
        if path is not None:
            made = failing.enter_context(socket.socket(socket.AF_UNIX))
            made.settimeout(CONNECT_WITHIN_S)
            made.connect(path)
        elif url.scheme in ("http", "https") and url.hostname and url.port:
            address = url.hostname, url.port
            made = failing.enter_context(socket.create_connection(address, CONNECT_WITHIN_S))
            for option in KEEPALIVE:
                made.setsockopt(*option)
            if url.scheme == "https":
                made = _trust(client).wrap_socket(made, server_hostname=url.hostname)
        else:
            raise OSError(f"{client.base_url} is no address of an engine that images can be fetched by")
        failing.pop_all()
    return made


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


def fetch(
    request: EngineRequest,
    client: docker.APIClient,
    reference: str,
    report: Callable[[Mapping[str, Any]], None] | None,
) -> Reason | None:
    """Make the engine pull an image from its registry; return why it could not, or None.

    ``report`` gets each line that the engine prints. Without it the registry is only asked whether it has the image.
    """
    repository, tag = parse_repository_tag(reference)
    try:
        known = _credentials(client, resolve_repository_name(repository)[0])
        headers = {"X-Registry-Auth": known} if known else None
        if report is None:
            request.ask("GET", f"/distribution/{quote(reference, safe='/:@')}/json", headers=headers)
            return None
        params = {"fromImage": repository, "tag": tag or "latest"}
        request.ask("POST", "/images/create", params=params, headers=headers)
        layers: dict[str, str] = {}
        for line in request.lines():
            if "error" in line:
                return reason(str(line["error"]))
            report(line)
            layers[str(line.get("id"))] = str(line.get("status"))
            request.set_timeout(AT_WORK_S if is_in_line(layers.values()) else SILENT_S)
    except EngineRefused as e:
        return reason(str(e), e.status)
    except (BrokenOff, DockerException, OSError) as e:
        return Reason(Kind.ENGINE, str(e))
    finally:
        request.close()
    return None


def is_in_line(layers: Iterable[str]) -> bool:
    """Return whether all unfinished layers wait for other pulls of the engine.

    The engine reports once that a layer waits, and then nothing until the others are done.
    """
    states = set(layers)
    return "Waiting" in states and not states & MOVING


def copy(
    source: EngineRequest, target: EngineRequest, reference: str, count: Callable[[int], None]
) -> Reason | None:
    """Copy an image from one engine to another; return why it could not, or None. ``count`` gets the copied bytes."""

    def sent() -> Iterator[bytes]:
        done, counted_at = 0, 0.0
        for piece in source.pieces():
            yield piece
            done += len(piece)
            if time.monotonic() - counted_at >= COUNTED_EVERY_S:
                counted_at = time.monotonic()
                count(done)

    try:
        source.ask("GET", f"/images/{quote(reference, safe='/:@')}/get")
        headers = {"Content-Type": "application/x-tar"}
        target.ask("POST", "/images/load", params={"quiet": "1"}, headers=headers, body=sent())
        for line in target.lines():
            if "error" in line:
                return reason(str(line["error"]))
    except EngineRefused as e:
        return reason(str(e), e.status)
    except BrokenOff as e:
        return Reason(Kind.ENGINE, str(e))
    finally:
        source.close()
        target.close()
    return None


def _credentials(client: docker.APIClient, registry: str) -> str | None:
    """Return the Hub user's credentials for a registry; read each time, as some registries' tokens last only hours."""
    known = load_config(credstore_env=client.credstore_env)
    found = resolve_authconfig(known, registry, credstore_env=client.credstore_env)
    return encode_header(found).decode() if found else None
