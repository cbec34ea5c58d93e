from __future__ import annotations

import json
from typing import Any

import pytest

from fgpuspawner.engines.docker.handover import Handover, can_take, split

IMAGE = {"Config": {"Labels": {"fgpu.handover": "1"}, "Entrypoint": ["/usr/bin/tini", "--"]}}
MADE: dict[str, Any] = {
    "image": "fgpuspawner/base:0.1",
    "command": ["jupyterhub-singleuser", "--allow-root"],
    "environment": {
        "JUPYTERHUB_API_TOKEN": "canary",
        "JUPYTERHUB_USER": "alice",
        "DATABASE_PASSWORD": "secret",
        "FGPU_AMOUNT": "0.5",
        "LD_LIBRARY_PATH": "/run/fgpu/simulated",
        "LD_PRELOAD": None,
        "PYTHONPATH": "/srv/lab",
    },
}


def test_a_container_is_made_without_command_line_identity_and_secrets() -> None:
    made, handover = split(MADE, public={"FGPU_AMOUNT"})
    assert made == {
        "image": "fgpuspawner/base:0.1",
        "command": ["fgpu-start", "--preload", "--within", "60"],
        "stdin_open": True,
        "environment": {
            "FGPU_AMOUNT": "0.5",
            "LD_LIBRARY_PATH": "/run/fgpu/simulated",
            "LD_PRELOAD": None,
            "PYTHONPATH": "/srv/lab",
        },
    }
    assert json.loads(handover.line()) == {
        "version": 1,
        "argv": ["jupyterhub-singleuser", "--allow-root"],
        "environment": {
            "JUPYTERHUB_API_TOKEN": "canary",
            "JUPYTERHUB_USER": "alice",
            "DATABASE_PASSWORD": "secret",
        },
    }


def test_identity_is_one_line() -> None:
    line = Handover(("a", "b\nc"), {"NAME": "käse\n\r\u2028"}).line()
    assert line.index(b"\n") == len(line) - 1
    assert json.loads(line)["environment"] == {"NAME": "käse\n\r\u2028"}


def test_other_program_waits_without_the_servers_modules() -> None:
    made, handover = split({**MADE, "command": "bash -c 'exec x'"}, public=())
    assert made["command"] == ["fgpu-start", "--within", "60"]
    assert handover.argv == ("bash", "-c", "exec x")


def test_identity_is_not_printed() -> None:
    assert "canary" not in repr(split(MADE, public=())[1])


@pytest.mark.parametrize(
    ("image", "kwargs"),
    [
        ({}, {}),
        ({"Config": {"Labels": None, "Entrypoint": ["tini", "--"]}}, {}),
        ({"Config": {"Labels": {"fgpu.handover": "2"}, "Entrypoint": ["tini", "--"]}}, {}),
        # An image made of one of ours inherits its label.
        (
            {"Config": {**IMAGE["Config"], "Entrypoint": ["/bin/bash", "-c", "exec jupyterhub-singleuser"]}},
            {},
        ),
        ({"Config": {**IMAGE["Config"], "Entrypoint": None}}, {}),
        (IMAGE, {"entrypoint": "/bin/bash"}),
        (IMAGE, {"tty": True}),
        (IMAGE, {"command": None}),
    ],
)
def test_container_that_cannot_wait_gets_its_environment_at_creation(
    image: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    assert can_take(IMAGE, MADE)
    assert not can_take(image, {**MADE, **kwargs})
