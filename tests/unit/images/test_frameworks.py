"""Frameworks for local sessions: sizes are known before anything is fetched, and an environment is whole or not there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fgpuspawner.images.entry import read_entry
from fgpuspawner.images.frameworks import (
    FRAMEWORKS,
    CannotInstall,
    LocalFramework,
    find_uv,
    find_wheels,
    install,
)
from smallwheels import wheel

TINY = LocalFramework("tiny-1-0", "Tiny 1.0", "tiny", "1.0", ("fgpu-tiny==1.0",))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in place of the package index."""
    if find_uv() is None:
        pytest.skip("uv is not here")
    folder = tmp_path / "wheels"
    folder.mkdir()
    made = wheel(folder, "fgpu-tiny")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    return made


def test_environment_has_the_framework_and_the_hubs_server(index: Path, tmp_path: Path) -> None:
    (wheel,) = find_wheels(TINY)
    assert (wheel.name, wheel.size) == (index.name, index.stat().st_size)
    folder, told = tmp_path / "environments/tiny-1-0", list[int]()
    install((wheel,), folder, tell=told.append)
    assert told == [90, 99]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    code = "import fgpu_tiny, jupyterhub, sys; print(fgpu_tiny.version, sys.prefix)"
    said = subprocess.run([folder / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["1.0", str(folder)]
    server = [folder / "bin/jupyterhub-singleuser", "--version"]
    assert subprocess.run(server, capture_output=True, text=True, check=True).stdout[0].isdigit()


def test_changed_wheel_is_refused_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    (wheel,) = find_wheels(TINY)
    with pytest.raises(CannotInstall, match="is not what the package index has promised"):
        install((replace(wheel, sha256="0" * 64),), tmp_path / "environments/tiny", tell=lambda _: None)
    assert [*(tmp_path / "environments").iterdir()] == []


def test_missing_package_is_said_in_one_line(index: Path) -> None:
    with pytest.raises(CannotInstall) as refused:
        find_wheels(replace(TINY, packages=("fgpu-none==1",)))
    assert "fgpu-none" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda one: one.slug)
def test_each_framework_becomes_an_entry_of_the_catalogue(framework: LocalFramework) -> None:
    image = read_entry(framework.entry(Path("/srv/fgpu/environments", framework.slug)))
    assert image.environment.endswith(framework.slug)
    assert image.python == f"{sys.version_info.major}.{sys.version_info.minor}"
