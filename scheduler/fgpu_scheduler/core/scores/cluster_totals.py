"""What a score needs to know of the nodes that it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from fgpu_scheduler.core.model import Node


class DeviceKind(NamedTuple):
    """Devices that differ in nothing that a request can ask for."""

    capacity_milli: int
    memory_mib: int
    model: str


class NodeKind(NamedTuple):
    """Nodes of which, empty, a request could take as much."""

    capacity_milli: int
    cpu_milli: int
    memory_mib: int


class ClusterTotals(NamedTuple):
    """The nodes of one resource group, added up."""

    nodes: int
    kinds: tuple[tuple[DeviceKind, int], ...]
    """Each kind of device and how many there are, by kind."""
    cpu_milli: int
    memory_mib: int
    hosts: tuple[tuple[NodeKind, int], ...]
    """Each kind of node and how many there are, by kind."""

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> ClusterTotals:
        """Add up nodes, whatever their state: what is cordoned or away comes back."""
        found = tuple(nodes)
        kinds = Counter(DeviceKind(d.capacity_milli, d.memory_mib, d.model) for n in found for d in n.devices)
        cpu_milli, memory_mib = sum(n.cpu_milli for n in found), sum(n.memory_mib for n in found)
        hosts = Counter(
            NodeKind(sum(d.capacity_milli for d in n.devices), n.cpu_milli, n.memory_mib) for n in found
        )
        kept = tuple(sorted(kinds.items())), cpu_milli, memory_mib, tuple(sorted(hosts.items()))
        return cls(len(found), *kept)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return sum(count for _, count in self.kinds)

    @property
    def capacity_milli(self) -> int:
        """What they are worth together."""
        return sum(kind.capacity_milli * count for kind, count in self.kinds)
