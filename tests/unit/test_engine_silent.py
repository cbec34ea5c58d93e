"""An engine that breaks off in the middle of an answer does not answer, like one that does not begin."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import docker
import pytest

from fgpuspawner.containers import Containers, EngineSilent

BEGUN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n[{"


@pytest.fixture
def url() -> Iterator[str]:
    """An engine that ends in the middle of each answer."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(BEGUN)

    threading.Thread(target=serve, daemon=True).start()
    yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


async def test_an_answer_that_breaks_off_is_none(url: str) -> None:
    client = docker.APIClient(base_url=url, version="1.41", timeout=5)
    containers = Containers(client, installation="abc")
    with pytest.raises(EngineSilent):
        await containers.look()
    assert await containers.remove_named("fgpu-abc-1-1", now=True) is False, "it is not known to be gone"
    client.close()
