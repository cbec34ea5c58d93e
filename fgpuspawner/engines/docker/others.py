"""Sessions of other installations on our engines, as after a change of ``db_url``: nobody here counts what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import docker

from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.docker.address import Address, addresses
from fgpuspawner.engines.docker.containers import LABEL
from fgpuspawner.engines.docker.daemon import LOOK_TIMEOUT_S, Daemon
from fgpuspawner.engines.docker.errors import FAILED, rows
from fgpuspawner.engines.marks import session_and_attempt
from fgpuspawner.settings import FGPU


def sessions_of_others(client: docker.APIClient, address: Address, installation: str) -> list[str]:
    """Return a line for each other installation whose sessions run on an engine. Blocks.

    Raises:
        EngineSilent: the engine does not answer.
    """
    try:
        listed = rows(client.containers(filters={"label": f"{LABEL}.session"}))
    except FAILED as e:
        raise EngineSilent(str(e)) from e
    found: Counter[str] = Counter()
    for entry in listed:
        name = (entry.get("Names") or ["/"])[0].removeprefix("/")
        other = (entry.get("Labels") or {}).get(f"{LABEL}.installation", "")
        # Labels alone can be forged by an image.
        if other != installation and session_and_attempt(name, other) is not None:
            found[other] += 1
    return [
        f"Sessions of another installation, {other}, run on {address} ({count}): what they hold is not counted here. "
        "If they are this Hub's, of another database: use `fgpu move` to go on with them; else end them: "
        f"docker rm -f $(docker ps -q --filter label={LABEL}.installation={other})"
        for other, count in found.items()
    ]


def on_engines(settings: FGPU, client_kwargs: Mapping[str, Any], installation: str) -> Sequence[str]:
    """Return for ``fgpu check`` what `sessions_of_others` finds on each engine of the configured nodes. Blocks."""
    found: list[str] = []
    for address in addresses(settings.nodes):
        daemon = Daemon(address, installation=installation, client_kwargs=client_kwargs)
        try:
            with closing(daemon.another_client(timeout_s=LOOK_TIMEOUT_S)) as client:
                found += sessions_of_others(client, address, installation)
        except EngineSilent:
            found.append(f"whose sessions run on {address} is not known, as it does not answer")
        finally:
            daemon.close()
    return found
