"""The GPU drivers of all machines: one child process for each driver, and the sessions of the processes that use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fgpuspawner.isolation import machine
from fgpuspawner.isolation.facts import NVML
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import NvmlReader


class Machines(Protocol):
    """What is used of the engine here. Its methods block."""

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        """Return the session of each process of a node's machine that runs in a session."""

    def gpu_reader(self, node_id: str) -> NvmlReader:
        """Return the reader of the GPUs of a node on another machine."""


@dataclass(frozen=True, slots=True)
class NvmlSource:
    """The NVML library of this machine, of a simulated machine, or of another machine's node."""

    library: str
    node_id: str | None = None
    simulated: bool = False

    def __str__(self) -> str:
        return self.library if self.node_id is None else f"node {self.node_id}"

    @property
    def has_no_driver(self) -> bool:
        """Whether no program can use its GPUs: they are simulated, and the simulated driver is not built."""
        return self.simulated and self.node_id is None and not Path(self.library).exists()


class Drivers:
    """Keeps one child process for each library, shared by all callers. One for the Hub."""

    def __init__(
        self,
        isolation: Isolation,
        machines: Machines,
        *,
        make_reader: Callable[[str], NvmlReader] = NvmlReader,
    ) -> None:
        self._isolation = isolation
        self._machines = machines
        self._make_reader = make_reader
        self._readers: dict[NvmlSource, NvmlReader] = {}

    def sources(self) -> dict[NvmlSource, list[str]]:
        """Return the configured devices by the library that reads them; close readers of removed nodes."""
        found: dict[NvmlSource, list[str]] = {}
        for node in self._isolation.nodes:
            elsewhere = self._isolation.is_elsewhere(node.id)
            for device in node.devices:
                folder = machine.folder_of(self._isolation.host.data, node.id)
                library = str(folder / "libnvidia-ml.so.1") if device.simulated else NVML
                source = NvmlSource(library, node.id if elsewhere else None, device.simulated)
                found.setdefault(source, []).append(device.uuid)
        for source in [source for source in list(self._readers) if source.node_id and source not in found]:
            self._readers.pop(source).close()
        return found

    def reader(self, source: NvmlSource) -> NvmlReader:
        """Return the reader of a library; raises FGPUError if its node is no longer configured."""
        if source not in self._readers:
            self._readers[source] = (
                self._make_reader(source.library)
                if source.node_id is None
                else self._machines.gpu_reader(source.node_id)
            )
        return self._readers[source]

    def owners(self, source: NvmlSource, pids: Sequence[int]) -> Mapping[int, int]:
        """Return the session of each process that runs in a session. Blocks.

        Raises:
            FGPUError: the engine cannot tell.
        """
        return self._machines.sessions_of(pids, source.node_id)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
