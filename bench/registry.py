"""A registry with one image, for pulls that take a while: as much of the registry API as ``docker pull`` asks for."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
PIECE_BYTES = 1 << 20


class Registry:
    """Serves ``reference``: one layer of ``mib`` MiB that cannot be compressed, at ``mib_per_s``."""

    def __init__(self, mib: int, mib_per_s: float) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            info = tarfile.TarInfo("large")
            info.size = mib * 2**20
            tar.addfile(info, io.BytesIO(os.urandom(info.size)))
        layer = packed.getvalue()
        digest = _digest(layer)
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Cmd": ["/large"]},
                "rootfs": {"type": "layers", "diff_ids": [digest]},
                "history": [{"created_by": "bench"}],
            }
        ).encode()
        kind = "application/vnd.docker.image.rootfs.diff.tar"
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {
                    "mediaType": "application/vnd.docker.container.image.v1+json",
                    "size": len(config),
                    "digest": _digest(config),
                },
                "layers": [{"mediaType": kind, "size": len(layer), "digest": digest}],
            }
        ).encode()
        self._blobs = {digest: layer, _digest(config): config}
        self._manifest = manifest
        self._pause_s = PIECE_BYTES / 2**20 / mib_per_s
        registry = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, *, with_body: bool) -> None:
                found = registry.find(self.path)
                self.send_response(200 if found else 404)
                body, kind = found or (b"{}", "application/json")
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Docker-Content-Digest", _digest(body))
                self.end_headers()
                if with_body:
                    for start in range(0, len(body), PIECE_BYTES):
                        try:
                            self.wfile.write(body[start : start + PIECE_BYTES])
                        except OSError:
                            # The last who waited has gone.
                            self.close_connection = True
                            return
                        time.sleep(registry._pause_s if len(body) > PIECE_BYTES else 0)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.reference = f"127.0.0.1:{self._server.server_port}/fgpu-bench/large:1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def find(self, path: str) -> tuple[bytes, str] | None:
        """Return what is at a path of the registry API, and its type."""
        if path == "/v2/":
            return b"{}", "application/json"
        if "/manifests/" in path:
            return self._manifest, MANIFEST
        blob = self._blobs.get(path.rpartition("/")[2])
        return (blob, "application/octet-stream") if blob is not None else None

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"
