"""What a command prints is read whole, however the engine's answer is cut into packets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import docker
import pytest

from fgpuspawner.engines.docker.client import OUTPUT_HEADER, STDERR, STDOUT, run_in

HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"


class Wire(BaseHTTPRequestHandler):
    """As much of an engine as an exec needs; what it answers to the start is sent in these packets."""

    packets: tuple[bytes, ...] = ()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/start"):
            for packet in self.packets:
                self.wfile.write(packet)
                self.wfile.flush()
                time.sleep(0.02)
            self.close_connection = True
        else:
            self._say({"Id": "e1"})

    def do_GET(self) -> None:
        self._say({"ExitCode": 3})

    def _say(self, what: object) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[docker.APIClient]:
    server = HTTPServer(("127.0.0.1", 0), Wire)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = docker.APIClient(base_url=f"tcp://127.0.0.1:{server.server_port}", version="1.41", timeout=5)
    yield found
    found.close()
    server.shutdown()
    server.server_close()


def piece(stream: int, text: bytes) -> bytes:
    return OUTPUT_HEADER.pack(stream, len(text)) + text


OUTPUT = piece(STDOUT, b"all ") + piece(STDERR, b"trouble") + piece(STDOUT, b"of it")


@pytest.mark.parametrize(
    "packets",
    [
        (HEADERS + OUTPUT,),
        (HEADERS, OUTPUT),
        (HEADERS + OUTPUT[:5], OUTPUT[5:11], OUTPUT[11:]),
        (HEADERS, *(bytes([byte]) for byte in OUTPUT)),
    ],
    ids=["together", "apart", "cut", "one by one"],
)
def test_whole_output_of_the_wanted_streams_is_read(
    client: docker.APIClient, packets: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wire, "packets", packets)
    answer = run_in(client, "c", ["x"], most_bytes=100)
    assert (answer.output, answer.status) == (b"all of it", 3)
    both = run_in(client, "c", ["x"], most_bytes=100, streams=(STDOUT, STDERR))
    assert both.output == b"all troubleof it"


def test_endless_output_is_cut(client: docker.APIClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wire, "packets", (HEADERS + piece(STDOUT, b"x" * 200_000) + piece(STDOUT, b"y"),))
    assert run_in(client, "c", ["x"], most_bytes=100).output == b"x" * 101
