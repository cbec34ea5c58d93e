"""What the engine tells by itself: heard at once, and missed where the connection has died without a word."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from dockerhub import Engine as Made

from fgpuspawner.engines.docker.address import Address
from fgpuspawner.engines.docker.daemon import LISTED_AFTER_S, Daemon

SOCKET = "/var/run/docker.sock"


class Relay:
    """A way to the engine over TCP, which can stop passing on what it answers to those who listen to events."""

    def __init__(self) -> None:
        self.listeners = 0
        self.muted = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(SOCKET)
                self._sockets += [near, far]
                deaf = threading.Event()
                threading.Thread(target=self._pass_on, args=(near, far, deaf, True), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(far, near, deaf, False), daemon=True).start()

    def _pass_on(self, from_: socket.socket, to: socket.socket, listens: threading.Event, asks: bool) -> None:
        # Closed here, too: it may have been accepted while `close` ran.
        with contextlib.suppress(OSError), from_:
            while piece := from_.recv(65536):
                if asks and b"/events?" in piece:
                    self.listeners += 1
                    listens.set()
                if not asks and listens.is_set() and self.muted.is_set():
                    continue
                to.sendall(piece)

    def close(self) -> None:
        """End every connection, and take no other: closing alone does not wake who waits for one."""
        self._listening.shutdown(socket.SHUT_RDWR)
        for one in [self._listening, *self._sockets]:
            one.close()


@pytest.fixture
def relay(engine: Made) -> Iterator[Relay]:
    found = Relay()
    yield found
    found.close()


async def heard(changed: asyncio.Event, *, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await changed.wait()
    except TimeoutError:
        return False
    return True


async def test_a_stream_that_tells_nothing_any_more_is_noticed_and_asked_for_anew(
    engine: Made, image: str, relay: Relay
) -> None:
    installation = engine.prefix.removeprefix("fgpu-test-")
    here = Daemon(Address(relay.url, ("a",), {}, None), installation=installation)
    await asyncio.to_thread(here.connect)
    changed = asyncio.Event()
    here.watch(changed.set)
    assert await heard(changed, within_s=60)
    await asyncio.sleep(1.5)

    def start(number: int) -> str:
        name = f"fgpu-{installation}-{number}-1"
        labels = {"installation": installation, "session": str(number), "attempt": "1"}
        engine.start(name, labels={f"fgpu.{key}": value for key, value in labels.items()})
        return name

    async def death_is_heard(number: int, *, within_s: float = 60) -> bool:
        name = await asyncio.to_thread(start, number)
        changed.clear()
        await asyncio.to_thread(engine.client.kill, name)
        return await heard(changed, within_s=within_s)

    assert await death_is_heard(1)
    # What has been told brings no new stream.
    await here.observe()
    # The first event is reported again for this time, and a little longer.
    await asyncio.sleep(2 * LISTED_AFTER_S[-1])
    assert relay.listeners == 1
    relay.muted.set()
    assert not await death_is_heard(2, within_s=1.5)
    relay.muted.clear()
    # It is seen by looking, and that nothing was said of it is seen, too.
    until_s = time.monotonic() + 60
    while relay.listeners == 1 and time.monotonic() < until_s:
        found, nodes, _ = await here.observe()
        assert nodes == ("a",)
        assert {o.session_id: o.alive for o in found} == {1: False, 2: False}
        await asyncio.sleep(0.3)
    assert relay.listeners == 2
    await asyncio.sleep(1)
    assert await death_is_heard(3)
    here.close()


async def test_what_ended_before_the_stream_was_open_and_stays_is_no_reason_for_another(
    engine: Made, image: str, relay: Relay
) -> None:
    installation = engine.prefix.removeprefix("fgpu-test-")
    labels = {"installation": installation, "session": "9", "attempt": "1"}
    name = f"fgpu-{installation}-9-1"
    engine.start(name, labels={f"fgpu.{key}": value for key, value in labels.items()})
    engine.client.kill(name)
    here = Daemon(Address(relay.url, ("a",), {}, None), installation=installation)
    await asyncio.to_thread(here.connect)
    changed = asyncio.Event()
    here.watch(changed.set)
    until_s = time.monotonic() + 5
    while time.monotonic() < until_s:
        await heard(changed, within_s=0.5)
        changed.clear()
        found, _, _ = await here.observe()
        assert {o.session_id: o.alive for o in found}[9] is False
    assert relay.listeners == 1
    here.close()
