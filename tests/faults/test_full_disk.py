"""A Hub whose disk is full, of blocks or of files: a real file system, mounted for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from hubprocess import HubProcess, until

MINI = f"c.Spawner.cmd = ['python', {str(Path(__file__).parents[1] / 'hub' / 'miniserver.py')!r}]\n"
SIZE_MIB = 48


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, small enough to be filled."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    image, folder = tmp_path / "disk.img", tmp_path / "hub"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE_MIB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-N", "1200", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_blocks(folder: Path) -> None:
    with (folder / "filler").open("ab") as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    os.write(file.fileno(), b"x" * size)
            except OSError:
                continue


def fill_files(folder: Path) -> None:
    try:
        for number in range(1 << 20):
            (folder / f"filler-{number}").touch()
    except OSError:
        pass


def empty(folder: Path) -> None:
    for path in folder.glob("filler*"):
        path.unlink()


def health(hub: HubProcess, address: str = "hub/health") -> tuple[int, dict[str, str]]:
    answer = requests.get(f"{hub.url}/{address}", timeout=20)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("fill", [fill_blocks, fill_files], ids=["blocks", "files"])
def test_a_full_disk_stops_nobody_who_is_in_and_is_said(disk: Path, fill: object) -> None:
    hub = HubProcess(disk, after=MINI)
    hub.log = disk.with_name("hub.log")
    try:
        hub.start()
        assert health(hub) == (200, {"status": "ok", "disk": "ok", "database": "ok", "engine": "ok"})
        alice = hub.add_user("alice")
        for server in ("", "two"):
            hub.spawn("alice", server)
        hub.reach({"alice/": "RUNNING", "alice/two": "RUNNING"})
        assert hub.api("GET", "users/alice", token=alice).status_code == 200
        assert callable(fill)
        # Whatever room the Hub had kept goes too: this is somebody who goes on writing.
        fill(disk)
        until(lambda: health(hub)[0] == 503, what="the Hub says so")
        fill(disk)
        until(lambda: health(hub)[1]["disk"] == "full", what="the Hub says so")
        assert health(hub, "services/fgpu/health")[1]["disk"] == "full"
        for token in (alice, hub.token):
            assert hub.api("GET", "users/alice", token=token).status_code == 200, "a valid token is one"
        assert "The disk of this Hub is full" in requests.get(f"{hub.url}/hub/login", timeout=20).text
        assert hub.ready("alice"), "sessions run on"
        assert hub.log_text().count("The disk of the Hub's data") >= 1
        assert hub.stop("alice", "two").ok, "ends work"
        empty(disk)
        until(lambda: health(hub)[0] == 200, what="the Hub works again")
        until(
            lambda: hub.states().get("alice/two") != "RUNNING",
            what=f"what was ended has ended: {hub.states()}",
        )
        fill(disk)
        until(lambda: health(hub)[0] == 503, what="the Hub says so")
        fill(disk)
        hub.terminate()
        empty(disk)
        hub.start()
        until(lambda: hub.ready("alice"), what="nothing is lost")
    finally:
        empty(disk)
        hub.close()
