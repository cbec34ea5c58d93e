"""What a crash has left of private images is swept on every daemon, and no daemon waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from standindaemon import StandIn, connected
from waiting import eventually

from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.images import saver as module
from fgpuspawner.engines.docker.images.saver import ImageSaver


class OneDaemon:
    """Stands for a daemon that answers; ``images`` is asked when it is swept."""

    def __init__(self, node: str, images: Callable[[], list[Any]]) -> None:
        self.address = SimpleNamespace(node_ids=(node,), is_elsewhere=False)
        self.answers = True
        self.image_lock = asyncio.Lock()
        self.client = SimpleNamespace(images=lambda **_: images(), containers=lambda **_: [])
        self.containers = SimpleNamespace(call=asyncio.to_thread)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGAIN_AFTER_S", "SWEEP_EVERY_S"):
        monkeypatch.setattr(module, name, 0.01)


@contextlib.asynccontextmanager
async def sweeping(*daemons: OneDaemon) -> AsyncIterator[ImageSaver]:
    given: Any = daemons
    saver = ImageSaver(Fleet(given), "abc")
    background = Background(logging.getLogger("fgpu"))
    hub: Any = SimpleNamespace(background=background, kept_images=list)
    saver.open(hub)
    try:
        yield saver
    finally:
        await background.close()


async def test_silent_daemon_delays_no_other_sweep() -> None:
    answers, swept = threading.Event(), []

    def silent() -> list[Any]:
        answers.wait(60)
        return []

    def other() -> list[Any]:
        swept.append(1)
        # After an unexpected failure the daemon is swept again, too.
        raise KeyError("RepoTags")

    async with sweeping(OneDaemon("n1", silent), OneDaemon("n2", other)):
        await eventually(lambda: len(swept) >= 3)
        answers.set()


async def test_rename_during_a_sweep_causes_another_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_EVERY_S", 3600)
    begun, goes_on, swept = threading.Event(), threading.Event(), []

    def images() -> list[Any]:
        swept.append(1)
        begun.set()
        goes_on.wait(60)
        return []

    renamed = OneDaemon("n1", images)
    renamed.client.inspect_image = lambda _: {"Id": "sha256:1"}
    renamed.client.tag = lambda *_, **__: True
    async with sweeping(renamed) as saver:
        await eventually(begun.is_set)
        before = len(swept)
        image: Any = SimpleNamespace(reference="fgpu-abc/alice/a:1", image_id="sha256:1", node_id="n1")
        renaming = asyncio.create_task(saver.rename(image, "fgpu-abc/alice/b:1"))
        goes_on.set()
        assert await renaming
        # A sweep asks for images three times.
        await eventually(lambda: len(swept) >= before + 3)


async def test_sweep_removes_containers_of_a_killed_hub() -> None:
    daemon, removed = OneDaemon("n1", list), []
    daemon.client.containers = lambda **_: [{"Id": "ab", "Names": ["/fgpu-abc-carrier-7"]}]
    daemon.client.remove_container = lambda name, **_: removed.append(name)
    async with sweeping(daemon):
        await eventually(lambda: bool(removed))
    assert set(removed) == {"ab"}


def test_a_long_call_to_another_machine_notices_that_the_machine_is_gone() -> None:
    stand_in = StandIn()
    try:
        daemon = connected(stand_in).daemons[0]
        client = daemon.another_client(timeout_s=7200)
        with contextlib.closing(client), client._get(f"{client.base_url}/version", stream=True) as answer:
            # With these options the system ends the wait when the machine does not answer.
            taken: socket.socket = answer.raw.connection.sock
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            waits = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
            idle_s, pause_s, count = (taken.getsockopt(socket.IPPROTO_TCP, option) for option in waits)
            assert idle_s + pause_s * count <= 60
            assert taken.gettimeout() == 7200
    finally:
        stand_in.close()
