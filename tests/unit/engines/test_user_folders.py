"""Every user has their own folder or volume, with a name that a file system takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from traitlets.config import Config

from fgpuspawner.engines.docker.spawner import FGPUSpawner
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.settings import FGPU

LONGEST_NAME = 255
"""Bytes that Linux's file systems take."""
WEI = "\N{CJK UNIFIED IDEOGRAPH-4E00}"
NAMES = ("ann", "a.b", WEI, WEI * 30, WEI * 29 + "x", WEI * 85, "-e4-b8-80" * 30, "%E4%B8%80" * 30)


def volume(user: str) -> str:
    spawner = FGPUSpawner(
        config=Config({"DockerSpawner": {"volumes": {"fgpu-home-{username}": "/home/jovyan"}}})
    )
    spawner.user = SimpleNamespace(name=user, url="/", escaped_name=user)
    return next(iter(spawner.volume_binds))


def home(user: str, monkeypatch: pytest.MonkeyPatch, data: Path) -> str:
    spawner = LocalFGPUSpawner()
    spawner.user = SimpleNamespace(name=user, url="/", escaped_name=user)
    settings = FGPU.from_config(Config({"FGPU": {"data_dir": str(data)}}))
    monkeypatch.setattr(LocalFGPUSpawner, "runtime", SimpleNamespace(settings=settings))
    assert spawner.home.parent == data / "home"
    return spawner.home.name


def test_long_foreign_name_is_one_separate_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (
        {user: volume(user) for user in NAMES},
        {user: home(user, monkeypatch, tmp_path) for user in NAMES},
    ):
        assert len(set(names.values())) == len(NAMES)
        assert max(map(len, names.values())) <= LONGEST_NAME
    assert (volume("ann"), home("ann", monkeypatch, tmp_path)) == ("fgpu-home-ann", "ann")
    # No other user's name is written like one that was cut.
    assert volume(WEI * 30).count("--") == 2
    assert home(WEI * 30, monkeypatch, tmp_path).count(".") == 1
