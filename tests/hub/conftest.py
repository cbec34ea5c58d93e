from __future__ import annotations

import os
import resource
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from inside import Inside

from hubprocess import MINI, WITHOUT_SERVICE, HubProcess, running


@pytest.fixture
def make_hub(tmp_path: Path) -> Iterator[Callable[..., HubProcess]]:
    """A factory of Hubs that are ended after the test. Sessions run the miniserver unless ``mini`` is false."""
    hubs: list[HubProcess] = []

    def make(*, mini: bool = True, service: bool = True, after: str = "", **kwargs: Any) -> HubProcess:
        after = (MINI if mini else "") + after + ("" if service else WITHOUT_SERVICE)
        hub = HubProcess(tmp_path / f"hub{len(hubs)}", after=after, **kwargs)
        hubs.append(hub)
        return hub

    yield make
    for hub in hubs:
        hub.close()


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """One Hub for all the tests of a module that only read, or clean up after themselves."""
    with running(tmp_path_factory.mktemp("hub"), after=MINI + WITHOUT_SERVICE) as hub:
        yield hub


@pytest.fixture
def free_hub(shared_hub: HubProcess) -> Iterator[HubProcess]:
    """The module's Hub. What a test leaves on it ends with the test."""
    yield shared_hub
    shared_hub.end_all()


@pytest.fixture
def inside() -> Iterator[Inside]:
    """Runs programs in sessions, and ends them with the test."""
    found = Inside()
    yield found
    found.close()


@pytest.fixture
def postgresql() -> Iterator[str]:
    """A database of its own on the server that FGPU_TEST_POSTGRES_URL names."""
    url = os.environ.get("FGPU_TEST_POSTGRES_URL")
    if not url:
        reason = "FGPU_TEST_POSTGRES_URL is not set (tests/services.sh starts a server)"
        pytest.skip(reason)
    name = f"fgpu_hub_{uuid.uuid4().hex[:12]}"
    server = url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield url.rsplit("/", 1)[0] + f"/{name}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open as many connections as it takes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
