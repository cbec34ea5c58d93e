"""The real jupyterhub-singleuser in the default image, through the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from dockerhub import DockerHub, Engine, Running

HALF = {"fgpu": "0.5", "cpu": "1", "memory_mib": 1024}


@pytest.fixture(scope="module")
def real_hub(make_hub: Callable[..., DockerHub]) -> DockerHub:
    """A Hub with the service; its sessions run the image's own command."""
    return make_hub(after="").start()


@pytest.fixture(scope="module")
def alice(real_hub: DockerHub) -> Iterator[Running]:
    yield real_hub.running("alice", **HALF)
    real_hub.end("alice")


def get(hub: DockerHub, running: Running, path: str) -> requests.Response:
    """Ask the server through the proxy, with the user's own token."""
    headers = {"Authorization": f"token {running.token}"}
    return requests.get(f"{hub.url}/user/alice/{path}", headers=headers, timeout=30)


def test_jupyterlab_answers_through_the_proxy(real_hub: DockerHub, alice: Running) -> None:
    status = get(real_hub, alice, "api/status")
    assert status.status_code == 200
    answer: dict[str, Any] = status.json()
    assert answer["kernels"] == 0
    lab = get(real_hub, alice, "lab")
    assert lab.status_code == 200
    assert "jupyter-config-data" in lab.text
    stranger = requests.get(f"{real_hub.url}/user/alice/api/status", timeout=30)
    assert stranger.status_code == 403


def test_the_lab_extension_is_enabled_in_both_halves(engine: Engine, alice: Running) -> None:
    listed = engine.run_in(alice.id, "jupyter", "labextension", "list")[1]
    line = next(line for line in listed.splitlines() if "jupyterlab-fgpu" in line)
    assert "enabled" in line
    assert "OK" in line
    listed = engine.run_in(alice.id, "jupyter", "server", "extension", "list")[1]
    enabled = next(line for line in listed.splitlines() if "jupyterlab_fgpu" in line)
    assert "enabled" in enabled
    validated = next(line for line in listed.splitlines() if "jupyterlab_fgpu 0" in line)
    assert "OK" in validated


def test_the_server_learns_its_slice_from_the_service_with_its_own_token(
    real_hub: DockerHub, alice: Running
) -> None:
    answer = get(real_hub, alice, "fgpu/api/status").json()
    assert (answer["hub"], answer["hub_message"]) == ("ok", None)
    session = answer["session"]
    assert (session["id"], session["state"]) == (alice.session.id, "RUNNING")
    assert (session["fgpu"], session["gpu_memory_mib"], session["compute_percent"]) == ("0.5", 2048, 25)


@pytest.mark.parametrize("slug", ["plain", "plain-tini"])
def test_an_image_without_the_server_environment_ends_the_session_with_words(
    real_hub: DockerHub, slug: str
) -> None:
    # Each image has another user, so that an earlier end is not taken for this one.
    user = f"dave-{slug}"
    real_hub.add_user(user)
    real_hub.spawn(user, options={**HALF, "image": slug})
    ended = real_hub.last(user)
    assert (ended.request.image, ended.state.value) == (slug, "ERROR")
    assert ended.message is not None
    assert ended.message.startswith("this image has no server environment: ")
    assert "fgpu images build" in ended.message
    assert real_hub.states().get(f"{user}/") is None
