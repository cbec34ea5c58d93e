"""The forecast of each waiting session: position, reason, expected start and its range."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.accounts import AccountShare
from fgpu_scheduler.core.expected_returns import ExpectedReturn, expected_returns
from fgpu_scheduler.core.expected_starts import (
    BASIS_LIMITS,
    BASIS_NO_NODE,
    BASIS_NOW,
    BASIS_QUOTA,
    BASIS_TYPICAL,
    BlockingSessions,
    ExpectedStart,
    ExpectedStarts,
    QuotasAhead,
    SimulatedQueue,
    expected_starts,
    start_behind,
)
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory, StartRange
from fgpu_scheduler.core.model import Quota, Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.orders import fifo, lifo
from fgpu_scheduler.core.planner import (
    Plan,
    PlanCache,
    Reservation,
    StartDecision,
    WaitDecision,
    applied,
    plan,
)
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.quota import Ledger, may_stop, quota_words
from fgpu_scheduler.core.shares import RequestShape, is_explicit, shape
from fgpu_scheduler.core.shortage import shortage
from fgpu_scheduler.core.unblocking import Unblocking, unblocking
from fgpu_scheduler.core.usage import account_shares

STARTS_NOW = "starts now"
NOT_RESUMED = "the Hub has restarted, and resumes this request soon"
KEPT = "a place is kept for it"
COMES_BACK = "its GPU is free, and it comes back now"
GPU_IN_USE = "its GPU is in use until a session there ends or is parked"
NODE_AWAY = "its machine does not answer"
BEHIND = "enough is free, but it is kept for somebody ahead in the queue"


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of one waiting session. Instants are UTC seconds.

    ``position`` 0 means that it starts now; 1 is the first session of its resource group that goes on waiting.
    ``promised_at_s`` is the latest start of a session with a reservation. 80 % of starts are from ``early_at_s`` to
    ``late_at_s``, 10 % before and 10 % after; both are the expected start if nothing is uncertain. ``planned`` is the
    range before calibration.
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
        """The range that users see, with the expected start in its middle; None if no start is expected."""
        early_s, middle_s, late_s = self.early_at_s, self.expected_start_at_s, self.late_at_s
        if early_s is None or middle_s is None or late_s is None:
            return None
        return StartRange(early_s, middle_s, late_s)


@dataclass(frozen=True, slots=True)
class Outlook:
    """A snapshot with the forecast of every waiting session, by its id, in the order of the queues.

    ``unblockings`` say, by resource group, what would start the first session of a blocked queue. ``wanted`` has, by id,
    the forecast of each parked session that wants its shares back: its position is among those of the same GPUs.
    """

    snapshot: Snapshot
    forecasts: Mapping[int, Forecast]
    unblockings: Mapping[str, Unblocking] = field(default_factory=dict)
    wanted: Mapping[int, Forecast] = field(default_factory=dict)
    #: By resource group, for `forecast_new`.
    futures: Mapping[str, tuple[SimulatedQueue, ...]] = field(default_factory=dict, repr=False)


def outlook(snapshot: Snapshot, policy: Policy, history: Callable[[str], ForecastHistory]) -> Outlook:
    """Return the forecasts of every queue; ``history`` is called once for each resource group."""
    found: dict[int, Forecast] = {}
    wanted: dict[int, Forecast] = {}
    heads: dict[str, Unblocking] = {}
    futures: dict[str, tuple[SimulatedQueue, ...]] = {}
    for group in snapshot.resource_groups:
        own, known, cache = snapshot.of_group(group), history(group), PlanCache()
        now = plan(own, policy, cache)
        world = applied(own, now)
        shown, starts = _forecast(now, world, policy, known, cache)
        wanted |= {r.session.id: _returns(r, own) for r in expected_returns(own, policy, known.lengths)}
        found |= {one.session_id: one for one in shown}
        futures |= starts.futures
        if (head := unblocking(world, policy, cache)) is not None:
            heads[group] = head
    return Outlook(snapshot, found, heads, wanted, futures)


def _returns(expected: ExpectedReturn, snapshot: Snapshot) -> Forecast:
    """Return the forecast of a parked session that wants its shares back."""
    session, reason, at = expected.session, expected.waits or WaitReason.RESOURCES, expected.range
    text = COMES_BACK if expected.waits is None else GPU_IN_USE
    if expected.basis == BASIS_NO_NODE:
        text = NODE_AWAY
    elif expected.waits is WaitReason.QUOTA:
        back = lifecycle.moved(session, SessionState.RESUMING, now_s=snapshot.now_s)
        text = _quota_text(Ledger(snapshot).stops(back))
    found = Forecast(session.id, expected.position, reason, text, None, expected.basis)
    if at is None:
        return found
    early_s, middle_s, late_s = at.early_at_s, at.middle_at_s, at.late_at_s
    return replace(found, expected_start_at_s=middle_s, early_at_s=early_s, late_at_s=late_s)


def _quota_text(quota: Quota | None) -> str:
    of = "its quota" if quota is None else f"the quota of {quota_words(quota)}"
    return f"{of} is used up until a session ends"


def forecast(
    snapshot: Snapshot, policy: Policy, history: ForecastHistory, only: Collection[int] | None = None
) -> tuple[Forecast, ...]:
    """Return a forecast for every waiting session, or for ``only`` these, in queue order.

    ``history`` is that of the resource group; without one, only ends by time limits are known. A held session is forecast
    as if its launcher waited for it.
    """
    cache = PlanCache()
    now = plan(snapshot, policy, cache)
    return _forecast(now, applied(snapshot, now), policy, history, cache, only)[0]


def _forecast(
    now: Plan,
    world: Snapshot,
    policy: Policy,
    history: ForecastHistory,
    cache: PlanCache,
    only: Collection[int] | None = None,
) -> tuple[tuple[Forecast, ...], ExpectedStarts]:
    """Return the forecasts; in ``world`` the sessions that start by the plan take capacity from the others."""
    starts = expected_starts(world, policy, history, only, cache)
    texts = _WaitTexts(world, policy, cache)
    sessions = {s.id: s for s in world.sessions}
    length: dict[str, int] = {}
    found = []
    for decision in now.decisions:
        session = sessions[decision.session_id]
        shown = only is None or session.id in only
        if isinstance(decision, StartDecision):
            if shown:
                found.append(_starts_now(session.id, world.now_s))
            continue
        group = session.request.resource_group
        length[group] = length.get(group, 0) + 1
        if shown:
            start = starts.found.get(session.id) or starts.why_not(session, decision.reason)
            found.append(texts.forecast(session, decision, length[group], start, history))
    return tuple(found), starts


#: The wait reasons of sessions with a reservation, or behind one.
BY_RESERVATION = (WaitReason.RESERVED, WaitReason.PRIORITY)


def forecast_new(
    snapshot: Snapshot,
    session_id: int,
    policy: Policy,
    history: ForecastHistory,
    known: Outlook,
    cache: PlanCache,
) -> Forecast | None:
    """Return the forecast of a session that was just added to the snapshot, from the ``known`` outlook without it.

    None if the outlook is not enough: the session gets a reservation or waits behind one, the policy is strict, nothing
    is known of the resource group, or there are quotas and its amount depends on the GPU. Where a quota may stop the
    session, also if quotas guarantee amounts, or if sessions came or started after the outlook.
    """
    session = snapshot.session(session_id)
    assert session is not None
    group = session.request.resource_group
    now = plan(snapshot.of_group(group), policy, cache)
    sessions = {s.id: s for s in snapshot.sessions}
    ahead: dict[int, Session] = {}
    for decision in now.decisions:
        if decision.session_id == session_id:
            break
        ahead[decision.session_id] = sessions[decision.session_id]
    if isinstance(decision, StartDecision):
        return _starts_now(session_id, snapshot.now_s)
    futures = known.futures.get(group)
    depends_on_gpu = bool(snapshot.quotas) and is_explicit(session.request)
    if policy.of(group).strict or decision.reason in BY_RESERVATION or depends_on_gpu or not futures:
        return None
    world, quotas = applied(snapshot, now), None
    if may_stop(session, snapshot):
        quotas = QuotasAhead(world, cache.nodes_of(group))
        lends = any(quota.guaranteed_milli is not None for quota in world.quotas)
        is_same = known.snapshot.version == snapshot.version
        known_ids = {s.id for s in known.snapshot.sessions}
        held_ids = {s.id for s in known.snapshot.sessions if is_same or s.state in lifecycle.HOLDING}
        if lends or not (ahead.keys() <= known_ids and quotas.holding.keys() <= held_ids):
            return None
    start: ExpectedStart | str | None = start_behind(session, ahead, futures, quotas)
    if start is None and decision.reason is WaitReason.QUOTA:
        start = BASIS_QUOTA
    if start is None:
        return None
    position = 1 + sum(1 for d in now.decisions if d.session_id in ahead and not isinstance(d, StartDecision))
    texts = _WaitTexts(world, policy, cache)
    return texts.forecast(session, decision, position, start, history)


def _starts_now(session_id: int, now_s: int) -> Forecast:
    resources, at_s = WaitReason.RESOURCES, now_s
    return Forecast(session_id, 0, resources, STARTS_NOW, at_s, BASIS_NOW, early_at_s=at_s, late_at_s=at_s)


class _WaitTexts:
    """The texts that say why sessions wait. In ``world`` every session that starts now has started."""

    def __init__(self, world: Snapshot, policy: Policy, cache: PlanCache) -> None:
        self._world, self._policy, self._cache = world, policy, cache
        self._accounts: dict[str, dict[str, AccountShare]] = {}
        self._ledger = Ledger(world)
        self._shortages: dict[RequestShape, str] = {}

    def forecast(
        self,
        session: Session,
        waits: Reservation | WaitDecision,
        position: int,
        start: ExpectedStart | str,
        history: ForecastHistory,
    ) -> Forecast:
        """Return the forecast of a waiting session; ``start`` may say why none is expected."""
        promised_at_s = waits.until_s if isinstance(waits, Reservation) else None
        text = f"{self.of(session, waits.reason)}{self._account(session, waits.reason)}"
        own = session.id, position, waits.reason, text
        if isinstance(start, str):
            return Forecast(*own, None, start, promised_at_s)
        # Over a quota a session waits for others that the quota counts, not for those on the GPU that it gets later.
        ahead = None if waits.reason is WaitReason.QUOTA else start.ahead
        at = _range(start.planned, promised_at_s, self._world.now_s, history)
        # If the start may come later, time limits alone do not determine it, since they give the latest one.
        late = start.basis == BASIS_LIMITS and at.late_at_s > at.middle_at_s
        basis = BASIS_TYPICAL if late else start.basis
        range_s = at.early_at_s, at.late_at_s
        return Forecast(*own, at.middle_at_s, basis, promised_at_s, ahead, *range_s, start.planned)

    def _account(self, session: Session, reason: WaitReason) -> str:
        """Say what the session's account has used, if that decides its place in the queue."""
        accounts, group = self._policy.accounts, session.request.resource_group
        if not accounts.by_name or self._policy.of(group).order in (fifo, lifo):
            return ""
        if reason not in (WaitReason.RESOURCES, *BY_RESERVATION):
            return ""
        if group not in self._accounts:
            self._accounts[group] = account_shares(self._world, group, accounts)
        name = accounts.name(session.request.account)
        return f"; {self._accounts[group][name].words}"

    def of(self, session: Session, reason: WaitReason) -> str:
        """Say why a session waits."""
        match reason:
            case WaitReason.HELD:
                return NOT_RESUMED
            case WaitReason.RESERVED:
                return KEPT
            case WaitReason.PRIORITY:
                return BEHIND
            case WaitReason.QUOTA:
                return _quota_text(self._ledger.stops(session))
            case WaitReason.CLUSTER:
                last = session.refused[-1]
                return f"the cluster had no place on {last.node_id} after all, and is asked again soon: {last.words}"
            case WaitReason.RESOURCES:
                request_shape = shape(session.request)
                if request_shape not in self._shortages:
                    left = self._cache.nodes_of(session.request.resource_group)
                    self._shortages[request_shape] = shortage(session.request, left)
                return self._shortages[request_shape]
            case _:
                assert_never(reason)


def _range(
    planned: StartRange, promised_at_s: int | None, now_s: int, history: ForecastHistory
) -> StartRange:
    """Return the calibrated range of a start, which begins now at the soonest and ends by the promised start."""
    found = planned if history.stretch is None else history.stretch.of(planned, now_s)
    middle_s = max(found.middle_at_s, min(now_s, planned.middle_at_s))
    late_s = max(found.late_at_s, middle_s)
    if promised_at_s is not None:
        late_s = min(late_s, max(promised_at_s, planned.middle_at_s))
    middle_s = min(middle_s, late_s)
    return StartRange(min(max(found.early_at_s, now_s), middle_s), middle_s, late_s)
