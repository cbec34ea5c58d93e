from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hubprocess import HubProcess
from servers import MINI, QUICK, server_lines


def engine_answers() -> bool:
    """Return whether a Docker engine can be used, with the image of these tests."""
    found = subprocess.run(
        ["docker", "image", "inspect", "fgpuspawner/base:0.1"], capture_output=True, check=False
    )
    return found.returncode == 0


@pytest.fixture(params=["local", "docker"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of sessions: processes, or containers."""
    if request.param == "docker" and not engine_answers():
        reason = "no Docker engine with the image fgpuspawner/base:0.1 (tests/services.sh, make image)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def make_hub(tmp_path: Path, kind: str) -> Iterator[Callable[..., HubProcess]]:
    """A factory of Hubs with sessions of the test's kind; all that they made is gone afterwards.

    The sessions' server is ``server``, which starts fast; None: the real one.
    """
    hubs: list[HubProcess] = []

    def make(*, after: str = "", server: Path | None = MINI, **kwargs: Any) -> HubProcess:
        own = QUICK + (server_lines(kind, server) if server is not None else "")
        hub = HubProcess(tmp_path / f"hub{len(hubs)}", runtime=kind, after=own + after, **kwargs)
        hubs.append(hub)
        return hub

    yield make
    for hub in hubs:
        installation = hub.store.installation_id if hub.process is not None else None
        hub.close()
        if kind == "docker" and installation:
            label = f"label=fgpu.installation={installation}"
            ids = subprocess.run(
                ["docker", "ps", "-aq", "--filter", label], capture_output=True, text=True, check=True
            ).stdout.split()
            if ids:
                subprocess.run(["docker", "rm", "-f", *ids], capture_output=True, check=True)
