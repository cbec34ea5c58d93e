"""What is told of each who waits: position, reason, expected start and its range."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from fgpu_scheduler.core.expected_starts import (
    BASIS_LIMITS,
    BASIS_NOW,
    BASIS_TYPICAL,
    NOT_LOOKED_AT,
    BlockingSessions,
    ExpectedStart,
    ExpectedStarts,
    SimulatedQueue,
    expected_starts,
    start_behind,
)
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory, StartRange
from fgpu_scheduler.core.model import Session, Snapshot, WaitReason
from fgpu_scheduler.core.planner import PlanCache, ReserveDecision, StartDecision, WaitDecision, applied, plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.quota import Ledger, quota_words
from fgpu_scheduler.core.shares import RequestShape, shape
from fgpu_scheduler.core.shortage import shortage
from fgpu_scheduler.core.unblocking import Unblocking, unblocking

STARTS_NOW = "starts now"
NOT_RESUMED = "the Hub has restarted, and resumes this request soon"
KEPT = "a place is kept for it"
BEHIND = "enough is free, but it is kept for somebody ahead in the queue"


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known of one waiting session.

    ``position`` 0 means that it starts now; 1 is the first of those of its resource group that wait on.
    ``promised_at_s`` is the latest start where a place is kept for it. From ``early_at_s`` to ``late_at_s`` are 80
    of 100 starts, 10 are before and 10 after it; both are the expected start where nothing of it is uncertain.
    ``planned`` is the same before experience has stretched it.
    """

    session_id: int
    position: int
    reason: WaitReason
    text: str
    expected_start_at_s: int | None
    basis: str
    promised_at_s: int | None = None
    ahead: BlockingSessions | None = None
    early_at_s: int | None = None
    late_at_s: int | None = None
    planned: StartRange | None = None

    @property
    def shown(self) -> StartRange | None:
        """The range that is told, with the expected start in its middle; None where no start is expected."""
        early_s, middle_s, late_s = self.early_at_s, self.expected_start_at_s, self.late_at_s
        if early_s is None or middle_s is None or late_s is None:
            return None
        return StartRange(early_s, middle_s, late_s)


@dataclass(frozen=True, slots=True)
class Outlook:
    """A snapshot with the forecast of every waiting session, by its id, in the order of the queues.

    ``unblockings`` say, by resource group, what would start the first of its queue, where that is blocked.
    """

    snapshot: Snapshot
    forecasts: Mapping[int, Forecast]
    unblockings: Mapping[str, Unblocking] = field(default_factory=dict)
    futures: Mapping[str, tuple[SimulatedQueue, ...]] = field(default_factory=dict, repr=False)
    """By resource group, for `forecast_new`."""


def outlook(snapshot: Snapshot, policy: Policy, experience: Callable[[str], ForecastHistory]) -> Outlook:
    """Return what is expected of every queue; ``experience`` is asked once of each resource group."""
    found: dict[int, Forecast] = {}
    heads: dict[str, Unblocking] = {}
    futures: dict[str, tuple[SimulatedQueue, ...]] = {}
    for group in snapshot.resource_groups:
        own = snapshot.of_group(group)
        told, starts = _forecast(own, policy, experience(group))
        found |= {one.session_id: one for one in told}
        futures |= starts.futures
        if (head := unblocking(own, policy)) is not None:
            heads[group] = head
    return Outlook(snapshot, found, heads, futures)


def forecast(
    snapshot: Snapshot, policy: Policy, experience: ForecastHistory, only: Collection[int] | None = None
) -> tuple[Forecast, ...]:
    """Return a forecast for every waiting session, or of ``only`` these, in queue order.

    ``experience`` is that of the resource group; without any, only ends by time limits are known.
    A held session is forecast as if somebody waited for it again.
    """
    return _forecast(snapshot, policy, experience, only)[0]


def _forecast(
    snapshot: Snapshot, policy: Policy, experience: ForecastHistory, only: Collection[int] | None = None
) -> tuple[tuple[Forecast, ...], ExpectedStarts]:
    memory = PlanCache()
    now = plan(snapshot, policy, memory)
    # What starts in this very pass is not free for those who wait on.
    world = applied(snapshot, now)
    starts = expected_starts(world, policy, experience, only, memory)
    words = _Words(world, memory)
    sessions = {s.id: s for s in snapshot.sessions}
    length: dict[str, int] = {}
    found = []
    for decision in now.decisions:
        session = sessions[decision.session_id]
        told = only is None or session.id in only
        if isinstance(decision, StartDecision):
            if told:
                found.append(_starts_now(session.id, snapshot.now_s))
            continue
        group = session.request.resource_group
        length[group] = length.get(group, 0) + 1
        if told:
            start = starts.found.get(session.id)
            basis = starts.why_not(session, decision.reason) if start is None else start.basis
            waits = words.forecast(session, decision, length[group], start, basis)
            found.append(waits if start is None else _ranged(waits, start, snapshot.now_s, experience))
    return tuple(found), starts


KEPT_FOR = (WaitReason.RESERVED, WaitReason.PRIORITY)
"""Why a session waits for which, or from which, a place is kept."""


