"""Problems on the nodes' engines for ``fgpu check``.

Sessions of other installations, for example after a change of ``db_url``, and a clock that differs from the Hub's. Both
raise `EngineSilent` if the engine does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import docker

from fgpuspawner.engines import marks
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.docker.address import Address, addresses
from fgpuspawner.engines.docker.containers import LABEL
from fgpuspawner.engines.docker.daemon import LOOK_TIMEOUT_S, Daemon
from fgpuspawner.engines.docker.errors import FAILED, rows
from fgpuspawner.settings import FGPU

MOST_APART_S = 5
"""Synchronised clocks are milliseconds apart."""


def sessions_of_others(client: docker.APIClient, address: Address, installation: str) -> list[str]:
    """Return a line for each other installation with sessions on an engine. Blocks."""
    try:
        listed = rows(client.containers(filters={"label": f"{LABEL}.session"}))
    except FAILED as e:
        raise EngineSilent(str(e)) from e
    found = marks.of_others(
        (
            (
                (entry.get("Names") or ["/"])[0].removeprefix("/"),
                (entry.get("Labels") or {}).get(f"{LABEL}.installation", ""),
            )
            for entry in listed
        ),
        installation,
    )
    return [
        f"Sessions of another installation, {other}, run on {address} ({count}): what they hold is not counted here. "
        "If they are this Hub's, of another database: set c.FGPU.db_url back to go on with them; else end them: "
        f"docker rm -f $(docker ps -q --filter label={LABEL}.installation={other})"
        for other, count in found.items()
    ]


def wrong_time(client: docker.APIClient, address: Address) -> list[str]:
    """Return a line if an engine's clock differs from this machine's. Blocks."""
    before = datetime.now(UTC)
    try:
        said = str(client.info().get("SystemTime", ""))
    except FAILED as e:
        raise EngineSilent(str(e)) from e
    after = datetime.now(UTC)
    try:
        there = datetime.fromisoformat(said)
        ahead_s = max((there - after).total_seconds(), 0) or min((there - before).total_seconds(), 0)
    except (ValueError, TypeError):
        return [f"the time of {address} is not known: it says {said[:40]!r}"]
    if abs(ahead_s) <= MOST_APART_S:
        return []
    which = "ahead of" if ahead_s > 0 else "behind"
    return [
        f"the clock of {address} is {abs(ahead_s):.0f} s {which} the Hub's: logs and ages of files do not fit "
        "together; install chrony on both machines, and look again: timedatectl"
    ]


def on_engines(settings: FGPU, client_kwargs: Mapping[str, Any], installation: str) -> Sequence[str]:
    """Return the problems on each engine of the configured nodes. Blocks."""
    found: list[str] = []
    for address in addresses(settings.nodes):
        daemon = Daemon(address, installation=installation, client_kwargs=client_kwargs)
        try:
            with closing(daemon.another_client(timeout_s=LOOK_TIMEOUT_S)) as client:
                found += sessions_of_others(client, address, installation)
                found += wrong_time(client, address) if address.is_elsewhere else []
        except EngineSilent:
            found.append(
                f"FAIL: {address} does not answer: no session can start there; is c.FGPU.nodes right?"
            )
        finally:
            daemon.close()
    return found
