"""The anonymous volumes that images ask for with ``VOLUME``: each container has its own.

They are removed with their container. Those that a Hub or an engine left behind when it died are found by their label.
Volumes without our label stay.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Collection, Mapping
from typing import Any

from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.errors import FAILED
from fgpuspawner.engines.docker.fleet import Fleet

log = logging.getLogger("fgpu.docker")

LABEL = "fgpu.unnamed"
EVERY_S = 600.0


def unnamed_volumes(
    config: Mapping[str, Any], taken: Collection[str], installation: str
) -> list[dict[str, Any]]:
    """Return mounts for the volumes in an image's configuration, except where something is mounted. Pure."""
    used = {posixpath.normpath(path) for path in taken}
    return [
        {"Type": "volume", "Target": path, "VolumeOptions": {"Labels": {LABEL: installation}}}
        for path in sorted(config.get("Volumes") or {})
        if posixpath.normpath(path) not in used
    ]


class VolumeSweep:
    """Removes anonymous volumes that our containers have left."""

    def __init__(self, fleet: Fleet, installation: str) -> None:
        self._fleet = fleet
        self._installation = installation
        self._before: dict[Daemon, frozenset[str]] = {}

    async def sweep(self) -> None:
        """Remove volumes that were unused in the last sweep too: a container in creation has its volumes first."""
        for daemon in self._fleet.answering:
            try:
                await daemon.containers.call(self._sweep, daemon)
            except FAILED as e:
                log.warning("Volumes that nobody uses are not removed from %s: %s", daemon.address, e)

    def _sweep(self, daemon: Daemon) -> None:
        filters = {"label": f"{LABEL}={self._installation}", "dangling": True}
        unused = frozenset(v["Name"] for v in daemon.client.volumes(filters=filters)["Volumes"] or ())
        left = unused & self._before.get(daemon, frozenset())
        for name in sorted(left):
            daemon.client.remove_volume(name)
        if left:
            log.info("Removed %d volumes that ended sessions had left on %s", len(left), daemon.address)
        self._before[daemon] = unused - left
