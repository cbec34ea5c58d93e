"""The catalogue of a running process: read again, kept where the new one is wrong, and said."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import insert
from traitlets.config import Config

from fgpu_scheduler import ImageEdit, ImageEdits, PrivateImages, Store, SystemClock
from fgpu_scheduler.store.schema import private_images
from fgpuspawner.engines.base import Capabilities
from fgpuspawner.images import live
from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.edits import Action
from fgpuspawner.images.live import Images
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.private import private_entries
from fgpuspawner.service.reader import Reader
from fgpuspawner.settings import FGPU

PYTHON = """[[image]]
slug = "python"
name = "Python"
framework = "python"
version = "3.11"
python = "3.11"
reference = "lab/python:1"
default = true
"""
TORCH = PYTHON.replace("python", "torch").replace("torch =", "python =").replace("default = true", "")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "catalogue.toml"
    path.write_text(PYTHON)
    return path


def slugs(images: Images) -> list[str]:
    return [image.slug for image in images.catalogue.images]


def test_catalogue_is_empty_until_the_database_was_read(path: Path, store: Store) -> None:
    ImageEdits(store).put([ImageEdit("python", changes={"enabled": False})], by="root", now_s=1)
    images = Images(path, store)
    assert slugs(images) == []
    images.refresh()
    assert slugs(images) == ["python"]
    assert images.catalogue.get("python") is None


def test_refresh_reads_file_and_database(path: Path, store: Store) -> None:
    images = Images(path, store)
    images.refresh()
    path.write_text(PYTHON + TORCH)
    images.refresh()
    assert slugs(images) == ["python", "torch"]
    ImageEdits(store).put([ImageEdit("torch", changes={"name": "Torch"})], by="root", now_s=1)
    images.refresh()
    assert [image.name for image in images.catalogue.images] == ["Python", "Torch"]
    path.write_text(PYTHON)
    images.refresh()
    assert slugs(images) == ["python"]
    assert images.listed.problems == ('image "torch" is not in the file any more, and was edited',)
    # Sessions of it may still run.
    assert images.names["torch"] == "Torch"


def test_wrong_file_keeps_the_last_good_catalogue(
    path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    images = Images(path, store)
    images.refresh()
    good = images.catalogue
    path.write_text(PYTHON.replace('"3.11"', "3.11", 1))
    with caplog.at_level(logging.INFO, "fgpu"):
        images.refresh()
        images.refresh()
    words = "write a text of one line, at most 200 characters"
    problem = f'catalogue.toml:1: image "python": version: 3.11 cannot be used; {words}'
    assert (images.problem, images.catalogue) == (problem, good)
    assert caplog.messages == [
        f"The catalogue cannot be used; the last good one stays in force: {problem}",
    ]
    # The edits of the database still count.
    ImageEdits(store).put([ImageEdit("python", changes={"hidden": True})], by="root", now_s=1)
    images.refresh()
    assert images.catalogue.images[0].hidden
    path.write_text(PYTHON)
    with caplog.at_level(logging.INFO, "fgpu"):
        images.refresh()
    assert images.problem is None
    assert "The catalogue can be used again" in caplog.messages


def test_unexpected_error_of_a_file_is_reported(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    images = Images(path, store)
    ImageEdits(store).put([ImageEdit("python", changes={"name": "Snake"})], by="root", now_s=1)

    def fails(raw: bytes, *, name: str) -> Catalogue:
        raise KeyError(name)

    monkeypatch.setattr(live, "parse_catalogue", fails)
    path.write_text(PYTHON + TORCH)
    for _ in range(2):
        images.refresh()
        assert images.problem == "catalogue.toml: cannot be read: KeyError"
    # What the database says still counts.
    assert [image.name for image in images.catalogue.images] == ["Snake"]
    assert caplog.messages.count("The catalogue's file could not be read") == 1
    monkeypatch.undo()
    path.write_text(PYTHON)
    images.refresh()
    assert images.problem is None


def test_half_written_file_is_read_later(path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(PYTHON + TORCH)
    images = Images(path, store)
    images.refresh()
    # Half of it is a catalogue, too, but not what is meant.
    path.write_text(PYTHON)
    monkeypatch.setattr(live.time, "sleep", lambda _: path.write_text(PYTHON + TORCH + "# as it was meant\n"))
    images.refresh()
    assert (slugs(images), images.problem) == (["python", "torch"], None)
    monkeypatch.undo()
    path.write_text(PYTHON)
    images.refresh()
    assert slugs(images) == ["python"]


def test_file_that_comes_back_is_used_again(path: Path, store: Store) -> None:
    images = Images(path, store)
    images.refresh()
    path.rename(path.with_suffix(".away"))
    images.refresh()
    assert images.problem == "catalogue.toml: there is no such file; c.FGPU.catalogue names the catalogue"
    assert slugs(images) == ["python"]
    path.with_suffix(".away").rename(path)
    images.refresh()
    assert images.problem is None


def test_wrong_file_at_the_start_is_refused(path: Path, store: Store) -> None:
    path.write_text("")
    with pytest.raises(CatalogueError, match="write an"):
        Images(path, store)
    images = Images(path, store, must_be_good=False)
    images.refresh()
    assert (slugs(images), images.problem is not None) == ([], True)
    path.write_text(PYTHON)
    images.refresh()
    assert (slugs(images), images.problem) == (["python"], None)


def test_catalogue_survives_an_unreachable_database(
    path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    images = Images(path, store)
    images.refresh()
    good = images.catalogue
    store.close()
    with caplog.at_level(logging.WARNING, "fgpu"):
        images.refresh()
        images.refresh()
    assert images.catalogue == good
    assert len(caplog.messages) == 1
    assert "is not open" in str(images.trouble)
    store.open()
    images.refresh()
    assert images.trouble is None


def test_edits_need_a_good_file(path: Path, store: Store) -> None:
    ImageEdits(store).put([ImageEdit("python", changes={"name": "Snake"})], by="root", now_s=1)
    before = ImageEdits(store).all()
    path.write_text("")
    images = Images(path, store, must_be_good=False)
    settings = FGPU.from_config(Config({"FGPU": {"data_dir": str(path.parent), "groups": {"default": {}}}}))

    async def change(action: Action) -> None:
        reader = Reader(
            Store(settings.database_url()), settings, images, SystemClock(), Capabilities("local processes")
        )
        await reader.connect()
        try:
            await reader.change_images(lambda draft: draft.do(action, "python"), "root")
        finally:
            await reader.close()

    for action in (Action.DISABLE, Action.UP, Action.BACK):
        with pytest.raises(CatalogueError, match=r"^nothing can be changed before .*: write an"):
            asyncio.run(change(action))
    assert ImageEdits(store).all() == before
    path.write_text(PYTHON)
    images.refresh()
    asyncio.run(change(Action.HIDE))
    assert images.catalogue.images[0].hidden


def saved(store: Store, base: str, **facts: object) -> None:
    """Put a private image into the store that is ready, as the worker does it."""
    values = {
        "owner": "alice",
        "name": f"alice/{base}:1",
        "reference": f"fgpu-x/alice/{base}:1",
        "state": "READY",
        "node_id": "n1",
        "image_id": "sha256:0",
        "session_id": 7,
        "made_from": base,
        "base": base,
        "facts": json.dumps(
            {
                "name": "Old Torch",
                "framework": "pytorch",
                "version": "1.5",
                "python": "3.8",
                "kernels": ["k"],
                **facts,
            }
        ),
        "shared_users": '["bob"]',
        "shared_groups": "[]",
        "owners_alone": False,
        "server_kept": True,
        "asked_by": "alice",
        "asked_at_s": 1,
    }
    with store.writing(now_s=1) as write:
        write.connection.execute(insert(private_images).values(values))
        write.event("images", reason="saved")


def test_private_images_inherit_from_their_catalogue_image(path: Path, store: Store) -> None:
    saved(store, "python")
    saved(store, "gone")
    images = Images(path, store)
    images.refresh()
    assert slugs(images) == ["python", "alice/python:1", "alice/gone:1"]
    base, own, old = images.catalogue.images
    assert (own.framework, own.version, own.python) == (base.framework, base.version, base.python)
    assert (own.name, own.reference, own.digest) == ("alice/python:1", "fgpu-x/alice/python:1", "sha256:0")
    assert (own.owner, own.node_id, own.users, own.default) == ("alice", "n1", ("bob",), False)
    assert (old.framework, old.version, old.kernels, old.sudo) == ("pytorch", "1.5", ("k",), False)
    assert own not in images.listed.catalogue.images
    for user, sees in (("alice", True), ("bob", True), ("carol", False)):
        assert (own in images.catalogue.startable_by(user, ())) is sees
    edited = [replace(base, sudo=True, deprecated="use another")]
    assert private_entries(PrivateImages(store).all()[:1], Catalogue(tuple(edited)))[0].sudo


def test_private_image_is_hidden_from_users_without_its_base(store: Store) -> None:
    saved(store, "python")
    saved(store, "gone", groups=["staff"])
    rows = PrivateImages(store).all()
    base = Image("python", "Python", "python", "3.11", "3.11", "lab/python:1", groups=("staff",), sudo=True)
    for image in private_entries(rows, Catalogue((base,))):
        for user, groups, sees in (
            ("alice", ("staff",), True),
            ("bob", ("staff",), True),
            ("carol", ("staff",), False),
            ("alice", (), False),
            ("bob", (), False),
        ):
            assert image.is_visible_to(user, groups) is sees, (image.slug, user, groups)
    enabled, _ = private_entries(rows, Catalogue((base,)))
    disabled, _ = private_entries(rows, Catalogue((replace(base, enabled=False),)))
    assert (enabled.sudo, disabled.sudo, disabled.enabled) == (True, False, True)
