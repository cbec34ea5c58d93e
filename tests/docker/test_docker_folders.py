"""Shared folders in containers: read-only ones cannot be written, and no user decides where one is mounted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dockerhub import ONE, DockerHub, Engine, Running

from hubprocess import ROOT

LINKS = (
    (ROOT / "labextension/jupyterlab_fgpu/folders.py")
    .read_text()
    .replace("from __future__ import annotations", "")
)
AT = "/run/fgpu/folders"
WRITE = "open({path!r}, 'w').write('changed')"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of the machine; below ``sets`` something else is mounted."""
    places = tmp_path_factory.mktemp("shared")
    for name in ("sets", "sets/below", "vision", "gone"):
        (places / name).mkdir(mode=0o777)
        (places / name).chmod(0o777)
    (places / "sets/big").write_text("data")
    (places / "sets/big").chmod(0o666)
    below = str(places / "sets/below")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "tmpfs", below], check=True)
    yield places
    subprocess.run(["umount", below], check=True)


@pytest.fixture(scope="module")
def folders_hub(make_hub: Callable[..., DockerHub], places: Path) -> Iterator[DockerHub]:
    folders = {
        "sets": {"path": str(places / "sets"), "at": "data/sets", "always": True},
        "vision": {"path": str(places / "vision"), "mode": "read-write", "users": ["ann"]},
        "gone": {"path": str(places / "gone")},
    }
    hub = make_hub(folders=folders).start()
    yield hub
    hub.end_all_but(set())


@pytest.fixture(scope="module")
def ann(folders_hub: DockerHub) -> Running:
    return folders_hub.running("ann", folders=["vision"])


@pytest.mark.parametrize("user", ["", "0:0"])
@pytest.mark.parametrize("name", ["big", "new", "below/new"])
def test_read_only_folder_cannot_be_written_nor_what_is_mounted_below_it(
    engine: Engine, ann: Running, places: Path, user: str, name: str
) -> None:
    assert engine.python_in(ann.id, f"print(open('{AT}/sets/big').read())") == "data"
    code = WRITE.format(path=f"{AT}/sets/{name}")
    status, output = engine.run_in(ann.id, "/opt/fgpu/bin/python", "-c", code, user=user)
    assert status != 0
    assert "Read-only file system" in output
    assert (places / "sets/big").read_text() == "data"


def test_read_only_folder_stays_so_for_root_in_the_container(engine: Engine, ann: Running) -> None:
    code = (
        "import ctypes, os; lib = ctypes.CDLL(None, use_errno=True)\n"
        f"print(lib.mount(None, b'{AT}/sets', None, 32 | 4096, None), os.strerror(ctypes.get_errno()))"
    )
    status, output = engine.run_in(ann.id, "/opt/fgpu/bin/python", "-c", code, user="0:0")
    assert (status, output.strip()) == (0, "-1 Operation not permitted")


def test_read_write_folder_is_the_machines_own(engine: Engine, ann: Running, places: Path) -> None:
    engine.python_in(ann.id, WRITE.format(path=f"{AT}/vision/made"))
    assert (places / "vision/made").read_text() == "changed"
    environment = engine.server_env(ann.id)
    assert json.loads(environment["FGPU_FOLDERS"]) == {"data/sets": f"{AT}/sets", "vision": f"{AT}/vision"}


@pytest.mark.parametrize("target", ["/run/fgpu", "/run/fgpu/limits", "/etc", "/"])
def test_link_of_the_user_at_the_place_changes_no_file_of_the_session(
    engine: Engine, ann: Running, target: str
) -> None:
    look = "import os; print([(p, os.stat(p).st_ino) for p in ('/run/fgpu/limits', '/etc/ld.so.preload', '/etc/passwd')])"
    before = engine.python_in(ann.id, look)
    code = (
        f"import os, shutil, tempfile\nhome = tempfile.mkdtemp()\nos.symlink({target!r}, home + '/data')\n"
        f"os.symlink({target!r}, home + '/vision')\n{LINKS}\nimport logging\n"
        # Docker may put what is logged behind what is printed.
        "logging.disable()\n"
        f"os.environ[VARIABLE] = {json.dumps(json.dumps({'data/sets': f'{AT}/sets', 'vision': f'{AT}/vision'}))}\n"
        "link_folders(Path(home), logging.getLogger())\nprint(sorted(os.listdir(home)))"
    )
    assert engine.python_in(ann.id, code).splitlines()[-1] == "['data', 'vision']"
    assert engine.python_in(ann.id, look) == before


def test_missing_folder_fails_the_start_with_its_name_and_is_not_made(
    folders_hub: DockerHub, places: Path
) -> None:
    (places / "gone").rmdir()
    folders_hub.add_user("bob")
    folders_hub.spawn("bob", options={**ONE, "folders": ["gone"]})
    ended = folders_hub.last("bob")
    assert (
        ended.message == "folder gone is missing on this machine; start without it, or ask an administrator"
    )
    assert not (places / "gone").exists()


def test_folder_of_others_is_refused_without_saying_that_it_exists(folders_hub: DockerHub) -> None:
    folders_hub.add_user("carol")
    for name in ("vision", "vision2", f"../{'vision'}"):
        refused = folders_hub.refused("carol", options={**ONE, "folders": [name]})
        assert f"folders: there is no '{name}'; choose one of sets, gone" in refused.json()["message"]


def test_each_session_of_a_user_has_the_folder_that_is_always_given(
    engine: Engine, folders_hub: DockerHub
) -> None:
    dave = folders_hub.running("dave")
    assert engine.python_in(dave.id, f"import os; print(os.listdir('{AT}'))") == "['sets']"
