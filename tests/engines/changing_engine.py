"""An engine for a cluster that changes while a Hub runs. Sessions are threads; a test writes the cluster into a file.

``cluster.json`` in the data folder has ``nodes``, by name, with what differs from 8 CPU, 8 GiB and one simulated GPU, and
``refuses``, by node, with the reason why the cluster binds nothing to it. Without the file the cluster does not answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memory_engine import MemoryEngine, MemorySpawner

from fgpu_scheduler import Seen, SimulatedProbe
from fgpuspawner.engines.base import (
    Endpoint,
    Engine,
    EngineSilent,
    HubSide,
    Installation,
    LaunchSpec,
    NotBound,
)
from fgpuspawner.settings.nodes import MachineFacts

FILE = "cluster.json"
LOOK_EVERY_S = 0.2


class ChangingEngine(MemoryEngine):
    capabilities = replace(MemoryEngine.capabilities, machines=True, finds_nodes=True)

    def __init__(self, installation: Installation) -> None:
        super().__init__(installation)
        self._file = installation.settings.data_path() / FILE
        self._text = ""

    def open(self, hub: HubSide) -> None:

        async def look() -> None:
            text, self._text = self._text, self._file.read_text()
            if text != self._text:
                hub.nodes_changed()

        hub.background.every(LOOK_EVERY_S, look, failed="The cluster cannot be watched")

    def survey(self) -> Mapping[str, MachineFacts | None]:
        return {name: _machine(name, **said) for name, said in self._read()["nodes"].items()}

    async def observe(self) -> Seen:
        return (await super().observe())._replace(nodes=list(self._read()["nodes"]))

    async def start(self, spec: LaunchSpec) -> Endpoint:
        """Start a session unless the file says that its node refuses it."""
        assert spec.session.placement is not None
        words = self._read().get("refuses", {}).get(spec.session.placement.node_id)
        if words is not None:
            raise NotBound(words)
        return await super().start(spec)

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._file.read_text()))
        except OSError as e:
            raise EngineSilent("the cluster does not answer") from e


def _machine(
    name: str, *, gpus: int = 1, cpu: int = 8, group: str | None = None, closed: bool = False
) -> MachineFacts:
    devices = SimulatedProbe(gpus, 8192, name).devices()
    return MachineFacts(1000 * cpu, 8192, devices, group=group, closed=closed)


def write(data: Path, nodes: Mapping[str, Mapping[str, object]], **more: object) -> None:
    """Write the cluster file."""
    data.mkdir(parents=True, exist_ok=True)
    beside = data / f"{FILE}.new"
    beside.write_text(json.dumps({"nodes": nodes, **more}))
    beside.rename(data / FILE)


class ChangingSpawner(MemorySpawner):
    capabilities = ChangingEngine.capabilities

    @classmethod
    def make_engine(cls, installation: Installation) -> Engine:
        return ChangingEngine(installation)
