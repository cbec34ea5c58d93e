"""What a score knows about the future: the typical requests, and the nodes of the resource group added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fgpu_scheduler.core import shares
from fgpu_scheduler.core.model import Device, Node, Request, RequestCount

#: The workload counts from this many requests for GPUs on. With fewer, `worth` is best fit: with a guessed workload it
#: refused whole-node jobs for which best fit has room.
LEAST_ASKED = 50


@dataclass(frozen=True, slots=True, order=True)
class TypicalRequest:
    """The amounts of a request, and the only GPU model that it accepts; "" if it accepts several."""

    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    gpu_model: str = ""


def only_model(gpu_models: tuple[str, ...]) -> str:
    """Return the only GPU model that a request accepts, or "" if it accepts several."""
    return gpu_models[0] if len(gpu_models) == 1 else ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Typical requests of one resource group and their counts; the most frequent first, then by amounts."""

    counts: tuple[tuple[TypicalRequest, int], ...] = ()

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Workload:
        """Count each typical request in ``requests``, whatever their order."""
        shapes = (
            TypicalRequest(r.fgpu_milli, r.cpu_milli, r.memory_mib, only_model(r.gpu_models))
            for r in requests
        )
        return cls.counted(Counter(shapes).items())

    @classmethod
    def counted(cls, counts: Iterable[tuple[TypicalRequest, int]]) -> Workload:
        """Return a workload of these counts; counts of 0 and below are left out."""
        kept = ((shape, count) for shape, count in counts if count > 0)
        return cls(tuple(sorted(kept, key=lambda item: (-item[1], item[0]))))

    def popular(self, percent: int) -> tuple[tuple[TypicalRequest, int], ...]:
        """Return the most frequent pairs of fGPU and CPU that together make ``percent`` of all requests.

        Memory and model are left out: they vary more than they matter, and fewer shapes are scored faster.
        """
        merged: Counter[TypicalRequest] = Counter()
        for shape, count in self.counts:
            merged[TypicalRequest(shape.fgpu_milli, shape.cpu_milli, 0)] += count
        kept, covered = [], 0
        for shape, count in Workload.counted(merged.items()).counts:
            if 100 * covered >= percent * merged.total():
                break
            kept.append((shape, count))
            covered += count
        return tuple(kept)


class DeviceKind(NamedTuple):
    """What a request can ask for of a device."""

    capacity_milli: int
    memory_mib: int
    model: str


class NodeKind(NamedTuple):
    """The amounts of an empty node."""

    capacity_milli: int
    cpu_milli: int
    memory_mib: int


class ClusterTotals(NamedTuple):
    """The nodes of one resource group, added up."""

    nodes: int
    #: Each kind of device and how many there are, by kind.
    kinds: tuple[tuple[DeviceKind, int], ...]
    cpu_milli: int
    memory_mib: int
    #: Each kind of node and how many there are, by kind.
    hosts: tuple[tuple[NodeKind, int], ...]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> ClusterTotals:
        """Add up nodes, whatever their state: cordoned and lost nodes come back."""
        found = tuple(nodes)
        kinds = Counter(DeviceKind(d.capacity_milli, d.memory_mib, d.model) for n in found for d in n.devices)
        hosts = Counter(
            NodeKind(sum(d.capacity_milli for d in n.devices), n.cpu_milli, n.memory_mib) for n in found
        )
        cpu_milli, memory_mib = sum(n.cpu_milli for n in found), sum(n.memory_mib for n in found)
        kept = tuple(sorted(kinds.items())), cpu_milli, memory_mib, tuple(sorted(hosts.items()))
        return cls(len(found), *kept)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return sum(count for _, count in self.kinds)

    @property
    def capacity_milli(self) -> int:
        """The fGPU x 1000 of all devices."""
        return sum(kind.capacity_milli * count for kind, count in self.kinds)


def workload_of(asked: Iterable[RequestCount], cluster: ClusterTotals) -> Workload:
    """Return the typical requests on these nodes; none if there were too few requests."""
    known = Workload.counted((_typical(one, cluster), one.count) for one in asked)
    on_devices = sum(count for shape, count in known.counts if shape.fgpu_milli > 0)
    return known if on_devices >= LEAST_ASKED else Workload()


def _typical(one: RequestCount, cluster: ClusterTotals) -> TypicalRequest:
    fgpu_milli, request = one.fgpu_milli, shares.shape(one)
    if shares.is_explicit(request):
        # Explicit amounts count as the least fGPU that they are worth on any device.
        devices = (
            Device("", "", 0, kind.model, kind.memory_mib, kind.capacity_milli) for kind, _ in cluster.kinds
        )
        worth = [own[0].fgpu_milli for d in devices if (own := shares.shares_of(request, (d,)))]
        fgpu_milli = min(worth, default=0)
    return TypicalRequest(fgpu_milli, one.cpu_milli, one.memory_mib, only_model(one.gpu_models))
