"""Hundreds of containers of sessions that are no more: they go, and neither the Hub's start nor a launch waits for it."""

from __future__ import annotations

import io
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import docker
import pytest

from hubprocess import HubProcess, until

ONE = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
LAUNCHES = 3


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
    """Make containers that carry the marks of sessions that there never were."""
    client = docker.from_env(timeout=120).api

    def make(number: int) -> None:
        session = 1_000_000 + number
        marks = {"installation": installation, "session": session, "attempt": 1, "node": "local"}
        labels = {f"fgpu.{key}": str(value) for key, value in marks.items()}
        client.create_container(image, ["true"], name=f"fgpu-{installation}-{session}-1", labels=labels)

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
    return sum(1 for entry in found if int(entry["Labels"]["fgpu.session"]) >= 1_000_000)


def start_s(hub: HubProcess) -> float:
    """Start the Hub and return how long that took."""
    began = time.monotonic()
    hub.start()
    return time.monotonic() - began


def launch_s(hub: HubProcess, user: str) -> float:
    """Start a session, and return how long that took; end it again."""
    began = time.monotonic()
    assert hub.spawn(user, options=ONE).status_code in (201, 202)
    until(lambda: hub.ready(user), what=f"{user} is ready")
    took = time.monotonic() - began
    assert hub.stop(user).status_code in (202, 204)
    until(lambda: f"{user}/" not in hub.states(), what=f"{user} is gone")
    return took


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["docker"], indirect=True)
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_ghosts_are_removed_and_delay_neither_the_start_of_the_hub_nor_a_launch(
    make_hub: Callable[..., HubProcess], nothing: str, count: int
) -> None:
    hub = make_hub()
    plain_start_s = start_s(hub)
    hub.add_user("alice")
    plain_s = median(launch_s(hub, "alice") for _ in range(LAUNCHES))
    hub.terminate()
    plain_start_s = min(plain_start_s, start_s(hub))
    hub.terminate()

    make_ghosts(hub.store.installation_id, nothing, count)
    began = time.monotonic()
    took_start_s = start_s(hub)
    left_then = ghosts_left(hub.store.installation_id)
    took = []
    while len(took) < LAUNCHES:
        took.append(launch_s(hub, "alice"))
    left = ghosts_left(hub.store.installation_id)
    until(lambda: ghosts_left(hub.store.installation_id) == 0, within_s=600, what="all ghosts are removed")
    gone_s = time.monotonic() - began
    print(
        f"{count} ghosts: gone after {gone_s:.1f} s; the Hub's start {took_start_s:.2f} s (without "
        f"{plain_start_s:.2f} s); launches {median(took):.2f} s (without {plain_s:.2f} s), {left} left after them, "
        f"{left_then} before"
    )
    # Where other programs have the cores, that some are left then tells that nothing waited for them.
    assert left_then or took_start_s < 2 * plain_start_s + 2
    assert left or median(took) < 3 * plain_s + 5
    assert "Removing the ghost" in hub.log_text()
