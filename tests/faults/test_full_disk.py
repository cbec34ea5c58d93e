"""A Hub on a full disk, without blocks or without files: a real file system, mounted for the test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from test_administrators import Browser

from hubprocess import MINI, HubProcess, until

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
def test_full_disk_keeps_sessions_and_is_announced(disk: Path, fill: object) -> None:
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
        # The Hub's reserve is used up too, like by a program that continues to write.
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


def kill_server(hub: HubProcess, server: str) -> None:
    """Kill what serves it, as its user or the kernel may."""
    (process,) = [
        process
        for process in psutil.process_iter()
        if hub._is_mine(process) and process.environ().get("JUPYTERHUB_SERVER_NAME") == server
    ]
    process.kill()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["both databases", "the Hub's database alone"])
@pytest.mark.parametrize("ends", ["by itself", "by its owner"])
def test_session_that_ends_on_a_full_disk_can_start_again(
    disk: Path, tmp_path: Path, elsewhere: bool, ends: str
) -> None:
    own = {"db_url": f"sqlite:///{tmp_path}/fgpu.sqlite"} if elsewhere else {}
    hub = HubProcess(disk, after=MINI + "c.Spawner.poll_interval = 2\n", **own)
    hub.log = disk.with_name("hub.log")
    try:
        hub.start()
        owner = Browser(hub, "alice")
        hub.spawn("alice", "one")
        hub.reach({"alice/one": "RUNNING"})
        until(lambda: owner.get("user/alice/one/").ok, what="its owner is there")
        fill_blocks(disk)
        until(lambda: health(hub)[0] == 503, what="the Hub says so")
        fill_blocks(disk)
        until(lambda: health(hub)[1]["disk"] == "full", what="the Hub says so")
        if ends == "by itself":
            kill_server(hub, "one")
        else:
            hub.stop("alice", "one")
        noted_later = ("cannot be noted yet", "cannot be ended yet")
        until(
            lambda: "alice/one" not in hub.states() or any(words in hub.log_text() for words in noted_later),
            what="the Hub knows that it has ended",
        )
        for address in ("user/alice/one/", "hub/user/alice/one/", "hub/spawn/alice/one"):
            # It gives up after thirty redirects, as a browser does.
            owner.http.get(f"{hub.url}/{address}", timeout=60)
        empty(disk)
        until(lambda: health(hub)[0] == 200, what="the Hub works again")
        until(lambda: not hub.servers("alice").get("one"), what="the Hub has no server any more")
        hub.reach({})
        hub.spawn("alice", "one")
        hub.reach({"alice/one": "RUNNING"})
        until(lambda: owner.get("user/alice/one/").ok, what="its owner is there again")
    finally:
        empty(disk)
        hub.close()
