"""A server that answers as much of a Docker daemon's API as pulls ask for, the way that a test tells it to."""

from __future__ import annotations

import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from fgpuspawner.engines.docker.address import Address
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.fleet import Fleet

Step = dict[str, Any] | threading.Event | int
"""A line that is told, what is waited for before the next one, or a status to refuse with."""


class StandIn:
    """An engine: ``images`` are what it has, ``pulls`` what becomes of each next pull of a reference."""

    def __init__(self) -> None:
        self.images: dict[str, dict[str, Any]] = {}
        self.pulls: dict[str, list[list[Step]]] = {}
        self.registry: dict[str, tuple[int, str]] = {}
        """By reference, what the engine says when it has asked the registry: a status, and words."""
        self.registry_waits: threading.Event | None = None
        """A registry's answer waits for this."""
        self.silent = False
        """It hangs up on every request."""
        self.asked: Counter[str] = Counter()
        self.loaded: list[bytes] = []
        self.cut = threading.Event()
        """Set once the client has closed a pull's connection."""
        self.holds: threading.Event | None = None
        """In the middle of an image that it gives away, it waits for this."""
        self.auth: list[str | None] = []
        stand_in = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in.answer(self, stand_in.get)

            def do_POST(self) -> None:
                stand_in.answer(self, stand_in.post)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._server.daemon_threads = True
        self.url = f"tcp://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def use_tls(self, certificate: Path, key: Path) -> None:
        """Speak TLS from now on."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, give: Callable[[BaseHTTPRequestHandler], None]) -> None:
        """Give an answer, or notice that the client is gone."""
        try:
            give(request)
        except OSError:
            request.close_connection = True
            self.cut.set()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        if self.silent:
            request.close_connection = True
            return
        if path.endswith("/version"):
            self._say(request, 200, {"ApiVersion": "1.41"})
            return
        if "/distribution/" in path:
            reference = path.partition("/distribution/")[2].removesuffix("/json")
            self.asked[f"registry {reference}"] += 1
            if self.registry_waits is not None:
                self.registry_waits.wait()
            status, words = self.registry.get(reference, (500, "error: no such host"))
            self._say(request, status, {"message": words})
            return
        name = path.partition("/images/")[2]
        if name.endswith("/get"):
            self.asked["get"] += 1
            self._stream(request, [b"tar of ", name.removesuffix("/get").encode()], self.holds)
            return
        found = self.images.get(name.removesuffix("/json"))
        self._say(request, 200 if found else 404, found or {"message": f"No such image: {name}"})

    def post(self, request: BaseHTTPRequestHandler) -> None:
        split = urlsplit(request.path)
        given = {key: values[0] for key, values in parse_qs(split.query).items()}
        if split.path.endswith("/images/load"):
            try:
                body = self._chunks(request)
            except ValueError:
                self.cut.set()
                request.close_connection = True
                return
            self.loaded.append(body)
            self.images[body.decode().removeprefix("tar of ")] = {"Id": "sha256:copied"}
            self._stream(request, [b'{"stream": "Loaded image"}\r\n'])
            return
        separator = "@" if given["tag"].startswith("sha256:") else ":"
        reference = f"{given['fromImage']}{separator}{given['tag']}"
        self.asked[reference] += 1
        self.auth.append(request.headers.get("X-Registry-Auth"))
        self._pull(request, reference, self.pulls[reference].pop(0))

    def _pull(self, request: BaseHTTPRequestHandler, reference: str, steps: list[Step]) -> None:
        if steps and isinstance(steps[0], int):
            self._say(request, steps[0], steps[1])
            return
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for step in steps:
            if isinstance(step, threading.Event):
                if not self._wait(request, step):
                    return
            elif step == {}:
                request.close_connection = True
                return
            else:
                # The last line may end with the answer.
                self._chunk(request, json.dumps(step).encode() + (b"" if step is steps[-1] else b"\r\n"))
        if not any(isinstance(step, dict) and "error" in step for step in steps):
            self.images.setdefault(
                reference, {"Id": "sha256:pulled", "RepoDigests": [f"x@sha256:{'a' * 64}"]}
            )
        self._chunk(request, b"")

    def _wait(self, request: BaseHTTPRequestHandler, step: threading.Event) -> bool:
        """Wait for an event, or until the client is gone; return whether it is still there."""
        request.connection.settimeout(0.02)
        while not step.is_set():
            try:
                if request.connection.recv(1) == b"":
                    request.close_connection = True
                    self.cut.set()
                    return False
            except TimeoutError:
                pass
        request.connection.settimeout(None)
        return True

    def _say(self, request: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _stream(
        self, request: BaseHTTPRequestHandler, pieces: list[bytes], holds: threading.Event | None = None
    ) -> None:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for piece in [*pieces, b""]:
            self._chunk(request, piece)
            if holds is not None and not self._wait(request, holds):
                return

    @staticmethod
    def _chunk(request: BaseHTTPRequestHandler, piece: bytes) -> None:
        request.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        request.wfile.flush()

    @staticmethod
    def _chunks(request: BaseHTTPRequestHandler) -> bytes:
        found = b""
        while size := int(request.rfile.readline(), 16):
            found += request.rfile.read(size)
            request.rfile.readline()
        request.rfile.readline()
        return found


def connected(*stand_ins: StandIn) -> Fleet:
    """Return the daemons a, b, ... that these stand in for."""
    fleet = Fleet(
        [
            Daemon(Address("", (name,)), installation="test", client_kwargs={"base_url": stand_in.url})
            for name, stand_in in zip("abcdef", stand_ins, strict=False)
        ]
    )
    fleet.connect()
    return fleet
