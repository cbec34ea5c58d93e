from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import machines
import pytest
from machines import Machine

from hubprocess import HubProcess
from leftovers import remove_leftovers
from servers import MINI, QUICK, server_lines


def engine_answers() -> bool:
    """Return whether a Docker engine can be used, with the image of these tests."""
    found = subprocess.run(
        ["docker", "image", "inspect", "fgpuspawner/base:0.1"], capture_output=True, check=False
    )
    return found.returncode == 0


@pytest.fixture(
    params=[
        "local",
        "docker",
        pytest.param("machines", marks=[pytest.mark.slow, pytest.mark.xdist_group("machines")]),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of sessions: processes, containers, or containers on two machines with an engine each."""
    if request.param != "local" and not engine_answers():
        reason = "no Docker engine with the image fgpuspawner/base:0.1 (tests/services.sh, make image)"
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """Another machine, with the default image."""
    with contextlib.closing(docker.from_env().api) as engine, machines.running(engine) as made:
        yield made


@pytest.fixture
def make_hub(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> Iterator[Callable[..., HubProcess]]:
    """A factory of Hubs with two GPUs and sessions of the test's kind; all that they made is gone afterwards.

    The sessions' server is ``server``, which starts fast; None: the real one.
    """
    hubs: list[HubProcess] = []

    def make(*, after: str = "", server: Path | None = MINI, **kwargs: Any) -> HubProcess:
        own = QUICK + (server_lines(kind, server) if server is not None else "")
        there = request.getfixturevalue("machine") if kind == "machines" else None
        gpus = {"simulated_gpus": "2"} if there is None else on_two(there)
        runtime = "local" if kind == "local" else "docker"
        hub = HubProcess(
            tmp_path / f"hub{len(hubs)}", runtime=runtime, after=own + after, **{**gpus, **kwargs}
        )
        if there is not None:
            hub.docker_hosts = ("", there.socket)
        hubs.append(hub)
        return hub

    yield make
    for hub in hubs:
        installation = hub.store.installation_id if hub.process is not None else None
        hub.close()
        if kind != "local" and installation:
            remove_leftovers(installation, hub.docker_hosts)


def on_two(there: Machine) -> dict[str, Any]:
    """Return the settings of a Hub with a GPU here and a GPU on another machine."""
    elsewhere = {"name": "there", "gpus": {"simulated": 1}, "engine": there.url, "tls": False}
    return {
        "nodes": [{"name": "here", "cpu": 16, "gpus": {"simulated": 1}}, elsewhere],
        "fgpu_per_gpu": 2,
        "hub_address": there.hub_address,
    }
