"""The Docker network on which sessions reach the Hub at its gateway; on other machines the sessions' first network."""

from __future__ import annotations

import docker
from docker.errors import APIError, NotFound

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker.errors import FAILED

NETWORK = "fgpu"
ENABLE_ICC = "com.docker.network.bridge.enable_icc"


def ensure_network(client: docker.APIClient, name: str = NETWORK) -> str:
    """Ensure a bridge network without traffic between containers; return the host's address on it.

    Raises:
        BadSettings: the engine refuses, or a network of that name is of another kind.
    """
    try:
        try:
            found = client.inspect_network(name)
        except NotFound:
            try:
                client.create_network(
                    name, driver="bridge", options={ENABLE_ICC: "false"}, check_duplicate=True
                )
            except APIError as e:
                # Another Hub on this engine may have created it just now.
                if e.status_code != 409:
                    raise
            found = client.inspect_network(name)
    except FAILED as e:
        raise BadSettings(f"the Docker network {name!r} cannot be used: {e}") from e
    if found["Driver"] != "bridge" or (found.get("Options") or {}).get(ENABLE_ICC) != "false":
        raise BadSettings(
            f"the Docker network {name!r} exists and lets containers reach each other; remove it "
            f"(docker network rm {name}), and it is made again"
        )
    for config in found["IPAM"]["Config"]:
        if config.get("Gateway"):
            return str(config["Gateway"]).split("/")[0]
    raise BadSettings(f"the Docker network {name!r} has no gateway address")
