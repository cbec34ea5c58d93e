"""What a request would get that is not submitted yet, and what would start now or sooner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.admission import MIN_CPU_MILLI, MIN_MEMORY_MIB, Caps, amounts_that_fit
from fgpu_scheduler.core.forecast import STARTS_NOW, forecast
from fgpu_scheduler.core.hindsight import Experience
from fgpu_scheduler.core.model import Request, Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.planner import applied, plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.scores.chosen import score_for
from fgpu_scheduler.core.starts import BASIS_NOW, Ahead, expected_starts
from fgpu_scheduler.core.units import MEMORY_GRAIN_MIB

Beside = Callable[[int], tuple[int, int]]
"""Of an amount of fGPU x 1000: the CPU x 1000 and the memory in MiB that go with it."""

CPU_GRAIN_MILLI = 100
"""Other amounts of CPU are offered in tenths of a core."""
SIDE_BY_SIDE = 8
MOST_OFFERS = 8
"""Bound of the other amounts of CPU and memory that are planned for one forecast."""


@dataclass(frozen=True, slots=True)
class RequestForecast:
    """What would become of ``count`` sessions submitted now, and what would start now or sooner.

    ``largest_now_milli`` is the largest amount with which all would start at once. Where there is none, ``soonest_milli``
    is the amount with which all have started soonest, at ``soonest_at_s``, if that is sooner than with what was asked
    for. ``beside_now`` is the most CPU, in thousandths of a core, and memory in MiB beside the same GPU with which all
    would start at once, where only these are short. ``reason`` and ``ahead`` are those of the first that waits.
    """

    startable_now: int
    position: int | None
    expected_start_at_s: int | None
    basis: str
    text: str
    largest_now_milli: int | None
    reason: WaitReason | None = None
    ahead: Ahead | None = None
    early_at_s: int | None = None
    late_at_s: int | None = None
    soonest_milli: int | None = None
    soonest_at_s: int | None = None
    beside_now: tuple[int, int] | None = None


def forecast_request(
    request: Request,
    count: int,
    snapshot: Snapshot,
    policy: Policy,
    caps: Caps,
    experience: Experience,
) -> RequestForecast:
    """Forecast a request that is not submitted yet, by submitting it to a copy of the world.

    ``position`` and the expected start are those of the last of the sessions, when all have started.
    """
    submitted, ids = _submitted(snapshot, request, count)
    found = {f.session_id: f for f in forecast(submitted, policy, experience, ids)}
    own = [found[i] for i in ids]
    waiting = [f for f in own if f.basis != BASIS_NOW]
    largest = largest_now_milli(request, snapshot, policy, caps, count=count)
    if not waiting:
        return RequestForecast(count, None, snapshot.now_s, BASIS_NOW, STARTS_NOW, largest)
    first = min(waiting, key=lambda f: f.position)
    last = max(waiting, key=lambda f: f.position)
    told = RequestForecast(
        startable_now=count - len(waiting),
        position=last.position,
        expected_start_at_s=last.expected_start_at_s,
        basis=last.basis,
        text=first.text,
        largest_now_milli=largest,
        reason=first.reason,
        ahead=first.ahead,
        early_at_s=last.early_at_s,
        late_at_s=last.late_at_s,
        beside_now=_beside_now(request, count, snapshot, policy),
    )
    if largest is not None:
        return told
    sooner = _soonest(request, count, snapshot, policy, caps, experience)
    start = last.expected_start_at_s
    if sooner is None or (start is not None and sooner[1] >= start):
        return told
    return replace(told, soonest_milli=sooner[0], soonest_at_s=sooner[1])


def _submitted(snapshot: Snapshot, request: Request, count: int) -> tuple[Snapshot, tuple[int, ...]]:
    """Return the world in which a request was submitted now, and the ids of its sessions."""
    next_id = max((s.id for s in snapshot.sessions), default=0) + 1
    new = [Session(next_id + n, request, SessionState.PENDING, snapshot.now_s) for n in range(count)]
    return snapshot.with_sessions((*snapshot.sessions, *new)), tuple(s.id for s in new)


def _amounts(request: Request, snapshot: Snapshot, caps: Caps) -> list[Request]:
    """Return the request with each other amount that could be asked for, smallest first."""
    own = [n for n in snapshot.nodes if n.resource_group == request.resource_group]
    plain = replace(request, gpu_memory_mib=None, compute_percent=None)
    return [replace(plain, fgpu_milli=amount) for amount in amounts_that_fit(own, caps)]


def largest_now_milli(
    request: Request,
    snapshot: Snapshot,
    policy: Policy,
    caps: Caps,
    *,
    count: int = 1,
    beside: Beside | None = None,
) -> int | None:
    """Return the largest amount with which ``count`` would start at once, or None.

    The CPU and memory with it are the request's, or what goes ``beside`` each amount. What is free so often is
    submitted to a copy of the world, and planned there.
    """
    score = score_for(policy.of(request.resource_group).placing, snapshot, request.resource_group)
    left = placement.free(snapshot)
    for asked in reversed(_amounts(request, snapshot, caps)):
        if beside is not None:
            cpu_milli, memory_mib = beside(asked.fgpu_milli)
            asked = replace(asked, cpu_milli=cpu_milli, memory_mib=memory_mib)
        if _is_free(asked, count, left, score) and _all_start(asked, count, snapshot, policy):
            return asked.fgpu_milli
    return None


def _all_start(asked: Request, count: int, snapshot: Snapshot, policy: Policy) -> bool:
    """Return whether ``count`` of a request, submitted to a copy of the world, are all placed there at once."""
    submitted, ids = _submitted(snapshot, asked, count)
    return {p.session_id for p in plan(submitted, policy).placed}.issuperset(ids)


def _beside_now(request: Request, count: int, snapshot: Snapshot, policy: Policy) -> tuple[int, int] | None:
    """Return the most CPU and memory with which all would start at once with the same GPU; None where less does not help.

    What is tried is what each node has left, for one of them or for several side by side.
    """
    score = score_for(policy.of(request.resource_group).placing, snapshot, request.resource_group)
    left = placement.free(snapshot)
    least = replace(request, cpu_milli=MIN_CPU_MILLI, memory_mib=MIN_MEMORY_MIB)
    if not _is_free(least, count, left, score):
        return None
    own = [n for n in left if n.node.resource_group == request.resource_group]
    sides = sorted({*range(1, min(count, SIDE_BY_SIDE) + 1), -(-count // len(own)), count})
    tried = {
        (
            min(request.cpu_milli, node.cpu_milli // side // CPU_GRAIN_MILLI * CPU_GRAIN_MILLI),
            min(request.memory_mib, node.memory_mib // side // MEMORY_GRAIN_MIB * MEMORY_GRAIN_MIB),
        )
        for node in own
        for side in sides
    }
    offers = (
        replace(request, cpu_milli=c, memory_mib=m) for c, m in sorted(tried, reverse=True) if c > 0 and m > 0
    )
    fits = (asked for asked in offers if _is_free(asked, count, left, score))
    starts = (asked for asked in islice(fits, MOST_OFFERS) if _all_start(asked, count, snapshot, policy))
    found = next(starts, None)
    return None if found is None else (found.cpu_milli, found.memory_mib)


def _is_free(asked: Request, count: int, left: placement.Free, score: placement.Score) -> bool:
    """Return whether ``count`` of a request fit beside each other, placed one after the other."""
    for _ in range(count):
        found = placement.place(asked, left, score=score)
        if found is None:
            return False
        left = found[1]
    return True


def _soonest(
    request: Request,
    count: int,
    snapshot: Snapshot,
    policy: Policy,
    caps: Caps,
    experience: Experience,
) -> tuple[int, int] | None:
    """Return the smallest amount, and when all of them would have started.

    Nothing larger starts sooner: it fits wherever that does.
    """
    amounts = _amounts(request, snapshot, caps)
    if not amounts or (amounts[0].fgpu_milli >= request.fgpu_milli and request.gpu_memory_mib is None):
        return None
    submitted, ids = _submitted(snapshot, amounts[0], count)
    now = plan(submitted, policy)
    found = expected_starts(applied(submitted, now), policy, experience, ids).found
    waiting = set(ids) - {p.session_id for p in now.placed}
    if not waiting <= found.keys():
        return None
    return amounts[0].fgpu_milli, max((found[i].at_s for i in waiting), default=snapshot.now_s)
