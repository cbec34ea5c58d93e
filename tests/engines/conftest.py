from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import machines
import pytest
from dockerhub import BASE
from dockerhub import Engine as Docker
from kubeapi import disconnected
from labs import DockerLab, FleetLab, KubeLab, Lab, LocalLab, MachineLab, MemoryLab
from machines import Machine

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker import daemon
from fgpuspawner.engines.docker.daemon import connect_here
from fgpuspawner.engines.docker.images import pulls


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore unclosed sockets in these tests: docker-py leaves cut connections to the garbage collector."""
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


KINDS: dict[str, type[Lab]] = {
    kind.name: kind for kind in (MemoryLab, LocalLab, DockerLab, MachineLab, FleetLab, KubeLab)
}


@pytest.fixture(scope="session")
def docker_here() -> Iterator[Docker]:
    """This machine's Docker engine with the default image. Without one tests are skipped, or fail in CI."""
    reason = f"no Docker engine with the image {BASE} (tests/services.sh, make image)"
    try:
        found = Docker(connect_here({"timeout": 60}))
    except BadSettings:
        pytest.skip(reason)
    with contextlib.closing(found):
        if not found.client.images(BASE):
            pytest.skip(reason)
        yield found


@pytest.fixture(scope="session")
def docker_there(docker_here: Docker) -> Iterator[Machine]:
    """Another machine with the default image."""
    with machines.running(docker_here.client) as made:
        yield made


@pytest.fixture(
    params=[
        pytest.param(
            name,
            marks=[
                *([pytest.mark.xdist_group(name)] if issubclass(kind, DockerLab | KubeLab) else []),
                *([pytest.mark.kubernetes] if issubclass(kind, KubeLab) else []),
                # The fleet covers both: an engine on this machine and one elsewhere.
                *([pytest.mark.slow] if kind in (DockerLab, MachineLab) else []),
            ],
        )
        for name, kind in KINDS.items()
    ]
)
async def lab(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Lab]:
    """Each engine in turn, with shorter timeouts than in production."""
    monkeypatch.setattr(daemon, "CALL_TIMEOUT_S", 10)
    monkeypatch.setattr(pulls, "AGAIN_AFTER_S", (0.1, 0.1))
    kind = KINDS[request.param]
    if issubclass(kind, DockerLab):
        here, there = (request.getfixturevalue(name) for name in ("docker_here", "docker_there"))
        found: Lab = kind(tmp_path, here, there)
    else:
        if issubclass(kind, KubeLab) and "FGPU_TEST_KUBECONFIG" not in os.environ:
            pytest.skip("no cluster (tests/kube)")
        found = kind(tmp_path)
    yield found
    await found.end_all()
    if found.background is not None:
        await found.background.close()
    await asyncio.to_thread(found.close)
    if isinstance(found, KubeLab):
        await disconnected()
    with warnings.catch_warnings():
        # Collect now, so that the warnings do not fail a later test in another folder.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
