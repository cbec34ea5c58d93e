"""What people typically ask for: the data that a score looks ahead with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fgpu_scheduler.core.model import Request


@dataclass(frozen=True, slots=True, order=True)
class TypicalRequest:
    """The amounts of a request, and the GPU model without which it cannot run; "": any will do."""

    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    gpu_model: str = ""


def only_model(gpu_models: tuple[str, ...]) -> str:
    """Return the GPU model without which what is asked for cannot run; "" where another will do."""
    return gpu_models[0] if len(gpu_models) == 1 else ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Shapes and how often each is asked for; the most frequent first, then by amounts.

    Hand in the recent requests of one resource group, or a list that an administrator wrote.
    """

    counts: tuple[tuple[TypicalRequest, int], ...] = ()

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Workload:
        """Return how often each shape occurs in ``requests``, in whatever order they come."""
        shapes = (
            TypicalRequest(r.fgpu_milli, r.cpu_milli, r.memory_mib, only_model(r.gpu_models))
            for r in requests
        )
        return cls.counted(Counter(shapes).items())

    @classmethod
    def counted(cls, counts: Iterable[tuple[TypicalRequest, int]]) -> Workload:
        """Return a workload of these counts; those of 0 and below are left out."""
        kept = ((shape, count) for shape, count in counts if count > 0)
        return cls(tuple(sorted(kept, key=lambda item: (-item[1], item[0]))))

    def popular(self, percent: int) -> tuple[tuple[TypicalRequest, int], ...]:
        """Return the most frequent pairs of fGPU and CPU that together make ``percent`` of all requests.

        Memory and model are left out: they vary more than they matter, and fewer shapes are weighed faster.
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
