"""Warnings and ends of running sessions: at the end of a time limit, when idle, and for requests of higher priority.

1. `reclaims` decides for each running session whether it is due: `_due` for its own limits, `preemption.victims` for
   requests of higher priority.
2. A session that becomes due is warned (`Warn`). The warning names the instant of the end, at least a grace period ahead.
3. A session that is no longer due gets its warning withdrawn (`WithdrawWarning`).
4. A session ends (`End`) when that instant is past and its warning has stood for the whole grace period.

How long a warning has stood is measured on a monotonic clock (`WarningAges`). So neither a jump of the wall clock nor a
time in which no process could show the warning shortens a grace period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fgpu_scheduler.core.lifecycle import UP, moved, wants_shares
from fgpu_scheduler.core.model import EndCause, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Plan, with_returns
from fgpu_scheduler.core.preemption import victims
from fgpu_scheduler.core.quota import Ledger, least_limit
from fgpu_scheduler.errors import StaleVersion

#: The warning of a time limit comes this much before the grace period begins, because sessions are checked periodically.
WARNED_AHEAD_S = 60

#: The causes of warnings; of two for the same instant the owner sees the first.
CAUSES = (EndCause.TIME_LIMIT, EndCause.IDLE, EndCause.PREEMPTED)


#: ``kept_until_s`` of a session that is never parked, as its owner asked.
FOR_GOOD_S = 2**62


@dataclass(frozen=True, slots=True)
class Rules:
    """When sessions of a resource group are ended, in seconds. None is never; for ``min_runtime_s`` it is at once.

    Sessions run for ``max_lifetime_s`` at most. A session is warned when its GPU and kernels have been idle for
    ``idle_after_s``. With ``preempt``, requests of higher priority, and guaranteed ones, may end sessions that have run
    for ``min_runtime_s``; with ``requeue`` these are queued again.

    A session is parked when its GPU has been idle for ``park_after_s``: with ``park_always`` at once, else while another
    session could use its share. Then ``idle_after_s`` has no effect; a session that was parked for ``parked_for_s``
    without wanting its shares back is ended as an idle one, after a warning. With ``park_opt_out`` its owner may have
    it never parked.
    """

    grace_s: int = 600
    max_lifetime_s: int | None = None
    idle_after_s: int | None = None
    preempt: bool = False
    min_runtime_s: int | None = None
    requeue: bool = True
    park_after_s: int | None = None
    park_always: bool = False
    park_opt_out: bool = False
    parked_for_s: int | None = None

    @property
    def ends_idle_after_s(self) -> int | None:
        """How long a session may be idle until it is warned; None if idle sessions are parked, or stay."""
        return self.idle_after_s if self.park_after_s is None else None


@dataclass(frozen=True, slots=True)
class AllRules:
    """The rules of every resource group: its own, or else the default."""

    default: Rules = Rules()
    groups: Mapping[str, Rules] = field(default_factory=dict)

    def of(self, resource_group: str) -> Rules:
        """Return the rules of a resource group."""
        return self.groups.get(resource_group, self.default)


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn the owner of the instant and the cause of the session's end. It replaces an earlier warning."""

    session_id: int
    cause: EndCause
    ends_at_s: int


@dataclass(frozen=True, slots=True)
class WithdrawWarning:
    """Withdraw the warning: there is no reason left to end the session."""

    session_id: int


@dataclass(frozen=True, slots=True)
class End:
    """End the session, as its owner was warned. With ``requeue`` it is queued again at its old position."""

    session_id: int
    cause: EndCause
    message: str
    requeue: bool = False


Reclaim = Warn | WithdrawWarning | End


