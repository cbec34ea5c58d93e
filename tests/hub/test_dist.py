"""What `make dist` makes installs without a checkout, a compiler or Node, and runs a session in its slice."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubprocess import ROOT, HubProcess, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a release is made of."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [ROOT / "scripts/dist.sh", folder], capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return folder


def wheels(dist: Path) -> list[Path]:
    """Return the wheels for this machine."""
    machine = os.uname().machine
    return sorted(w for w in dist.glob("*.whl") if w.name.endswith(("-any.whl", f"_{machine}.whl")))


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that both wheels were installed into, with nothing else on PATH."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv", with_pip=True)
    programs = home / "venv" / "bin"
    ours = [f"{wheel}{'[local]' if 'fgpuspawner' in wheel.name else ''}" for wheel in wheels(dist)]
    assert len(ours) == 2
    done = subprocess.run(
        [programs / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *ours],
        env={**os.environ, "PATH": str(programs)},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return programs


class InstalledHub(HubProcess):
    """A Hub of that environment, which sees nothing of the checkout but the proxy."""

    programs: Path

    def start(self, *, wait: bool = True) -> HubProcess:
        """Start it in its own folder."""
        config = self.write_config()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTERHUB", "PYTHON"))}
        node = ROOT / ".node" / "bin"
        env["PATH"] = os.pathsep.join(
            [str(self.programs), *([str(node)] if node.is_dir() else []), env["PATH"]]
        )
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(  # type: ignore[assignment]
                [self.programs / "jupyterhub", "-f", str(config)],
                cwd=self.folder,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if wait:
            until(self._answers, within_s=120, what="the Hub answers")
        return self


@pytest.fixture
def hub(installed: Path, tmp_path: Path) -> Iterator[HubProcess]:
    found = InstalledHub(tmp_path / "hub", runtime="local")
    found.programs = installed
    try:
        yield found.start()
    finally:
        found.close()


def test_a_release_says_what_is_in_it_and_its_checksums_are_right(dist: Path) -> None:
    sums = dict(line.split()[::-1] for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {file.name for file in dist.iterdir()} - {"SHA256SUMS"}
    assert all(
        hashlib.sha256((dist / name).read_bytes()).hexdigest() == known for name, known in sums.items()
    )
    named = {c["name"].lower() for c in json.loads((dist / "fgpuspawner.cdx.json").read_text())["components"]}
    assert {"fgpuspawner", "jupyterlab-fgpu", "jupyterhub", "sqlalchemy"} <= named
    (version,) = {re.match(r"\w+-([0-9.]+[0-9])[-.]", name)[1] for name in sums if "0" in name}  # type: ignore[index]
    assert version == json.loads((ROOT / "labextension/package.json").read_text())["version"]


def test_its_wheel_is_for_old_systems_too_and_has_the_recipes_and_the_library(dist: Path) -> None:
    (wheel,) = (w for w in wheels(dist) if w.name.startswith("fgpuspawner"))
    assert f"manylinux_2_17_{os.uname().machine}" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        modes = {i.filename: (i.external_attr >> 16) & 0o777 for i in archive.infolist()}
        assert b"/work/" not in archive.read("fgpuspawner/native/libfgpu.so")
    assert modes["fgpuspawner/native/libfgpu.so"] == modes["fgpuspawner/native/probe"] == 0o755
    assert {
        "fgpuspawner/data/images/build.sh",
        "fgpuspawner/data/images/catalogue.toml",
        "fgpuspawner/data/images/pytorch/image.toml",
        "fgpuspawner/templates/spawn.html",
        "fgpuspawner/service/static/fgpu.css",
    } <= modes.keys()


def test_a_session_runs_from_it_and_sees_its_slice(hub: HubProcess, installed: Path) -> None:
    hub.add_user("ann")
    assert hub.spawn("ann", options={"image": "python", "fgpu": "1"}).status_code in (201, 202)
    until(lambda: hub.ready("ann"), within_s=120, what="ann's server")
    pid = hub.sessions()["ann/"].id
    assert pid
    log = hub.log_text()
    assert str(ROOT / "fgpuspawner") not in log.replace(str(ROOT / "fgpuspawner" / "proxy_pages"), "")


def test_its_command_has_the_recipes_of_images(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "fgpu", "images", "build", "base", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "Builds session images.")
