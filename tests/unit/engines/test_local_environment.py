"""Whether the environment that local sessions start in is what the image's entry says."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fgpuspawner.engines.local.engine import availability
from fgpuspawner.images.availability import Availability, Where
from fgpuspawner.images.model import Image

OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
SERVER = "jupyterhub-singleuser"


def at(**entry: Any) -> Availability:
    usual = {"framework": "python", "version": "3", "python": OWN, "reference": "r"}
    return availability(Image("x", "X", **{**usual, **entry}), SERVER)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    site = tmp_path / "lib/python3.9/site-packages"
    (site / "torch-2.1.0+cu121.dist-info").mkdir(parents=True)
    (site / "torch-2.1.0+cu121.dist-info/METADATA").write_text("Name: torch\nVersion: 2.1.0+cu121\n")
    server = tmp_path / "bin" / SERVER
    server.parent.mkdir()
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    return tmp_path


def test_image_without_an_environment_must_match_the_hubs_python() -> None:
    assert at() == Availability(Where.HERE)
    assert at(python="3").where is Where.HERE
    assert at(framework="JupyterHub", version=version("jupyterhub")).where is Where.HERE
    own = "its sessions would run in the Hub's own Python environment, which has"
    assert at(python="3.6") == Availability(Where.CANNOT, f"{own} Python {OWN}, not 3.6")
    assert at(framework="MXNet", version="1") == Availability(Where.CANNOT, f"{own} no MXNet")
    assert (
        at(framework="jupyterhub", version="1.5").words
        == f"{own} jupyterhub {version('jupyterhub')}, not 1.5"
    )


def test_named_environment_must_match_its_entry(environment: Path) -> None:
    here, own = str(environment), f"its sessions would run in the Python environment {environment}, which has"
    torch = {"environment": here, "python": "3.9", "framework": "pytorch"}
    assert at(**torch, version="2.1") == Availability(Where.HERE)
    # A wheel's own label is no part of the version, nor are words in the entry.
    assert at(**torch, version="2.1.0").where is Where.HERE
    assert at(**torch, version="2.1 with CUDA").where is Where.HERE
    assert at(**torch, version="2.13").words == f"{own} pytorch 2.1.0+cu121, not 2.13"
    assert at(environment=here).words == f"{own} Python 3.9, not {OWN}"
    # What no package of that name tells, the administrator knows.
    assert at(environment=here, python="3.9", framework="course").where is Where.HERE
    (environment / "bin" / SERVER).unlink()
    assert at(**torch, version="2.1").words == f"{own} no {SERVER}"
