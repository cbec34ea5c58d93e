"""The image worker, killed at every one of its steps: the next one ends what it began, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dockerhub import BASE, Engine
from traitlets.config import Config

from fgpu_scheduler import (
    Device,
    EndCause,
    ImageQuota,
    ImageState,
    Node,
    Policy,
    PrivateImage,
    PrivateImages,
    Request,
    SessionState,
    Store,
    plan,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import Installation
from fgpuspawner.engines.docker.engine import DockerEngine
from fgpuspawner.engines.docker.images import saver
from fgpuspawner.hub import image_worker as module
from fgpuspawner.hub.image_worker import ImageWorker
from fgpuspawner.images.model import Catalogue
from fgpuspawner.settings import FGPU

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""Threads of a killed worker cannot report it."""


class Killed(BaseException):
    """Nothing after this happens: no handler of the worker's own catches it."""


class Mortal:
    """Stands before an object; after the n-th call of a method that changes something it is the end."""

    def __init__(self, own: Any, death: Death) -> None:
        self._own, self._death = own, death

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name)
        if name not in CHANGES:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._death.nothing_more()
            result = found(*args, **kwargs)
            self._death.step()
            return result

        return call


log = logging.getLogger("fgpu")

CHANGES = ("commit", "load_image", "remove_image", "tag", "begin", "made", "fail", "tagged", "removed")


class Death:
    """When it comes: after which step. Then nothing has any effect."""

    def __init__(self, at: int) -> None:
        self.at, self.steps, self.come = at, 0, False

    def nothing_more(self) -> None:
        if self.come:
            raise Killed

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            self.come = True
            raise Killed


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(f"sqlite:///{tmp_path}/fgpu.sqlite")
    found.open()
    yield found
    found.close()


@pytest.fixture
def session(store: Store, engine: Engine, image: str) -> Iterator[int]:
    """A session that runs, as its engine and the database know it."""
    device = Device("GPU-0", "n1", 0, "Test GPU", 8192, 1000, True)
    store.set_nodes([Node("n1", "lab", 16000, 65536, (device,))], now_s=1)
    found = store.submit([Request("alice", "", "python", "lab", 500, 1000, 1024)], now_s=1)[0]
    store.commit(plan(store.snapshot(1), Policy()), now_s=1)
    store.move(found.id, SessionState.PREPARING, now_s=1)
    store.move(found.id, SessionState.RUNNING, now_s=1)
    name = f"fgpu-{store.installation_id}-{found.id}-1"
    volume = f"{engine.prefix}-worker"
    engine.client.create_container(
        BASE,
        ["/opt/fgpu/bin/python", "-c", "open('/tmp/kept', 'w').write('kept'); import signal; signal.pause()"],
        name=name,
        labels={"fgpu.installation": store.installation_id, "fgpu.session": str(found.id)},
        host_config=engine.client.create_host_config(network_mode="none", binds=[f"{volume}:/home/jovyan"]),
    )
    engine.client.start(name)
    yield found.id
    engine.remove(name)
    engine.remove_volume(volume)
    for left in left_of(engine, store):
        engine.client.remove_image(left, force=True)


def left_of(engine: Engine, store: Store) -> list[str]:
    names = [name for image in engine.client.images() for name in image.get("RepoTags") or ()]
    return [name for name in names if name.startswith(f"fgpu-{store.installation_id}")]


