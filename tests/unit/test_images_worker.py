"""The image worker goes on whatever fails, and no engine waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import TimeoutError as NoConnection
from standinengine import StandIn, connected

from fgpu_scheduler import Device, Node, Policy, Request, SessionState, StoreUnavailable, plan
from fgpu_scheduler.store.private_image import ImageQuota, ImageState, PrivateImage
from fgpu_scheduler.store.private_images import PrivateImages
from fgpu_scheduler.store.store import Store
from fgpuspawner.engines.docker.engines import Engines
from fgpuspawner.engines.docker.images.commit import Committed
from fgpuspawner.hub import image_worker as module
from fgpuspawner.hub.image_worker import ImageWorker
from fgpuspawner.images.model import Catalogue


class OneEngine:
    """Stands for an engine that answers; ``images`` is asked when it is swept."""

    def __init__(self, node: str, images: Callable[[], list[Any]]) -> None:
        self.address = SimpleNamespace(node_ids=(node,), is_elsewhere=False)
        self.answers = True
        client = SimpleNamespace(images=lambda **_: images(), containers=lambda **_: [])
        self.containers = SimpleNamespace(client=client, call=asyncio.to_thread, name=lambda _: "box")

    def another_client(self, *, timeout_s: int) -> Any:
        return contextlib.closing(self.containers.client)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(f"sqlite:///{tmp_path}/fgpu.sqlite")
    found.open()
    yield found
    found.close()


@pytest.fixture
def wished(store: Store) -> PrivateImage:
    """An image that is wished, of a session that runs."""
    gpu = Device("GPU-0", "local", 0, "Test GPU", 8192, 1000, True)
    store.set_nodes([Node("local", "default", 8000, 16384, (gpu,))], now_s=1)
    session = store.submit([Request("alice", "", "python", "default", 500, 1000, 1024)], now_s=1)[0]
    store.commit(plan(store.snapshot(1), Policy()), now_s=1)
    store.move(session.id, SessionState.PREPARING, now_s=1)
    store.move(session.id, SessionState.RUNNING, now_s=1)
    return PrivateImages(store).wish(session.id, name="torch", asked_by="alice", quota=ImageQuota(), now_s=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_EVERY_S", "AGAIN_AFTER_S", "SWEEP_EVERY_S"):
        monkeypatch.setattr(module, name, 0.01)


@contextlib.asynccontextmanager
async def working(store: Store, *engines: OneEngine) -> AsyncIterator[ImageWorker]:
    given: Any = engines
    worker = ImageWorker(
        store,
        Engines(given) if engines else None,
        catalogue=lambda: Catalogue(()),
        refresh=lambda: None,
        quota=ImageQuota(),
    )
    task = asyncio.create_task(worker.run())
    try:
        yield worker
        assert not task.done()
    finally:
        busy = list(worker._busy.values())
        for each in (task, *busy):
            each.cancel()
        await asyncio.gather(task, *busy, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_wishes_are_heard_after_a_look_that_failed_in_a_way_that_nobody_foresaw(
    store: Store, wished: PrivateImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = iter([NoConnection("no connection is free"), KeyError("x")])
    version = store.version

    def fails_at_first() -> int:
        for way in ways:
            raise way
        return version()

    monkeypatch.setattr(store, "version", fails_at_first)
    async with working(store):
        await until(lambda: PrivateImages(store).get(wished.id).state is ImageState.FAILED)
    assert "local processes" in str(PrivateImages(store).get(wished.id).message)


async def test_what_always_fails_in_a_way_that_nobody_foresaw_is_tried_three_times_and_says_so(
    store: Store, wished: PrivateImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def commit(*_: Any) -> Any:
        tries.append(1)
        raise KeyError("RootFS")

    async with working(store, OneEngine("local", list)) as worker:
        monkeypatch.setattr(worker, "_commit", commit)
        await until(lambda: PrivateImages(store).get(wished.id).state is ImageState.FAILED)
    assert len(tries) == module.MOST_TRIES
    assert PrivateImages(store).get(wished.id).message == module.UNFORESEEN


@pytest.mark.parametrize("kept", [False, True], ids=["not written", "only the answer lost"])
async def test_what_is_made_stays_on_its_engine_however_long_the_database_is_away(
    store: Store, wished: PrivateImage, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    commits, removed, lost = [], [], []
    made = PrivateImages.made

    def commit(*_: Any) -> Any:
        commits.append(1)
        return Committed("sha256:saved", 1024), "FROM base"

    def is_away(images: PrivateImages, *args: Any, **kwargs: Any) -> PrivateImage:
        if len(lost) < 3:
            lost.append(1)
            if kept:
                made(images, *args, **kwargs)
            raise StoreUnavailable("no answer")
        return made(images, *args, **kwargs)

    monkeypatch.setattr(PrivateImages, "made", is_away)
    monkeypatch.setattr(module.committing, "remove", lambda _, name: removed.append(name))
    async with working(store, OneEngine("local", list)) as worker:
        monkeypatch.setattr(worker, "_commit", commit)
        await until(lambda: PrivateImages(store).get(wished.id).state is ImageState.READY)
        await until(lambda: not worker._busy)
    assert (len(commits), len(lost), removed) == (1, 1 if kept else 3, [])
    assert PrivateImages(store).get(wished.id).image_id == "sha256:saved"


async def test_it_is_not_tried_again_at_once(
    store: Store, wished: PrivateImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_AFTER_S", 3600)
    tries, looks = [], []
    version = store.version

    def commit(*_: Any) -> Any:
        tries.append(1)
        raise KeyError("RootFS")

    def look() -> int:
        looks.append(len(tries))
        return version()

    monkeypatch.setattr(store, "version", look)
    async with working(store, OneEngine("local", list)) as worker:
        monkeypatch.setattr(worker, "_commit", commit)
        await until(lambda: sum(looks) >= 10)
    assert len(tries) == 1


async def test_an_engine_that_is_silent_keeps_no_other_from_being_swept(store: Store) -> None:
    answers, swept = threading.Event(), []

    def silent() -> list[Any]:
        answers.wait(60)
        return []

    def other() -> list[Any]:
        swept.append(1)
        # One that fails as nobody foresaw is swept again, too.
        raise KeyError("RepoTags")

    async with working(store, OneEngine("n1", silent), OneEngine("n2", other)):
        await until(lambda: len(swept) >= 3)
        answers.set()


async def test_what_is_renamed_during_a_sweep_is_swept_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SWEEP_EVERY_S", 3600)
    begun, goes_on, swept = threading.Event(), threading.Event(), []

    def images() -> list[Any]:
        swept.append(1)
        begun.set()
        goes_on.wait(60)
        return []

    engine: Any = OneEngine("n1", images)
    async with working(store, engine) as worker:
        await until(begun.is_set)
        before = len(swept)
        worker._unswept.add(engine)
        goes_on.set()
        # A sweep asks for images three times.
        await until(lambda: len(swept) >= before + 3)


async def test_a_sweep_removes_the_container_that_a_killed_hub_has_left(store: Store) -> None:
    engine, removed = OneEngine("n1", list), []
    left = f"fgpu-{store.installation_id}-carrier-7"
    engine.containers.client.containers = lambda **_: [{"Id": "ab", "Names": [f"/{left}"]}]
    engine.containers.client.remove_container = lambda name, **_: removed.append(name)
    async with working(store, engine):
        await until(lambda: bool(removed))
    assert set(removed) == {"ab"}


def test_a_long_call_to_another_machine_notices_that_the_machine_is_gone() -> None:
    stand_in = StandIn()
    try:
        engine = connected(stand_in).engines[0]
        client = engine.another_client(timeout_s=7200)
        with contextlib.closing(client), client._get(f"{client.base_url}/version", stream=True) as answer:
            # As the system has it: whoever sends these out ends the wait when nobody answers.
            taken: socket.socket = answer.raw.connection.sock
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            waits = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
            idle_s, pause_s, count = (taken.getsockopt(socket.IPPROTO_TCP, option) for option in waits)
            assert idle_s + pause_s * count <= 60
            assert taken.gettimeout() == 7200
    finally:
        stand_in.close()