def reclaims(
    snapshot: Snapshot,
    plan: Plan,
    rules: AllRules,
    *,
    warned_for_s: Mapping[int, int],
) -> tuple[Reclaim, ...]:
    """Return the warnings and ends that are due, in the order of the session ids.

    ``plan`` is the plan of this snapshot. ``warned_for_s`` is for how many seconds each session's warning has stood, by
    `WarningAges`; a missing one counts as 0.
    """
    ledger = Ledger(snapshot)
    running = [s for s in snapshot.sessions if s.state in UP]
    due = {s.id: _due(s, rules.of(s.request.resource_group), ledger, snapshot.now_s) for s in running}
    groups = sorted({session.request.resource_group for session in snapshot.sessions})
    preempting = [name for name in groups if rules.of(name).preempt]
    if preempting:
        otherwise = [s.id for s in running if due[s.id] is not None]
        from_s = {s.id: preemptible_from_s(s, rules.of(s.request.resource_group)) for s in running}
        # The warning may come a grace period before the session may end.
        too_soon = [
            s.id
            for s in running
            if s.state is not SessionState.RUNNING
            or from_s[s.id] > snapshot.now_s + rules.of(s.request.resource_group).grace_s
        ]
        world = with_returns(snapshot, plan)
        for session_id in victims(
            world,
            plan,
            Ledger(world),
            groups=preempting,
            ending=otherwise,
            spared=too_soon,
        ):
            due[session_id] = _Due(EndCause.PREEMPTED, max(snapshot.now_s, from_s[session_id]), None)
    found = (
        _decision(s, due[s.id], rules.of(s.request.resource_group), snapshot.now_s, warned_for_s.get(s.id, 0))
        for s in running
    )
    return tuple(one for one in found if one is not None)


