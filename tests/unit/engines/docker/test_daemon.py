"""A daemon that breaks off in the middle of an answer does not answer, like one that does not begin."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import docker
import pytest

from fgpu_scheduler import Observed
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.docker import daemon as module
from fgpuspawner.engines.docker.address import Address
from fgpuspawner.engines.docker.containers import Containers
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.network_guard import NetworkGuard
from fgpuspawner.settings import FGPU

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
BEGUN = JSON + b"Transfer-Encoding: chunked\r\n\r\n40\r\n[{"
CUT = JSON + b'\r\n[{"Id": "'
OF_A_PROXY = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>"
)
VERSION = JSON + b'\r\n{"ApiVersion": "1.41"}'


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the URL of a daemon that says which version it has, and gives this for any other answer."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                if b"/version" in connection.recv(65536):
                    connection.sendall(VERSION)
                else:
                    answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


@pytest.fixture(params=[BEGUN, CUT, OF_A_PROXY], ids=["begun", "cut", "of a proxy"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(lambda connection: connection.sendall(request.param)) as found:
        yield found


async def test_broken_answer_counts_as_silence(url: str) -> None:
    client = docker.APIClient(base_url=url, version="1.41", timeout=5)
    containers = Containers(client, installation="abc")
    with pytest.raises(EngineSilent):
        await containers.look()
    assert await containers.remove_named("fgpu-abc-1-1", now=True) is False, "it is not known to be gone"
    client.close()


def test_stalling_machine_does_not_stop_the_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = [], docker.APIClient.close
    monkeypatch.setattr(docker.APIClient, "close", lambda client: (closed.append(1), close(client)))
    there = Daemon(Address(url, ("far",), {}, "127.0.0.1"), installation="abc")
    Fleet([there]).connect()
    assert not there.answers
    assert len(closed) == 2, "it is asked again and again: nothing stays open each time"


async def test_only_this_machines_daemon_must_list_its_networks(url: str) -> None:
    background = Background(module.log)

    def opened(address: Address) -> Daemon:
        daemon = Daemon(address, installation="abc")
        daemon.containers.client = docker.APIClient(base_url=url, version="1.41", timeout=5)
        daemon.answers = True
        try:
            settings = FGPU(firewall="managed-elsewhere")
            NetworkGuard(settings, Fleet([daemon]), installation="abc").open([], background)
        finally:
            daemon.containers.client.close()
        return daemon

    assert not opened(Address(url, ("far",), {}, "127.0.0.1")).answers
    with pytest.raises(EngineSilent, match="does not say which networks it has"):
        opened(Address("", ("here",)))
    await background.close()


class Daemonless(Daemon):
    """Connects at once; what it says of its containers is what it is given."""

    def __init__(self, name: str, *found: Observed | Exception) -> None:
        super().__init__(Address("", (name,)), installation="abc")
        self.answers = True
        self.connections = 0
        self._found = found
        looks: Any = self.containers
        looks.look = self._look

    async def _look(self) -> list[Observed]:
        for one in self._found:
            if isinstance(one, Exception):
                raise one
        return [one for one in self._found if isinstance(one, Observed)]

    def connect(self) -> None:
        self.connections += 1
        self.answers = True


async def test_invalid_answer_of_one_daemon_does_not_affect_others() -> None:
    here = Observed("here", 1, 1, "fgpu-abc-1-1", alive=True)
    seen = await Fleet([Daemonless("far", KeyError("Id")), Daemonless("here", here)]).observe()
    assert (list(seen.things), list(seen.nodes)) == ([here], ["here"])


async def test_machine_cannot_report_or_end_another_machines_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Observed("here", 1, 1, "fgpu-abc-1-1", alive=True)
    forged = [replace(ours, alive=False), replace(ours, node_id="far")]
    here, far = Daemonless("here", ours), Daemonless("far", *forged)
    removed: list[tuple[str, str]] = []
    for daemon, seen in ((here, [ours]), (far, forged)):
        daemon.containers._seen = frozenset((o.node_id, o.handle) for o in seen)

        async def remove(name: str, at: str = str(daemon.address), **_: bool) -> bool:
            removed.append((at, name))
            return True

        monkeypatch.setattr(daemon.containers, "remove_named", remove)
    fleet = Fleet([here, far])
    for _ in range(2):
        assert list((await fleet.observe()).things) == [ours, forged[1]]
    assert caplog.text.count("is not believed") == 1
    # As a ghost it is removed where it is said to be, and not where a session has its name.
    await fleet.remove(forged[1])
    assert removed == [("the Docker engine of far", forged[1].handle)]


@pytest.mark.parametrize("said", [{}, {"NCPU": "many", "MemTotal": 1}, {"NCPU": 1, "MemTotal": None}, []])
def test_invalid_machine_description_counts_as_silence(said: object, monkeypatch: pytest.MonkeyPatch) -> None:
    far = Daemonless("far")
    looker: Any = SimpleNamespace(info=lambda: said)
    far.containers.looker = looker
    assert far.machine() is None


def endless(connection: socket.socket) -> None:
    connection.sendall(JSON + b"\r\n[")
    while True:
        connection.sendall(b" " * (1 << 20))


async def test_endless_answer_is_aborted_with_little_memory() -> None:
    with serving(endless) as url:
        daemon = Daemon(Address(url, ("far",), {}, "127.0.0.1"), installation="abc")
        with contextlib.closing(daemon._connected(30)) as client:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.raises(EngineSilent, match="more than 64 MiB"):
                await Containers(client, installation="abc").look()
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


async def test_daemon_that_only_greets_is_not_asked_in_a_tight_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ASK_EVERY_S", 3600)
    daemon, looks, answers_again = Daemonless("far", EngineSilent("500")), [], asyncio.Event()
    monkeypatch.setattr(daemon, "_listen", lambda: None)
    daemon.changed = answers_again.set
    async with asyncio.timeout(60):
        looks.append(await daemon.observe())
        await answers_again.wait()
        answers_again.clear()
        looks.append(await daemon.observe())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await answers_again.wait()
    assert daemon.connections == 1
    assert not daemon.answers
    assert not any(list(look.nodes) for look in looks)
    assert daemon._asking is not None
    daemon._asking.cancel()
