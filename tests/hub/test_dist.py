"""What `make dist` makes installs without a checkout, a compiler or Node, and runs a session in its slice."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import subprocess
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubprocess import PROXY, ROOT, HubProcess, until

README = (ROOT / "README.md").read_text(encoding="utf-8")
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
    """The programs of a new environment, installed by the README's line with nothing else on PATH."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv", with_pip=True)
    programs = home / "venv" / "bin"
    (line,) = re.findall(r"hub/bin/(pip install --find-links dist .+)", README)
    words = shlex.split(line.replace(" dist ", f" {dist} "))
    done = subprocess.run(
        [programs / "python", "-m", *words, "--quiet", "--only-binary", ":all:"],
        env={**os.environ, "PATH": str(programs)},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return programs


class InstalledHub(HubProcess):
    """A Hub of that environment with the README's configuration. It sees nothing of the checkout but the proxy."""

    programs: Path

    def write_config(self) -> Path:
        """Write the README's lines, with ports that are free."""
        (lines,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
        own = (
            f"c.JupyterHub.hub_port = {self.port + 1}\n"
            f"c.ConfigurableHTTPProxy.api_url = 'http://127.0.0.1:{self.port + 2}'\n"
            f"c.FGPU.service_port = {self.port + 3}\n"
            f"c.FGPU.accounting_dir = {str(self.accounts)!r}\n"
        )
        path = self.folder / "jupyterhub_config.py"
        path.write_text(
            lines.replace("http://127.0.0.1:8000", self.url).replace("\nconfigure(", f"\n{own}configure(")
        )
        return path

    def environment(self) -> dict[str, str]:
        """Return what its programs are started with."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTERHUB", "PYTHON"))}
        node = ROOT / ".node" / "bin"
        found = [str(self.programs), str(PROXY.parent), *([str(node)] if node.is_dir() else []), env["PATH"]]
        return {**env, "PATH": os.pathsep.join(found), "HOME": str(self.folder)}

    def start(self, *, wait: bool = True) -> HubProcess:
        """Start it as the README says, in its own folder."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(  # type: ignore[assignment]
                ["jupyterhub"],
                cwd=self.folder,
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if wait:
            until(self._answers, within_s=120, what="the Hub answers")
        return self

    def typed(self, lines: str, **places: str) -> str:
        """Type lines of a page into a shell, each place with what it is here; return what they say."""
        for place, here in {"/etc/jupyterhub": str(self.folder), **places}.items():
            lines = lines.replace(place, here)
        done = subprocess.run(
            ["bash", "-ec", lines],
            cwd=self.folder,
            env={**self.environment(), "FGPU_HUB_URL": self.url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, lines + done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def hub(installed: Path, tmp_path: Path) -> Iterator[InstalledHub]:
    found = InstalledHub(tmp_path / "hub")
    found.programs = installed
    try:
        yield found
    finally:
        found.close()


def block(begins: str) -> str:
    """Return the block of docs/operations.md that begins with this."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    lines = text[text.index(f"    {begins}") :].splitlines(keepends=True)
    return "".join(itertools.takewhile(lambda line: line.startswith("    "), lines))


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


def test_the_lines_of_the_pages_lead_from_the_wheels_to_a_session_and_a_backup(hub: InstalledHub) -> None:
    hub.write_config()
    assert "`fgpu check` says whether it can work; `jupyterhub` starts it." in README
    assert hub.typed("fgpu check").startswith("OK")
    hub.start()
    told = hub.typed(block("(umask 077; jupyterhub token"))
    assert told == "no sessions\n"
    places = {
        "https://hub.example": hub.url,
        "=...": '="$(cat ~/fgpu-token)"',
        "pytorch": "python",
        " 12": " 1",
    }
    told = hub.typed(block("export FGPU_HUB_URL="), **places)
    assert "starts now" in told
    assert "RUNNING" in told
    until(lambda: hub.states() == {}, what="it has ended")
    told = hub.typed(block("fgpu backup /backup"), **{"/backup": str(hub.folder)})
    assert re.findall("^OK: .*", told, flags=re.MULTILINE)[1].endswith("can be restored")
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