@dataclass(frozen=True, slots=True)
class _Due:
    """Why a session should end, and from which instant on. ``limit_s`` is a lifetime, which may be short."""

    cause: EndCause
    at_s: int
    limit_s: int | None

    def grace_s(self, rules: Rules) -> int:
        # The grace period of a short lifetime is at most half of it.
        return rules.grace_s if self.limit_s is None else min(rules.grace_s, self.limit_s // 2)


def _due(session: Session, rules: Rules, ledger: Ledger, now_s: int) -> _Due | None:
    """Return why the session should end by its own limits, or None. Other requests are not considered."""
    found = []
    limit_s = lifetime_s(session, rules, ledger)
    if limit_s is not None and session.started_at_s is not None:
        due = _Due(EndCause.TIME_LIMIT, session.started_at_s + limit_s, limit_s)
        if now_s >= due.at_s - due.grace_s(rules) - WARNED_AHEAD_S:
            found.append(due)
    if not is_kept(session, rules, now_s) and _is_idle(session, rules, now_s):
        found.append(_Due(EndCause.IDLE, now_s, None))
    earliest = [(max(due.at_s, now_s + due.grace_s(rules)), CAUSES.index(due.cause), due) for due in found]
    standing = [due for due in found if due.cause is session.ends_cause]
    if standing and session.ends_at_s is not None:
        # The grace period of the standing warning began when it was given.
        earliest = [one for one in earliest if one[2] is not standing[0]]
        earliest.append((session.ends_at_s, CAUSES.index(standing[0].cause), standing[0]))
    return min(earliest, key=lambda one: one[:2])[2] if earliest else None


def is_kept(session: Session, rules: Rules, now_s: int) -> bool:
    """Return whether a session is neither ended for idleness nor parked now, as its owner asked."""
    if session.kept_until_s == FOR_GOOD_S:
        return rules.park_opt_out and session.state is SessionState.RUNNING
    return session.kept_until_s is not None and now_s < session.kept_until_s


def _is_idle(session: Session, rules: Rules, now_s: int) -> bool:
    since_s, longest_s = session.idle_since_s, rules.ends_idle_after_s
    if rules.park_after_s is not None:
        parked = session.state is SessionState.PARKED and not wants_shares(session)
        since_s, longest_s = session.parked_at_s if parked else None, rules.parked_for_s
    return since_s is not None and longest_s is not None and now_s >= since_s + longest_s


def lifetime_s(session: Session, rules: Rules, ledger: Ledger) -> int | None:
    """Return how long a session may run: the shortest of its own limit, the rules' and its quotas', or None."""
    return least_limit((session.time_limit_s, rules.max_lifetime_s, ledger.limit_s(session.request)))


def preemptible_from_s(session: Session, rules: Rules) -> int:
    """Return the instant from which a running session may be ended for a request of higher priority."""
    return (session.started_at_s or 0) + (rules.min_runtime_s or 0)


def _decision(
    session: Session, due: _Due | None, rules: Rules, now_s: int, warned_for_s: int
) -> Reclaim | None:
    warned = session.ends_cause
    if due is None:
        return None if warned is None else WithdrawWarning(session.id)
    grace_s = due.grace_s(rules)
    if warned is not due.cause or session.ends_at_s is None:
        return Warn(session.id, due.cause, max(due.at_s, now_s + grace_s))
    missing_s = max(0, grace_s - warned_for_s)
    past = session.ends_at_s <= now_s
    if past and now_s >= due.at_s and not missing_s:
        requeue = rules.requeue and due.cause is EndCause.PREEMPTED
        return End(session.id, due.cause, end_message(due.cause, requeued=requeue), requeue)
    # Either the instant is past, but part of the grace period is missing or the lifetime was extended; or the clock was
    # set back and the instant is too far ahead.
    if past or session.ends_at_s > max(due.at_s, now_s + grace_s):
        return Warn(session.id, due.cause, max(due.at_s, now_s + missing_s))
    return None


def end_message(cause: EndCause, *, requeued: bool = False) -> str:
    """Return the message to the owner of a session that was ended."""
    match cause:
        case EndCause.TIME_LIMIT:
            return "the session's time was over, as its owner was warned"
        case EndCause.IDLE:
            return "the session was idle, and was not kept after the warning"
        case _:
            again = "; it waits at its old place in the queue" if requeued else ""
            return f"a request that goes first needed the place, as its owner was warned{again}"


def warned(session: Session, decision: Warn | WithdrawWarning) -> Session:
    """Return the session with the warning, or without it.

    Raises:
        StaleVersion: the session does not run.
    """
    _check_running(session)
    if isinstance(decision, WithdrawWarning):
        return replace(session, ends_at_s=None, ends_cause=None)
    return replace(session, ends_at_s=decision.ends_at_s, ends_cause=decision.cause)


def terminating(session: Session, decision: End, *, now_s: int) -> Session:
    """Return the session TERMINATING.

    Raises:
        StaleVersion: the session does not run, or was not warned of this end by now.
    """
    _check_running(session)
    if session.ends_cause is not decision.cause or session.ends_at_s is None or session.ends_at_s > now_s:
        raise StaleVersion(f"session {session.id} was not warned that it is ended now ({decision.cause})")
    to = SessionState.TERMINATING
    return moved(session, to, now_s=now_s, cause=decision.cause, message=decision.message)


def requeued(session: Session, *, now_s: int) -> Session:
    """Return the session that takes the old one's position in the queue; the store gives it its id.

    It is held, because no launcher waits for it yet. Its submission is that of the old one.
    """
    return Session(
        0,
        session.request,
        SessionState.PENDING,
        session.submitted_at_s,
        held=True,
        replaces=session.id,
        place_of=session.place,
        asked_priority=session.asked_priority,
        queued_at_s=now_s,
        kept_until_s=FOR_GOOD_S if session.kept_until_s == FOR_GOOD_S else None,
    )


def kept_while_idle(session: Session, until_s: int | None, *, now_s: int) -> Session:
    """Return the session that its owner keeps although it is idle, or keeps until now. A later instant stays."""
    idle = session.ends_cause is EndCause.IDLE and until_s is not None
    # One that is about to be ended for idleness is not kept for good: the rules allow it no longer, or it is parked.
    before_s = None if idle and session.kept_until_s == FOR_GOOD_S else session.kept_until_s
    if until_s is None:
        kept_until_s = None if before_s is None else min(before_s, now_s)
    else:
        kept_until_s = max(until_s, before_s or until_s)
    return replace(
        session,
        kept_until_s=kept_until_s,
        ends_at_s=None if idle else session.ends_at_s,
        ends_cause=None if idle else session.ends_cause,
    )


def extended(session: Session, by_s: int) -> Session:
    """Return the session with a longer time limit.

    A standing warning of the old end becomes one of the new end, without a new grace period.
    """
    _check_running(session)
    ends_at_s = session.ends_at_s
    if ends_at_s is not None and session.ends_cause is EndCause.TIME_LIMIT:
        ends_at_s += by_s
    return replace(session, extended_s=session.extended_s + by_s, ends_at_s=ends_at_s)


def _check_running(session: Session) -> None:
    if session.state not in UP:
        raise StaleVersion(f"session {session.id} is {session.state}, and does not run")


class WarningAges:
    """How long each warning has stood, measured on a monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, EndCause], float] = {}

    def warned_for_s(self, sessions: Sequence[Session], steady_s: float) -> Mapping[int, int]:
        """Return for how many whole seconds the warning of each session has stood; ``steady_s`` is the monotonic time.

        Call it with every snapshot: a warning that is missing from one starts again. After a restart all do.
        """
        standing = [(s.id, s.ends_cause) for s in sessions if s.ends_cause is not None]
        self._since = {key: self._since.get(key, steady_s) for key in standing}
        return {key[0]: int(steady_s - since) for key, since in self._since.items()}
