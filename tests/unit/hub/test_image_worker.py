"""The image worker continues after failures, and stores the reason of a permanent one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config
from waiting import eventually

from fgpu_scheduler import (
    Device,
    ImageQuota,
    ImageState,
    Node,
    Policy,
    PrivateImage,
    PrivateImages,
    Request,
    SessionState,
    Store,
    StoreUnavailable,
    plan,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import CannotSave, Installation, SavedImage, SaveSpec
from fgpuspawner.engines.local.engine import LocalEngine
from fgpuspawner.hub import image_worker as module
from fgpuspawner.hub.image_worker import ImageWorker
from fgpuspawner.images.model import Catalogue
from fgpuspawner.settings import FGPU


@pytest.fixture
def wished(store: Store) -> PrivateImage:
    """A requested image of a running session."""
    gpu = Device("GPU-0", "local", 0, "Test GPU", 8192, 1000, True)
    store.set_nodes([Node("local", "default", 8000, 16384, (gpu,))], now_s=1)
    session = store.submit([Request("alice", "", "python", "default", 500, 1000, 1024)], now_s=1)[0]
    store.commit(plan(store.snapshot(1), Policy()), now_s=1)
    store.move(session.id, SessionState.PREPARING, now_s=1)
    store.move(session.id, SessionState.RUNNING, now_s=1)
    return PrivateImages(store).request(
        session.id, name="torch", asked_by="alice", quota=ImageQuota(), now_s=1
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_EVERY_S", "AGAIN_AFTER_S"):
        monkeypatch.setattr(module, name, 0.01)


class Saving(LocalEngine):
    """Local processes that ``save`` saves; it records removed images."""

    def __init__(self, installation: Installation, save: Callable[[SaveSpec], SavedImage]) -> None:
        super().__init__(installation, stop_timeout_s=1)
        self.save = save
        self.removed: list[str] = []

    async def save_image(self, spec: SaveSpec) -> SavedImage:
        return self.save(spec)

    async def delete_image(self, image: PrivateImage) -> None:
        self.removed.append(image.reference)


@contextlib.asynccontextmanager
async def working(
    store: Store,
    tmp_path: Path,
    save: Callable[[SaveSpec], SavedImage] | None = None,
    *,
    quota: ImageQuota | None = None,
) -> AsyncIterator[tuple[ImageWorker, LocalEngine]]:
    installation = Installation(
        store.installation_id, FGPU(data_dir=str(tmp_path)), Config(), lambda: Catalogue(())
    )
    engine = LocalEngine(installation, stop_timeout_s=1) if save is None else Saving(installation, save)
    worker = ImageWorker(
        store, engine, catalogue=lambda: Catalogue(()), refresh=lambda: None, quota=quota or ImageQuota()
    )
    background = Background(logging.getLogger("fgpu"))
    worker.begin(background)
    try:
        yield worker, engine
    finally:
        busy = list(worker._busy.values())
        for each in busy:
            each.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await background.close()


@pytest.mark.parametrize(
    ("error", "tries", "message"),
    [
        (KeyError("RootFS"), 3, "internal error; the Hub's log says more"),
        (CannotSave("it is refused"), 1, "it is refused"),
        (CannotSave("it is refused", may_pass=True), 3, "it is refused"),
    ],
    ids=["unexpected", "refused", "refused for now"],
)
async def test_failed_save_is_repeated_if_that_may_help(
    store: Store, wished: PrivateImage, tmp_path: Path, error: Exception, tries: int, message: str
) -> None:
    tried = []

    def save(_: SaveSpec) -> SavedImage:
        tried.append(1)
        raise error

    async with working(store, tmp_path, save):
        await eventually(lambda: PrivateImages(store).get(wished.id).state is ImageState.FAILED)
    assert len(tried) == tries
    assert PrivateImages(store).get(wished.id).message == message


@pytest.mark.parametrize("kept", [False, True], ids=["not written", "only the answer lost"])
async def test_saved_image_survives_a_database_that_is_away(
    store: Store, wished: PrivateImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    saved, lost = [], []
    made = PrivateImages.made

    def save(_: SaveSpec) -> SavedImage:
        saved.append(1)
        return SavedImage("sha256:saved", 1024, "FROM base", server_kept=True)

    def is_away(images: PrivateImages, *args: Any, **kwargs: Any) -> PrivateImage:
        if len(lost) < 3:
            lost.append(1)
            if kept:
                made(images, *args, **kwargs)
            raise StoreUnavailable("no answer")
        return made(images, *args, **kwargs)

    monkeypatch.setattr(PrivateImages, "made", is_away)
    async with working(store, tmp_path, save) as (worker, engine):
        await eventually(lambda: PrivateImages(store).get(wished.id).state is ImageState.READY)
        await eventually(lambda: not worker._busy)
    assert isinstance(engine, Saving)
    assert (len(saved), len(lost), engine.removed) == (1, 1 if kept else 3, [])
    assert PrivateImages(store).get(wished.id).image_id == "sha256:saved"


async def test_failed_save_is_not_repeated_at_once(
    store: Store, wished: PrivateImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_AFTER_S", 3600)
    tries, looks = [], []
    version = store.version

    def save(_: SaveSpec) -> SavedImage:
        tries.append(1)
        raise KeyError("RootFS")

    def look() -> int:
        looks.append(len(tries))
        return version()

    monkeypatch.setattr(store, "version", look)
    async with working(store, tmp_path, save):
        await eventually(lambda: sum(looks) >= 10)
    assert len(tries) == 1


async def test_too_large_image_is_removed_with_the_reason(
    store: Store, wished: PrivateImage, tmp_path: Path
) -> None:
    def save(spec: SaveSpec) -> SavedImage:
        spec.check(1024)
        return SavedImage("sha256:saved", 2 << 20, "FROM base", server_kept=True)

    async with working(store, tmp_path, save, quota=ImageQuota(mib=1)) as (_, engine):
        await eventually(lambda: PrivateImages(store).get(wished.id).state is ImageState.FAILED)
    assert isinstance(engine, Saving)
    assert engine.removed == [wished.reference]
    assert "1 MiB" in str(PrivateImages(store).get(wished.id).message)


async def test_save_request_waits_for_a_silent_machine(
    store: Store, tmp_path: Path, wished: PrivateImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    def is_away(*_: object) -> bool:
        asked.set()
        return True

    monkeypatch.setattr(LocalEngine, "is_away", is_away)
    async with working(store, tmp_path):
        await asyncio.wait_for(asked.wait(), 60)
        asked.clear()
        await asyncio.wait_for(asked.wait(), 60)
    assert PrivateImages(store).get(wished.id).state is ImageState.WISHED
