"""Hundreds of containers of a session that has ended: they go, and neither the Hub's start nor a launch waits for it."""

from __future__ import annotations

import io
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import docker
import pytest

from hubprocess import HubProcess, until

ONE = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
LAUNCHES = 3
ENDED = 1
"""The id of the first session of a Hub."""
STUBBORN = 8
"""More than are removed at a time."""


@pytest.fixture
def nothing() -> Iterator[str]:
    """An image with nothing in it: its containers can be made, and not started."""
    client = docker.from_env(timeout=120)
    reference = f"fgpu-test-{secrets.token_hex(4)}/nothing:1"
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    client.api.import_image_from_data(empty.getvalue(), repository=reference.split(":")[0], tag="1")
    yield reference
    client.images.remove(reference, force=True)
    client.close()


def make_ghosts(installation: str, image: str, count: int) -> None:
    """Make containers that carry the marks of a session that has ended, each of another attempt."""
    client = docker.from_env(timeout=120).api

    def make(number: int) -> None:
        attempt = 1_000_000 + number
        marks = {"installation": installation, "session": ENDED, "attempt": attempt, "node": "local"}
        labels = {f"fgpu.{key}": str(value) for key, value in marks.items()}
        client.create_container(image, ["true"], name=f"fgpu-{installation}-{ENDED}-{attempt}", labels=labels)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, range(count)))
    client.close()


def ghosts_left(installation: str) -> int:
    """Return how many of them there are."""
    client = docker.from_env(timeout=120).api
    try:
        found = client.containers(all=True, filters={"label": f"fgpu.installation={installation}"})
    finally:
        client.close()
    return sum(1 for entry in found if int(entry["Labels"]["fgpu.attempt"]) >= 1_000_000)


def make_stubborn(installation: str, count: int) -> list[str]:
    """Start containers of such attempts that take no SIGTERM, and return their names."""
    client = docker.from_env(timeout=120).api
    names = []
    for attempt in range(2_000_000, 2_000_000 + count):
        marks = {"installation": installation, "session": ENDED, "attempt": attempt, "node": "local"}
        names.append(f"fgpu-{installation}-{ENDED}-{attempt}")
        client.create_container(
            "fgpuspawner/base:0.1",
            entrypoint=["sleep", "infinity"],
            name=names[-1],
            labels={f"fgpu.{key}": str(value) for key, value in marks.items()},
            host_config=client.create_host_config(network_mode="none"),
        )
        client.start(names[-1])
    client.close()
    return names


def launch(hub: HubProcess, user: str) -> None:
    """Start a session, and end it again."""
    assert hub.spawn(user, options=ONE).status_code in (201, 202)
    until(lambda: hub.ready(user), what=f"{user} is ready")
    assert hub.stop(user).status_code in (202, 204)
    until(lambda: f"{user}/" not in hub.states(), what=f"{user} is gone")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["docker"], indirect=True)
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_ghosts_are_removed_and_delay_neither_the_start_of_the_hub_nor_a_launch(
    make_hub: Callable[..., HubProcess], nothing: str, count: int
) -> None:
    # A ghost that ignores SIGTERM takes longer than this test: a caller that waited for it would be noticed.
    hub = make_hub(after="c.FGPUSpawner.stop_timeout_s = 800\n")
    hub.start()
    hub.add_user("alice")
    launch(hub, "alice")
    hub.terminate()

    make_ghosts(hub.store.installation_id, nothing, count)
    stubborn = make_stubborn(hub.store.installation_id, STUBBORN)
    began = time.monotonic()
    hub.start()
    started_s = time.monotonic() - began
    for _ in range(LAUNCHES):
        launch(hub, "alice")
    print(
        f"{count} ghosts: the Hub's start {started_s:.2f} s, with launches {time.monotonic() - began:.2f} s"
    )
    assert ghosts_left(hub.store.installation_id) >= STUBBORN
    until(lambda: "Removing the ghost" in hub.log_text(), what="they are being removed")

    client = docker.from_env(timeout=120).api
    for name in stubborn:
        client.kill(name)
    client.close()
    until(lambda: ghosts_left(hub.store.installation_id) == 0, within_s=600, what="all ghosts are removed")
