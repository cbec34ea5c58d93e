"""The disk use of folders, also against their owner's tricks; and which mounts are homes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fgpuspawner.engines.docker import disk

MOVE = """
import os, sys
one, other = sys.argv[1:]
print("moving", flush=True)
while True:
    for before, after in ((one, other), (other, one)):
        for name in os.listdir(before):
            os.rename(f"{before}/{name}", f"{after}/{name}")
"""


def measured(folder: Path) -> disk.FolderUse:
    found = disk._measured({str(folder): "~"}, disk._Nameless({}), ())
    assert found is not None
    return found


def test_small_folders_are_counted_without_keeping_them(tmp_path: Path) -> None:
    for n in range(500):
        (tmp_path / "many" / str(n)).mkdir(parents=True)
    (tmp_path / "one").mkdir()
    with (tmp_path / "one" / "x").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 120 << 20)
    found = disk._du(["-B1", "--max-depth=2"], str(tmp_path))
    assert found is not None
    assert found.whole
    assert list(found.large) == [str(tmp_path / "one")]
    assert measured(tmp_path).files == 504
    assert measured(tmp_path).largest[0][0] == "~/one"


def test_the_largest_of_very_many_folders_are_found_at_once() -> None:
    sizes = {f"/h/{n}": 10 for n in range(50_000)} | {"/h/a": 100, "/h/a/b": 90}
    assert ("~/a/b", 90) in list(disk._deepest("/h", "~", sizes))
    assert "~/a" not in dict(disk._deepest("/h", "~", sizes))


@pytest.fixture
def moved(tmp_path: Path) -> Iterator[Path]:
    """A home with folders that are moved to and fro all the time."""
    home = tmp_path / "home"
    for n in range(50):
        (home / "x" / str(n) / "a/b/c/d/e/f").mkdir(parents=True)
    (home / "y").mkdir()
    words = [sys.executable, "-c", MOVE, str(home / "x"), str(home / "y")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as mover:
        assert mover.stdout is not None
        mover.stdout.readline()
        yield home
        mover.kill()


def test_moving_folders_during_a_count_is_reported(moved: Path) -> None:
    # du gives up when a folder that it is in is moved. That it is in one of them is a matter of a few looks.
    looks = (measured(moved) for _ in range(1000))
    assert disk.MOVED in (one.uncounted for one in looks)


@pytest.mark.parametrize(
    "settings",
    [
        {"volumes": {"/srv/homes/{username}": "/home/jovyan"}},
        {"volumes": {"home-{raw_username}": {"bind": "/home/jovyan/", "mode": "rw"}, "/srv/all": "/all"}},
        {"mounts": [{"source": "{safe_username}", "target": "/home/jovyan", "type": "volume"}]},
    ],
)
def test_home_is_recognised_by_any_form_of_the_users_name(settings: dict[str, object]) -> None:
    own = disk.own_targets(settings)
    assert own == ("/home/jovyan",)
    for mount in (
        {"Type": "bind", "Source": "/srv/homes/anna-2db", "Destination": "/home/jovyan"},
        {"Type": "volume", "Name": "home-zoe-40uni", "Source": "/v/_data", "Destination": "/home/jovyan"},
    ):
        assert disk._home_of(mount, "zoe@uni", "c", own) == mount["Source"]


@pytest.mark.parametrize(
    "mount",
    [
        {"Type": "volume", "Name": "course-data", "Source": "/var/lib/v/_data", "Destination": "/data"},
        {"Type": "volume", "Name": "home-zoe", "Source": "/var/lib/v/_data", "Destination": "/data"},
        {"Type": "bind", "Source": "/srv/all", "Destination": "/all"},
        {"Type": "bind", "Source": "/run/fgpu-homes-abc/warm-1/1", "Destination": "/data"},
    ],
)
def test_shared_folder_is_no_home(mount: dict[str, str]) -> None:
    assert disk._home_of(mount, "zo", "c", ("/home/jovyan",)) is None


def test_mount_of_a_hook_is_a_home_by_its_name() -> None:
    volume = {"Type": "volume", "Name": "home-zoe", "Source": "/var/lib/v/_data", "Destination": "/h"}
    assert disk._home_of(volume, "zoe", "c", ()) == "/var/lib/v/_data"
    folder = {"Type": "bind", "Source": "/srv/zoe", "Destination": "/h"}
    assert disk._home_of(folder, "zoe", "c", ()) == "/srv/zoe"


def test_home_in_a_warm_container_is_found_after_the_rename() -> None:
    mount = {"Type": "bind", "Source": "/run/fgpu-homes-abc/warm-1/0", "Destination": "/home/zoe"}
    own = disk.own_targets({"volumes": {"{username}": "/home/{username}"}})
    assert disk._home_of(mount, "zoe", "now", own) == "/run/fgpu-homes-abc/now/0"