def forecast_new(
    snapshot: Snapshot,
    session_id: int,
    policy: Policy,
    experience: ForecastHistory,
    known: Outlook,
    memory: PlanCache,
) -> Forecast | None:
    """Return the forecast of a session that was just added to the snapshot, by what is ``known`` without it.

    None where that cannot tell: a place is kept for it or from it, a quota may count it, the policy is strict, or nothing
    is known of the resource group.
    """
    session = snapshot.session(session_id)
    assert session is not None
    group = session.request.resource_group
    now = plan(snapshot.of_group(group), policy, memory)
    ahead: dict[int, None] = {}
    for decision in now.decisions:
        if decision.session_id == session_id:
            break
        ahead[decision.session_id] = None
    if isinstance(decision, StartDecision):
        return _starts_now(session_id, snapshot.now_s)
    futures = known.futures.get(group)
    is_strict = policy.of(group).strict
    if is_strict or decision.reason in KEPT_FOR or snapshot.quotas or not futures:
        return None
    start = start_behind(session, ahead, futures, snapshot.now_s)
    if start is None:
        # Beyond the passes that were made: about when the last one ahead of it starts.
        told = (known.forecasts.get(i) for i in ahead)
        ranges = [one.planned for one in told if one is not None and one.planned is not None]
        if futures[0].queue_is_empty or not ranges:
            return None
        last = max(ranges, key=lambda one: one.middle_at_s)
        start = ExpectedStart(last.middle_at_s, BASIS_TYPICAL, NOT_LOOKED_AT, last)
    position = 1 + sum(1 for d in now.decisions if d.session_id in ahead and not isinstance(d, StartDecision))
    words = _Words(snapshot, memory)
    waits = words.forecast(session, decision, position, start, start.basis)
    return _ranged(waits, start, snapshot.now_s, experience)


def _starts_now(session_id: int, now_s: int) -> Forecast:
    resources, at_s = WaitReason.RESOURCES, now_s
    return Forecast(session_id, 0, resources, STARTS_NOW, at_s, BASIS_NOW, early_at_s=at_s, late_at_s=at_s)


class _Words:
    """Why sessions wait, in a world in which all have started who start now."""

    def __init__(self, world: Snapshot, memory: PlanCache) -> None:
        """Take the ``memory`` of the plan that has placed them."""
        self._memory = memory
        self._ledger = Ledger(world)
        self._shortages: dict[RequestShape, str] = {}

    def forecast(
        self,
        session: Session,
        waits: ReserveDecision | WaitDecision,
        position: int,
        start: ExpectedStart | None,
        basis: str,
    ) -> Forecast:
        """Return the forecast of one who waits, yet without its start."""
        # Over a quota it waits for those that count there, and not for whoever is on the GPU that it gets later.
        ahead = None if start is None or waits.reason is WaitReason.QUOTA else start.ahead
        promised_at_s = waits.starts_at_s if isinstance(waits, ReserveDecision) else None
        words = self.of(session, waits.reason)
        return Forecast(
            session.id, position, waits.reason, words, None, basis, promised_at_s=promised_at_s, ahead=ahead
        )

    def of(self, session: Session, reason: WaitReason) -> str:
        """Say why this one waits."""
        match reason:
            case WaitReason.HELD:
                return NOT_RESUMED
            case WaitReason.RESERVED:
                return KEPT
            case WaitReason.PRIORITY:
                return BEHIND
            case WaitReason.QUOTA:
                quota = self._ledger.stops(session)
                of = "its quota" if quota is None else f"the quota of {quota_words(quota)}"
                return f"{of} is used up until a session ends"
            case WaitReason.CLUSTER:
                last = session.refused[-1]
                return f"the cluster had no place on {last.node_id} after all, and is asked again soon: {last.words}"
            case WaitReason.RESOURCES:
                asked = shape(session.request)
                if asked not in self._shortages:
                    left = self._memory.left(session.request.resource_group)
                    self._shortages[asked] = shortage(session.request, left)
                return self._shortages[asked]
            case _:
                assert_never(reason)


def _ranged(told: Forecast, start: ExpectedStart, now_s: int, experience: ForecastHistory) -> Forecast:
    """Return a forecast with the start and its range, which begins no sooner than now and keeps what was promised."""
    stretch, found = experience.stretch, start.planned
    if stretch is not None:
        found = stretch.of(found, now_s)
    middle_s = max(found.middle_at_s, min(now_s, start.at_s))
    late_s = max(found.late_at_s, middle_s)
    if told.promised_at_s is not None:
        late_s = min(late_s, max(told.promised_at_s, start.at_s))
    middle_s = min(middle_s, late_s)
    # A start that may come later is not known by time limits alone, which tell the latest.
    may_be_later = told.basis == BASIS_LIMITS and late_s > middle_s
    return replace(
        told,
        basis=BASIS_TYPICAL if may_be_later else told.basis,
        expected_start_at_s=middle_s,
        early_at_s=min(max(found.early_at_s, now_s), middle_s),
        late_at_s=late_s,
        planned=start.planned,
    )
