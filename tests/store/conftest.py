from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from simulator.memory import MemoryStore
from store_worlds import database, opened

from fgpu_scheduler.store.sessions import SessionStore
from fgpu_scheduler.store.store import Store


@pytest.fixture(params=["sqlite", "memory", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An open store on an empty database."""
    with database(request.param, tmp_path) as url, opened(url) as store:
        yield store


@pytest.fixture(params=["sqlite", "postgresql", "values"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionStore]:
    """An empty store: on a database, or the simulator's store of values in memory."""
    if request.param == "values":
        yield MemoryStore()
    else:
        with database(request.param, tmp_path) as url, opened(url) as store:
            yield store


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database that several stores can share; SQLite in memory cannot be shared."""
    with database(request.param, tmp_path) as url:
        yield url
