"""The forecast of a request that is not submitted yet, and the amounts that would start now or sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from fgpu_scheduler.core.admission import MIN_CPU_MILLI, MIN_MEMORY_MIB
from fgpu_scheduler.core.expected_starts import BASIS_NOW, BlockingSessions
from fgpu_scheduler.core.forecast import STARTS_NOW, Forecast, Outlook, forecast, forecast_new
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.free_capacity import FreeCapacity, PlanCache
from fgpu_scheduler.core.model import Request, Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.planner import plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.units import MEMORY_GRAIN_MIB

#: Other amounts of CPU are offered in tenths of a core.
CPU_GRAIN_MILLI = 100
#: Bounds of the other amounts of CPU and memory that are planned for one forecast.
SIDE_BY_SIDE = 8
MOST_OFFERS = 8


@dataclass(frozen=True, slots=True)
class RequestForecast:
    """The forecast of ``count`` sessions submitted now, and the amounts that would start now or sooner.

    ``largest_now_milli`` is the largest amount with which all sessions would start at once. If there is none,
    ``soonest_milli`` is the amount with which all start soonest, at ``soonest_at_s``, if that is sooner than with the
    requested amount. ``beside_other`` is the CPU, in thousandths of a core, and the memory in MiB with that other amount.
    ``beside_now`` is the most CPU and memory beside the same GPU with which all would start at once, if only these are
    short. ``reason`` and ``ahead`` are those of the first session that waits.
    """

    startable_now: int
    position: int | None
    expected_start_at_s: int | None
    basis: str
    text: str
    largest_now_milli: int | None
    reason: WaitReason | None = None
    ahead: BlockingSessions | None = None
    early_at_s: int | None = None
    late_at_s: int | None = None
    soonest_milli: int | None = None
    soonest_at_s: int | None = None
    beside_now: tuple[int, int] | None = None
    beside_other: tuple[int, int] | None = None


def forecast_request(
    request: Request,
    count: int,
    snapshot: Snapshot,
    policy: Policy,
    history: ForecastHistory,
    others: Sequence[Request] = (),
    ahead: Outlook | None = None,
) -> RequestForecast:
    """Forecast a request that is not submitted yet, by submitting it to a copy of the world.

    With the outlook ``ahead`` of the world without it, the start of a single session is looked up there if possible.
    ``position`` and the expected start are those of the last session. ``others`` are the same request with each possible
    amount of fGPU, smallest first, each with its own CPU and memory.
    """
    cache = PlanCache()
    own = _forecasts(request, count, snapshot, policy, history, ahead, cache)
    waiting = [f for f in own if f.basis != BASIS_NOW]
    largest = largest_now(others, count, snapshot, policy, cache)
    if not waiting:
        found = RequestForecast(count, None, snapshot.now_s, BASIS_NOW, STARTS_NOW, None)
        return found if largest is None else _with_largest(found, largest)
    first = min(waiting, key=lambda f: f.position)
    last = max(waiting, key=lambda f: f.position)
    found = RequestForecast(
        startable_now=count - len(waiting),
        position=last.position,
        expected_start_at_s=last.expected_start_at_s,
        basis=last.basis,
        text=first.text,
        largest_now_milli=None,
        reason=first.reason,
        ahead=first.ahead,
        early_at_s=last.early_at_s,
        late_at_s=last.late_at_s,
        beside_now=_beside_now(request, count, snapshot, policy, cache),
    )
    if largest is not None:
        return _with_largest(found, largest)
    least = others[0] if others else request
    if least.fgpu_milli >= request.fgpu_milli and request.gpu_memory_mib is None:
        return found
    own = _forecasts(least, count, snapshot, policy, history, ahead, cache)
    starts = [f.expected_start_at_s for f in own]
    at_s = None if None in starts else max(at for at in starts if at is not None)
    start = last.expected_start_at_s
    if at_s is None or (start is not None and at_s >= start):
        return found
    beside = least.cpu_milli, least.memory_mib
    return replace(found, soonest_milli=least.fgpu_milli, soonest_at_s=at_s, beside_other=beside)


def _with_largest(found: RequestForecast, largest: Request) -> RequestForecast:
    beside = largest.cpu_milli, largest.memory_mib
    return replace(found, largest_now_milli=largest.fgpu_milli, beside_other=beside)


def _forecasts(
    asked: Request,
    count: int,
    snapshot: Snapshot,
    policy: Policy,
    history: ForecastHistory,
    ahead: Outlook | None,
    cache: PlanCache,
) -> list[Forecast]:
    submitted, ids = _submitted(snapshot, asked, count)
    if ahead is not None and count == 1:
        found = forecast_new(submitted, ids[0], policy, history, ahead, cache)
        if found is not None:
            return [found]
    part_of_id = {f.session_id: f for f in forecast(submitted, policy, history, ids)}
    return [part_of_id[i] for i in ids]


def _submitted(snapshot: Snapshot, request: Request, count: int) -> tuple[Snapshot, tuple[int, ...]]:
    """Return the world with the request submitted now, and the ids of its sessions."""
    next_id = max((s.id for s in snapshot.sessions), default=0) + 1
    new = [Session(next_id + n, request, SessionState.PENDING, snapshot.now_s) for n in range(count)]
    return snapshot.changed([(None, session) for session in new]), tuple(s.id for s in new)


def largest_now(
    others: Sequence[Request],
    count: int,
    snapshot: Snapshot,
    policy: Policy,
    cache: PlanCache | None = None,
) -> Request | None:
    """Return the largest of these requests for which ``count`` sessions would start at once, or None.

    ``cache`` is that of earlier plans of the same world.
    """
    if not others:
        return None
    cache = cache or PlanCache()
    group = others[0].resource_group
    with cache.free_capacity(snapshot, group, policy.of(group).placing) as capacity:
        free = [asked for asked in others if _is_free(asked, count, capacity)]
    return next(
        (asked for asked in reversed(free) if _all_start(asked, count, snapshot, policy, cache)), None
    )


def _all_start(asked: Request, count: int, snapshot: Snapshot, policy: Policy, cache: PlanCache) -> bool:
    """Return whether ``count`` of a request would all start at once."""
    submitted, ids = _submitted(snapshot, asked, count)
    return {p.session_id for p in plan(submitted, policy, cache).placed}.issuperset(ids)


def _beside_now(
    request: Request, count: int, snapshot: Snapshot, policy: Policy, cache: PlanCache
) -> tuple[int, int] | None:
    """Return the most CPU and memory with which all would start at once on the same GPU; None if less does not help.

    It tries what each node has left, for one session or for several side by side.
    """
    least = replace(request, cpu_milli=MIN_CPU_MILLI, memory_mib=MIN_MEMORY_MIB)
    group = request.resource_group
    with cache.free_capacity(snapshot, group, policy.of(group).placing) as capacity:
        own = list(capacity.nodes.values())
        if not _is_free(least, count, capacity):
            return None
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
    with cache.free_capacity(snapshot, group, policy.of(group).placing) as capacity:
        fits = list(islice((asked for asked in offers if _is_free(asked, count, capacity)), MOST_OFFERS))
    starts = (asked for asked in fits if _all_start(asked, count, snapshot, policy, cache))
    found = next(starts, None)
    return None if found is None else (found.cpu_milli, found.memory_mib)


def _is_free(asked: Request, count: int, capacity: FreeCapacity) -> bool:
    """Return whether ``count`` of a request fit beside each other now."""
    if not capacity.may_fit(asked) or not capacity.placer.fits(asked):
        return False
    if count == 1:
        return True
    placer = capacity.placer.copy()
    return all(placer.place(asked) is not None for _ in range(count))