async def work(
    store: Store, death: Death, until: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a worker until it is killed, or what it is for is done."""
    settings = FGPU(nodes=[{"name": "n1", "gpus": {"simulated": 1}}])
    own = DockerEngine(Installation(store.installation_id, settings, Config(), lambda: Catalogue(())), {})
    (daemon,) = own.fleet.daemons
    clients = [daemon.client]

    def another(**kwargs: Any) -> Any:
        clients.append(daemon._connected(60))
        return Mortal(clients[-1], death)

    monkeypatch.setattr(daemon, "another_client", another)
    monkeypatch.setattr(daemon.containers, "client", Mortal(daemon.client, death))
    for where, name in ((module, "LOOK_EVERY_S"), (module, "AGAIN_AFTER_S"), (saver, "AGAIN_AFTER_S")):
        monkeypatch.setattr(where, name, 0.02)
    found = ImageWorker(
        store, own, catalogue=lambda: Catalogue(()), refresh=lambda: None, quota=ImageQuota(mib=100)
    )
    images: Any = Mortal(PrivateImages(store), death)
    monkeypatch.setattr(found, "_images", images)
    background = Background(log)
    hub: Any = SimpleNamespace(background=background, kept_images=lambda: module.kept_names(images))
    own._saver.open(hub)
    found.begin(background)
    async with asyncio.timeout(60):
        while not (death.come or until()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    for busy in found._busy.values():
        busy.cancel()
    with contextlib.suppress(Killed):
        await background.close()
    for client in clients:
        client.close()
    own.fleet.close()


@pytest.fixture
def alive(store: Store, session: int) -> PrivateImages:
    return PrivateImages(store)


async def at_every_step(
    store: Store,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[], None],
    done: Callable[[], bool],
    check: Callable[[], None],
) -> int:
    """Do it again and again, each time killed a step later and then done by another worker; return the steps."""
    for at in range(1, 100):
        begin()
        death = Death(at)
        await work(store, death, done, monkeypatch)
        if death.come:
            await work(store, Death(0), lambda: done() and settled(engine, store), monkeypatch)
        check()
        if not death.come:
            return at - 1
    raise AssertionError("it never ends")


def settled(engine: Engine, store: Store) -> bool:
    """Whether the engine has exactly what the rows say."""
    return sorted(left_of(engine, store)) == sorted(row.reference for row in PrivateImages(store).all())


async def test_killed_worker_loses_no_request_and_leaves_nothing_half_made(
    store: Store, session: int, engine: Engine, alive: PrivateImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> None:
        alive.request(session, name="torch", asked_by="alice", quota=ImageQuota(), now_s=1)

    def done() -> bool:
        return all(row.state is ImageState.READY for row in alive.all())

    def check() -> None:
        (row,) = alive.all()
        inspected = engine.client.inspect_image(row.reference)
        assert inspected["Id"] == row.image_id
        assert inspected["Config"]["Labels"]["fgpu.private.owner"] == "alice"
        assert settled(engine, store)
        forget(store, engine, alive)

    assert await at_every_step(store, engine, monkeypatch, begin, done, check) >= 5


def forget(store: Store, engine: Engine, images: PrivateImages) -> None:
    for row in images.all():
        images.delete(row.id, now_s=1)
        images.removed(row.id, now_s=1)
    for name in left_of(engine, store):
        engine.client.remove_image(name, force=True)


def ready(store: Store, engine: Engine, session: int, images: PrivateImages) -> PrivateImage:
    """Return an image that is ready, made without a worker."""
    row = images.request(session, name="torch", asked_by="alice", quota=ImageQuota(), now_s=1)
    repository, tag = row.reference.rsplit(":", 1)
    engine.client.tag(BASE, repository, tag=tag)
    engines_id = engine.client.inspect_image(BASE)["Id"]
    images.begin(row.id, facts="", now_s=1)
    return images.made(
        row.id,
        engines_id=engines_id,
        size_bytes=1,
        recipe=None,
        server_kept=True,
        quota=ImageQuota(),
        now_s=1,
    )


async def test_rename_is_finished_and_the_old_name_is_gone(
    store: Store, session: int, engine: Engine, alive: PrivateImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> None:
        row = ready(store, engine, session, alive)
        alive.rename(row.id, name="vision", tag=None, now_s=1)

    def done() -> bool:
        (row,) = alive.all()
        return row.reference == alive.wanted_reference(row) and settled(engine, store)

    def check() -> None:
        (row,) = alive.all()
        assert engine.client.inspect_image(row.reference)["Id"] == row.image_id
        forget(store, engine, alive)

    assert await at_every_step(store, engine, monkeypatch, begin, done, check) >= 3


async def test_removal_is_finished(
    store: Store, session: int, engine: Engine, alive: PrivateImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> None:
        alive.delete(ready(store, engine, session, alive).id, now_s=1)

    def check() -> None:
        assert left_of(engine, store) == []

    steps = await at_every_step(store, engine, monkeypatch, begin, lambda: not alive.all(), check)
    assert steps >= 2


async def test_a_session_that_ended_is_not_saved_and_says_so(
    store: Store, session: int, engine: Engine, alive: PrivateImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = alive.request(session, name="torch", asked_by="alice", quota=ImageQuota(), now_s=1)
    engine.remove(f"fgpu-{store.installation_id}-{session}-1")
    await work(store, Death(0), lambda: alive.get(row.id).state is ImageState.FAILED, monkeypatch)
    # The database still has it running: the engine's refusal is believed after some tries.
    assert "No such container" in str(alive.get(row.id).message)
    assert left_of(engine, store) == []
    row = alive.request(session, name="torch", asked_by="alice", quota=ImageQuota(), now_s=1)
    store.move(session, SessionState.TERMINATING, cause=EndCause.USER, now_s=2)
    await work(store, Death(0), lambda: alive.get(row.id).state is ImageState.FAILED, monkeypatch)
    assert alive.get(row.id).message == "the session is TERMINATING; only a running one can be saved"
