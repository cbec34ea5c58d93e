"""The placement policies that an administrator can choose: each makes a score from the workload and the nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from fgpu_scheduler.core.model import Device, Request, RequestCount, Snapshot
from fgpu_scheduler.core.placement import Score, best_fit
from fgpu_scheduler.core.scores.fgd import fgd
from fgpu_scheduler.core.scores.simple import first_fit, spread
from fgpu_scheduler.core.scores.workload import (
    ClusterTotals,
    DeviceKind,
    TypicalRequest,
    Workload,
    only_model,
)
from fgpu_scheduler.core.scores.worth import worth
from fgpu_scheduler.core.shares import is_explicit, shares_of

#: Makes the score from the workload and the nodes of a resource group.
ScoreFactory = Callable[[Workload, ClusterTotals], Score]

#: The workload counts from this many requests for GPUs on. With fewer, `worth` is best fit: with a guessed workload it
#: refused whole-node jobs for which best fit has room.
LEAST_ASKED = 50


@dataclass(frozen=True, slots=True)
class FixedScore:
    """The placement by one score, whatever the workload."""

    score: Score

    def __call__(self, workload: Workload, cluster: ClusterTotals) -> Score:
        """Return that score."""
        return self.score


def _fgd(workload: Workload, cluster: ClusterTotals) -> Score:
    return fgd(workload)


PLACEMENTS: Mapping[str, ScoreFactory] = {
    "default": worth,
    "first-fit": FixedScore(first_fit),
    "best-fit": FixedScore(best_fit),
    "spread": FixedScore(spread),
    "fgd": _fgd,
}
"""Each placement by its name in a configuration."""


def score_for(
    placing: ScoreFactory, snapshot: Snapshot, resource_group: str, cluster: ClusterTotals | None = None
) -> Score:
    """Return the score of a placement policy in one resource group.

    ``cluster`` are the totals of the group's nodes, if the caller has them already.
    """
    if isinstance(placing, FixedScore):
        return placing.score
    if cluster is None:
        cluster = ClusterTotals.of(node for node in snapshot.nodes if node.resource_group == resource_group)
    asked = tuple(one for one in snapshot.request_counts if one.resource_group == resource_group)
    return _made(placing, asked, cluster)


@lru_cache(maxsize=32)
def _made(placing: ScoreFactory, asked: tuple[RequestCount, ...], cluster: ClusterTotals) -> Score:
    """Return the score, made once for many passes: making it costs more than a pass."""
    return placing(workload_of(asked, cluster), cluster)


def workload_of(asked: Iterable[RequestCount], cluster: ClusterTotals) -> Workload:
    """Return the typical requests on these nodes; none if there were too few requests."""
    known = Workload.counted((_typical(one, cluster), one.count) for one in asked)
    on_devices = sum(count for shape, count in known.counts if shape.fgpu_milli > 0)
    return known if on_devices >= LEAST_ASKED else Workload()


def _typical(one: RequestCount, cluster: ClusterTotals) -> TypicalRequest:
    fgpu_milli = one.fgpu_milli
    if is_explicit(request := _request(one)):
        # Explicit amounts count as the least fGPU that they are worth on any device.
        shares = [shares_of(request, (_device(kind),)) for kind, _ in cluster.kinds]
        fgpu_milli = min((share[0].fgpu_milli for share in shares if share), default=0)
    return TypicalRequest(fgpu_milli, one.cpu_milli, one.memory_mib, only_model(one.gpu_models))


def _request(one: RequestCount) -> Request:
    amounts = one.fgpu_milli, one.cpu_milli, one.memory_mib, one.gpu_memory_mib, one.compute_percent
    return Request("", "", "", one.resource_group, *amounts, one.gpu_models)


def _device(kind: DeviceKind) -> Device:
    return Device("", "", 0, kind.model, kind.memory_mib, kind.capacity_milli)
