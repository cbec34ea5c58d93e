"""How far an image is, on the waiting page and on the sessions page, while it is fetched for two sessions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from dockerhub import DockerHub, Engine, entry
from imageregistry import ImageRegistry, Made, random_layer
from playwright.sync_api import expect

from fgpuspawner.engines.docker.daemon import connect_here
from hubprocess import until
from steps import START_MS, Person, Sessions, start_by

pytestmark = pytest.mark.timeout(600)

WHOLE = {"fgpu": "2", "cpu": "0.2", "memory_mib": 256, "image": "python"}
FETCHING = re.compile(r"etching the image: 0 of 1 layers, \d+ of 61 MiB, about \d+ (s|min) left")


@pytest.fixture
def registry() -> Iterator[ImageRegistry]:
    """A registry that takes five minutes for its image."""
    found = ImageRegistry()
    found.mib_per_s = 0.2
    yield found
    found.close()


@pytest.fixture
def hub(docker_engine: None, registry: ImageRegistry, tmp_path: Path) -> Iterator[DockerHub]:
    """A Hub with one GPU, and an image that has to be fetched."""
    reference = registry.add("fgpu-test/pages", Made((random_layer(60),)))
    catalogue = tmp_path / "catalogue.toml"
    catalogue.write_text(entry("python", reference))
    client: docker.APIClient = connect_here({})
    engine = Engine(client)
    nodes = [{"name": "one", "cpu": 4, "gpus": {"simulated": 1}}]
    found = DockerHub(
        tmp_path, engine, nodes=nodes, groups={}, fgpu_per_gpu=2, catalogue=str(catalogue), after=""
    )
    try:
        yield found.start()
    finally:
        found.close()
        engine.close()


def test_pull_progress_is_shown_until_cancelled(
    hub: DockerHub, registry: ImageRegistry, log_in: Callable[..., Person]
) -> None:
    pat = log_in(hub.url, "pat", "test-password")
    starts = pat.page
    start_by(starts, pat.link(**WHOLE))
    expect(starts.locator("#fgpu-pull")).to_contain_text(FETCHING, timeout=START_MS)
    # What is read aloud stays as it is while the numbers change.
    expect(starts.locator("#progress-message")).to_have_text("Fetching the image (2 fGPU)")
    waits = pat.new_page()
    start_by(waits, pat.link("gpu-2", **WHOLE))
    expect(waits.locator("#fgpu-pull")).to_contain_text(FETCHING, timeout=START_MS)
    expect(waits.locator("#fgpu-title")).to_have_text("Waiting in the queue")

    page = pat.new_page()
    page.goto(f"{hub.url}/services/fgpu/")
    sessions = Sessions(page)
    with sessions.without_reload():
        told = sessions.row("Python 1").locator(".pull")
        expect(told).to_contain_text(FETCHING)
        before = told.inner_text()
        expect(told).not_to_have_text(before, timeout=60_000)
        expect(sessions.row("Python 2").locator(".pull")).to_contain_text(FETCHING)
    page.close()

    starts.get_by_role("button", name="Cancel").click()
    waits.get_by_role("button", name="Cancel").click()
    until(lambda: registry.broken == 1, within_s=150, what="the engine hangs up on the registry")
    until(lambda: hub.states() == {}, within_s=150, what="both are gone")
