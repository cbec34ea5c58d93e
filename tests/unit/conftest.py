"""What unit tests of several folders share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fgpu_scheduler import Store
from fgpuspawner.isolation import facts, native
from fgpuspawner.isolation.native import Native


@pytest.fixture(autouse=True)
def fgpu_log() -> None:
    """Have `caplog` see the Hub's log, also after a Hub was started in this process."""
    logging.getLogger("fgpu").propagate = True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(f"sqlite:///{tmp_path / 'fgpu.sqlite'}")
    found.open()
    yield found
    found.close()


@pytest.fixture
def native_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Files in the places of the built parts, and a driver that nothing asks."""
    monkeypatch.setattr(native, "FOLDER", tmp_path / "native")
    found = Native(tmp_path / "native")
    for part in found.parts:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(part.name)
        part.chmod(0o755)
    monkeypatch.setattr(facts, "driver_facts", lambda: {"driver": "580.65", "memory_limits": False})
    return found
