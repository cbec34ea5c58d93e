"""``fgpu images`` for private images: what is written, what is said, and who is named."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fgpu_scheduler import (
    MIB,
    Audit,
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
from fgpuspawner.cli import main as cli
from fgpuspawner.cli import private_images as private_command
from fgpuspawner.cli.command import who

S = SessionState
PAUSED = "the session is paused while 20 MiB are written"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store in which session 1, alice's Python 1, runs."""
    found = Store(f"sqlite:///{tmp_path / 'fgpu.sqlite'}")
    found.open()
    gpu = Device("GPU-0", "local", 0, "Test GPU", 8192, 2000, True)
    found.set_nodes([Node("local", "default", 8000, 16384, (gpu,))], now_s=1)
    session = found.submit([Request("alice", "", "python", "default", 500, 1000, 1024)], now_s=1)[0]
    found.commit(plan(found.snapshot(1), Policy()), now_s=1)
    found.move(session.id, S.PREPARING, now_s=1)
    found.move(session.id, S.RUNNING, now_s=1)
    yield found
    found.close()


@pytest.fixture
def config(tmp_path: Path, store: Store) -> str:
    path = tmp_path / "jupyterhub_config.py"
    path.write_text(
        "from fgpuspawner.config import configure\nc = get_config()\n"
        f"configure(c, data_dir={str(tmp_path)!r}, max_private_images=2)\n"
    )
    return str(path)


def fgpu(capsys: pytest.CaptureFixture[str], config: str, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["images", *arguments, "--config", config])
    said = capsys.readouterr()
    return status, said.out.strip(), said.err.strip()


def make(store: Store, image_id: int, *, seen: threading.Event | None = None) -> None:
    """Do the work of the Hub; with ``seen`` the image is made after the progress was shown."""
    images = PrivateImages(store)
    images.begin(image_id, facts="", now_s=2)
    images.note(image_id, PAUSED, now_s=2)
    if seen is not None:
        seen.wait(60)
    images.made(
        image_id,
        engines_id="sha256:0",
        size_bytes=20 * MIB,
        recipe="FROM x\n",
        server_kept=True,
        quota=ImageQuota(),
        now_s=3,
    )


def test_commit_shows_progress_and_the_full_name(
    config: str, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_command, "LOOK_EVERY_S", 0.02)
    seen, get = threading.Event(), PrivateImages.get

    def look(images: PrivateImages, image_id: int) -> PrivateImage:
        found = get(images, image_id)
        if found.message == PAUSED:
            seen.set()
        return found

    monkeypatch.setattr(PrivateImages, "get", look)

    def work() -> None:
        while not PrivateImages(store).all():
            time.sleep(0.01)
        make(store, 1, seen=seen)

    worker = threading.Thread(target=work)
    worker.start()
    status, out, err = fgpu(capsys, config, "commit", "alice/", "--name", "torch-more")
    worker.join()
    assert (status, out) == (0, "saved as alice/torch-more:1, 20 MiB")
    assert f"alice/torch-more:1: {PAUSED}" in err


def test_commit_that_fails_says_why(config: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    images = PrivateImages(store)

    def work() -> None:
        while not images.all():
            time.sleep(0.01)
        images.fail(1, "the session has ended", now_s=2)

    worker = threading.Thread(target=work)
    worker.start()
    status, _, err = fgpu(capsys, config, "commit", "1", "--name", "torch", "--tag", "v1")
    worker.join()
    assert status == 1
    assert err.splitlines()[-1] == "fgpu: alice/torch:v1: the session has ended"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("commit", "9", "--name", "torch"), "there is no session 9"),
        (("commit", "bob/", "--name", "torch"), "there is no session bob/"),
        (("commit", "bob", "--name", "torch"), "give its number, or USER/SERVER"),
        (("commit", "1", "--name", "Torch"), "such as torch-more"),
        (("recipe", "alice/none:1"), "there is no private image 'alice/none:1'"),
        (("delete", "alice/none:1"), "there is no private image 'alice/none:1'"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    config: str, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = fgpu(capsys, config, *arguments)
    assert status in (1, 2)
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


def test_images_are_listed_shared_renamed_and_deleted(
    config: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fgpu(capsys, config, "private")[1] == "there is no private image"
    said = fgpu(capsys, config, "commit", "1", "--name", "torch", "--later")[1]
    assert said == "the Hub is going to save it as alice/torch:1"
    make(store, 1)
    assert fgpu(capsys, config, "recipe", "alice/torch:1")[1] == "FROM x"
    said = fgpu(capsys, config, "share", "alice/torch:1", "--users", "bob, carol", "--groups", "class")[1]
    assert said == "alice/torch:1 is shared with bob, carol, group class"
    listed = fgpu(capsys, config, "private")[1]
    assert "alice/torch:1: READY, 20 MiB, from session 1 (python), on local" in listed
    assert "shared with bob, carol, group class" in listed
    (image,) = json.loads(fgpu(capsys, config, "private", "--json")[1])["images"]
    assert (image["name"], image["state"], image["shared_users"]) == (
        "alice/torch:1",
        "READY",
        ["bob", "carol"],
    )
    waits = store.submit([Request("bob", "b", "alice/torch:1", "default", 500, 1000, 1024)], now_s=3)[0]
    status, _, err = fgpu(capsys, config, "delete", "alice/torch:1")
    assert (status, err) == (1, f"fgpu: alice/torch:1 is in use: bob/b (PENDING, {waits.id})")
    store.move(waits.id, S.CANCELLED, cause=EndCause.USER, now_s=4)
    said = fgpu(capsys, config, "rename", "alice/torch:1", "--name", "vision")[1]
    assert said == "alice/torch:1 is now alice/vision:1"
    assert "within seconds" in fgpu(capsys, config, "delete", "alice/vision:1")[1]
    assert PrivateImages(store).get(1).state is ImageState.DELETING
    lines = Audit(store).lines(limit=9)
    assert {line.actor for line in lines} == {f"{who()} (fgpu)"}
    assert [(line.action, line.target) for line in reversed(lines)] == [
        ("private-image.commit", "session 1 as alice/torch:1"),
        ("private-image.share", "alice/torch:1"),
        ("private-image.rename", "alice/torch:1"),
        ("private-image.delete", "alice/vision:1"),
    ]
