"""The Docker engine, and the network that sessions are on."""

from __future__ import annotations

from typing import Any

import docker
from docker.errors import DockerException, NotFound
from docker.utils import kwargs_from_env

from fgpu_scheduler import BadSettings

NETWORK = "fgpu"
NO_TALK = "com.docker.network.bridge.enable_icc"


def connect(client_kwargs: dict[str, Any]) -> docker.APIClient:
    """Return a client of the engine that the environment (DOCKER_HOST) or ``client_kwargs`` name.

    Raises:
        BadSettings: the engine does not answer.
    """
    try:
        return docker.APIClient(
            **{"version": "auto", "timeout": 60, "max_pool_size": 32, **kwargs_from_env(), **client_kwargs}
        )
    except DockerException as e:
        raise BadSettings(
            f"the Docker engine does not answer; is it running, and may the Hub use it? ({e})"
        ) from e


def ensure_network(client: docker.APIClient, name: str = NETWORK) -> str:
    """Make sure of a bridge network on which containers do not reach each other; return the host's address on it.

    Raises:
        BadSettings: the engine refuses, or a network of that name is of another kind.
    """
    try:
        try:
            found = client.inspect_network(name)
        except NotFound:
            client.create_network(name, driver="bridge", options={NO_TALK: "false"}, check_duplicate=True)
            found = client.inspect_network(name)
    except DockerException as e:
        raise BadSettings(f"the Docker network {name!r} cannot be used: {e}") from e
    if found["Driver"] != "bridge" or (found.get("Options") or {}).get(NO_TALK) != "false":
        raise BadSettings(
            f"the Docker network {name!r} exists and lets containers reach each other; remove it "
            f"(docker network rm {name}), and it is made anew"
        )
    for config in found["IPAM"]["Config"]:
        if config.get("Gateway"):
            return str(config["Gateway"]).split("/")[0]
    raise BadSettings(f"the Docker network {name!r} has no gateway address")
