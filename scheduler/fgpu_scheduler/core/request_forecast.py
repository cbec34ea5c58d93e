"""The forecast of a request that is not submitted yet, and the amounts that would start now or sooner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    world = _World(snapshot, policy, count)
    own = world.forecasts(request, history, ahead)
    waiting = [f for f in own if f.basis != BASIS_NOW]
    largest = world.largest_now(others)
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
        beside_now=world.beside_now(request),
    )
    if largest is not None:
        return _with_largest(found, largest)
    least = others[0] if others else request
    if least.fgpu_milli >= request.fgpu_milli and request.gpu_memory_mib is None:
        return found
    starts = [f.expected_start_at_s for f in world.forecasts(least, history, ahead)]
    at_s = None if None in starts else max(at for at in starts if at is not None)
    start = last.expected_start_at_s
    if at_s is None or (start is not None and at_s >= start):
        return found
    beside = least.cpu_milli, least.memory_mib
    return replace(found, soonest_milli=least.fgpu_milli, soonest_at_s=at_s, beside_other=beside)


def _with_largest(found: RequestForecast, largest: Request) -> RequestForecast:
    beside = largest.cpu_milli, largest.memory_mib
    return replace(found, largest_now_milli=largest.fgpu_milli, beside_other=beside)


def largest_now(others: Sequence[Request], count: int, snapshot: Snapshot, policy: Policy) -> Request | None:
    """Return the largest of these requests for which ``count`` sessions would start at once, or None."""
    return _World(snapshot, policy, count).largest_now(others)


class _World:
    """A snapshot to which ``count`` sessions of one request after another are submitted, each time in a new copy."""

    def __init__(self, snapshot: Snapshot, policy: Policy, count: int) -> None:
        self._snapshot = snapshot
        self._policy = policy
        self._count = count
        self._cache = PlanCache()

    def _submitted(self, request: Request) -> tuple[Snapshot, tuple[int, ...]]:
        """Return the world with the request submitted now, and the ids of its sessions."""
        next_id = max((s.id for s in self._snapshot.sessions), default=0) + 1
        now_s, pending = self._snapshot.now_s, SessionState.PENDING
        new = [Session(next_id + n, request, pending, now_s) for n in range(self._count)]
        return self._snapshot.changed([(None, session) for session in new]), tuple(s.id for s in new)

    def forecasts(self, asked: Request, history: ForecastHistory, ahead: Outlook | None) -> list[Forecast]:
        submitted, ids = self._submitted(asked)
        if ahead is not None and self._count == 1:
            found = forecast_new(submitted, ids[0], self._policy, history, ahead, self._cache)
            if found is not None:
                return [found]
        by_id = {f.session_id: f for f in forecast(submitted, self._policy, history, ids)}
        return [by_id[i] for i in ids]

    def largest_now(self, others: Sequence[Request]) -> Request | None:
        free = self._fitting(others, others[0].resource_group) if others else []
        return next((asked for asked in reversed(free) if self._all_start(asked)), None)

    def beside_now(self, request: Request) -> tuple[int, int] | None:
        """Return the most CPU and memory with which all would start at once on the same GPU; None if less does not help.

        It tries what each node has left, for one session or for several side by side.
        """
        least = replace(request, cpu_milli=MIN_CPU_MILLI, memory_mib=MIN_MEMORY_MIB)
        group, count = request.resource_group, self._count
        if not self._fitting([least], group):
            return None
        own = self._cache.nodes_of(group)
        sides = sorted({*range(1, min(count, SIDE_BY_SIDE) + 1), -(-count // len(own)), count})
        tried = {
            (
                min(request.cpu_milli, node.cpu_milli // side // CPU_GRAIN_MILLI * CPU_GRAIN_MILLI),
                min(request.memory_mib, node.memory_mib // side // MEMORY_GRAIN_MIB * MEMORY_GRAIN_MIB),
            )
            for node in own
            for side in sides
        }
        amounts = ((c, m) for c, m in sorted(tried, reverse=True) if c > 0 and m > 0)
        offers = (replace(request, cpu_milli=c, memory_mib=m) for c, m in amounts)
        fits = self._fitting(offers, group, MOST_OFFERS)
        found = next((asked for asked in fits if self._all_start(asked)), None)
        return None if found is None else (found.cpu_milli, found.memory_mib)

    def _fitting(self, requests: Iterable[Request], group: str, most: int | None = None) -> list[Request]:
        """Return the first requests of this resource group that fit ``count`` times beside each other."""
        with self._cache.free_capacity(self._snapshot, group) as capacity:
            return list(islice((asked for asked in requests if self._is_free(asked, capacity)), most))

    def _is_free(self, asked: Request, capacity: FreeCapacity) -> bool:
        if self._count == 1:
            return capacity.placer.fits(asked)
        placer = capacity.placer.copy()
        return all(placer.place(asked) is not None for _ in range(self._count))

    def _all_start(self, asked: Request) -> bool:
        submitted, ids = self._submitted(asked)
        return {p.session_id for p in plan(submitted, self._policy, self._cache).placed}.issuperset(ids)
