"""Images that registries serve, from nothing or on top of the default one; and a registry that does as it is told."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import docker

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
PIECE_BYTES = 1 << 16


def digest(body: bytes) -> str:
    """Return what a registry calls these bytes."""
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


@dataclass(frozen=True)
class Layer:
    """A layer as it is sent, packed; what that is called, and what is in it."""

    packed: bytes = field(repr=False)
    digest: str
    diff_id: str


def packed(tar: bytes, diff_id: str = "") -> Layer:
    """Return a tar as a layer. It is not made smaller: what counts is how much is sent."""
    body = gzip.compress(tar, compresslevel=0, mtime=0)
    return Layer(body, digest(body), diff_id or digest(tar))


def random_layer(mib: float, name: str = "large") -> Layer:
    """Return a layer with one new file."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = int(mib * 2**20)
        tar.addfile(info, io.BytesIO(os.urandom(info.size)))
    return packed(held.getvalue())


@dataclass(frozen=True)
class Made:
    """An image as a registry has it."""

    layers: tuple[Layer, ...]
    config: Mapping[str, Any] = field(default_factory=lambda: {"Cmd": ["/large"]})

    @property
    def config_blob(self) -> bytes:
        """The image's configuration."""
        return json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": dict(self.config),
                "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in self.layers]},
                "history": [{"created_by": "tests"}] * len(self.layers),
            }
        ).encode()

    @property
    def manifest(self) -> bytes:
        """What its tag leads to."""
        config = self.config_blob
        return json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, "size": len(config), "digest": digest(config)},
                "layers": [
                    {"mediaType": LAYER, "size": len(layer.packed), "digest": layer.digest}
                    for layer in self.layers
                ],
            }
        ).encode()

    @property
    def blobs(self) -> dict[str, bytes]:
        """Its layers and its configuration, by what they are called."""
        config = self.config_blob
        return {**{layer.digest: layer.packed for layer in self.layers}, digest(config): config}

    def with_layers(self, *layers: Layer) -> Made:
        """Return the same with more layers on top."""
        return Made((*self.layers, *layers), self.config)


def made_of(client: docker.APIClient, reference: str) -> Made:
    """Return an image that an engine has, as a registry would have it."""
    with tarfile.open(fileobj=io.BytesIO(b"".join(client.get_image(reference)))) as saved:

        def read(name: str) -> bytes:
            file = saved.extractfile(name)
            assert file is not None
            return file.read()

        (entry,) = json.loads(read("manifest.json"))
        config = json.loads(read(entry["Config"]))
        named = zip(entry["Layers"], config["rootfs"]["diff_ids"], strict=True)
        return Made(tuple(packed(read(name), diff_id) for name, diff_id in named), config["config"])


class ImageRegistry:
    """As much of the registry API as ``docker pull`` asks for. What it is to do can be changed at any time.

    ``mib_per_s`` is how fast it sends a blob, ``up_to`` how many bytes of it for now; ``asked`` counts the blobs and
    manifests that were asked for.
    """

    def __init__(self, port: int = 0) -> None:
        self.mib_per_s = 1000.0
        self.up_to: int | None = None
        self.asked: Counter[str] = Counter()
        self.sent = 0
        self.broken = 0
        """How many blobs were not wanted to their end."""
        self._manifests: dict[str, bytes] = {}
        self._blobs: dict[str, bytes] = {}
        self._server: ThreadingHTTPServer | None = None
        self.port = port
        self.start()

    @property
    def host(self) -> str:
        """Where it is, as references begin."""
        return f"127.0.0.1:{self.port}"

    def add(self, name: str, made: Made, tag: str = "1") -> str:
        """Take in an image and return its reference."""
        self._blobs |= made.blobs
        self._manifests[f"{name}/{tag}"] = made.manifest
        self._manifests[f"{name}/{digest(made.manifest)}"] = made.manifest
        return f"{self.host}/{name}:{tag}"

    def blobs_asked(self, made: Made) -> list[int]:
        """Return how often each of an image's layers was asked for."""
        return [self.asked[layer.digest] for layer in made.layers]

    def start(self) -> None:
        """Answer, at the same port as before."""
        registry = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                registry.answer(self, with_body=False)

            def do_GET(self) -> None:
                registry.answer(self, with_body=True)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Answer)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop answering, also in the middle of a blob."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        """Answer one request."""
        path = request.path.partition("?")[0]
        kind, body = "application/json", b"{}"
        status, called, rest = 200, "", ""
        if "/manifests/" in path:
            name, _, tag = path.removeprefix("/v2/").partition("/manifests/")
            self.asked[f"{name}:{tag}"] += 1
            found = self._manifests.get(f"{name}/{tag}")
            kind = MANIFEST
            if found is None:
                status, body = 404, _error("MANIFEST_UNKNOWN")
            else:
                body = found
        elif "/blobs/" in path:
            wanted = path.rpartition("/")[2]
            self.asked[wanted] += with_body
            kind = "application/octet-stream"
            if wanted in self._blobs:
                body, called = self._blobs[wanted], wanted
                # An engine that was broken off goes on where it was.
                begins = int((request.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
                if begins:
                    status, whole, body = 206, len(body), body[begins:]
                    rest = f"bytes {begins}-{whole - 1}/{whole}"
            else:
                status, body = 404, _error("BLOB_UNKNOWN")
        elif path != "/v2/":
            status = 404
        request.send_response(status)
        if rest:
            request.send_header("Content-Range", rest)
        request.send_header("Content-Type", kind if status in (200, 206) else "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Docker-Content-Digest", called or digest(body))
        request.end_headers()
        if with_body:
            self._send(request, body)

    def _send(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        began = time.monotonic()
        for start in range(0, len(body), PIECE_BYTES):
            held = time.monotonic()
            while self._server is not None and self.up_to is not None and start >= self.up_to:
                time.sleep(0.01)
            began += time.monotonic() - held
            if self._server is None:
                request.close_connection = True
                return
            try:
                request.wfile.write(body[start : start + PIECE_BYTES])
            except OSError:
                self.broken += 1
                request.close_connection = True
                return
            self.sent += PIECE_BYTES
            time.sleep(max(0, began + start / 2**20 / self.mib_per_s - time.monotonic()))


def _error(code: str) -> bytes:
    words: Sequence[Mapping[str, str]] = [{"code": code, "message": code.lower().replace("_", " ")}]
    return json.dumps({"errors": words}).encode()
