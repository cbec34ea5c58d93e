from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_worlds import database, opened

from fgpu_scheduler.store.store import Store


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An open store on an empty database; the simulations hold that SQLite in memory does the same."""
    with database(request.param, tmp_path) as url, opened(url) as store:
        yield store


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database that several stores can share; SQLite in memory cannot be shared."""
    with database(request.param, tmp_path) as url:
        yield url
