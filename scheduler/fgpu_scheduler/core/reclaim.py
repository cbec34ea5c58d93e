"""Taking back what is held: at the end of a lifetime, from the idle, and for sessions of higher priority.

Never without a warning to the owner that has stood for the grace. The instant of a warning tells its owner when the
end comes; how long it has stood is measured on a clock that nobody sets, so that a jump of the clock, or a time in
which nobody could see the warning, shortens no grace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fgpu_scheduler.core.lifecycle import moved
from fgpu_scheduler.core.model import EndCause, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.preemption import victims
from fgpu_scheduler.core.preemption_candidates import PreemptionCandidates
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.errors import StaleVersion

WARNED_AHEAD_S = 60
"""So much earlier than the grace asks for comes the warning of a lifetime's end: whoever looks does so now and then."""

CAUSES = (EndCause.TIME_LIMIT, EndCause.IDLE, EndCause.PREEMPTED)
"""What a session is warned of; the first of two for the same instant is the one that its owner is told."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When sessions of a resource group are ended, all in seconds.

    Sessions live for ``max_lifetime_s`` at most; their GPU and kernels are both idle for ``idle_after_s`` before the
    warning; ``preempt`` lets a session of higher priority take the place of others once these have run for
    ``min_runtime_s``, and they are queued again if ``requeue``. None is never, or, of ``min_runtime_s``, at once.
    """

    grace_s: int = 600
    max_lifetime_s: int | None = None
    idle_after_s: int | None = None
    preempt: bool = False
    min_runtime_s: int | None = None
    requeue: bool = True


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
    """Tell the owner that the session is going to be ended then, and why. It takes the place of an earlier warning."""

    session_id: int
    cause: EndCause
    ends_at_s: int


@dataclass(frozen=True, slots=True)
class WithdrawWarning:
    """Take the warning back: there is no reason to end the session any more."""

    session_id: int


@dataclass(frozen=True, slots=True)
class End:
    """End the session, as its owner was warned, and queue it again at its place if ``requeue``."""

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
    clearings: PreemptionCandidates | None = None,
) -> tuple[Reclaim, ...]:
    """Decide of every running session whether it is warned, spared or ended, in the order of their ids.

    ``plan`` is the one made on this snapshot. ``warned_for_s`` is for how many seconds each session's warning has stood,
    by `WarningAges`; of one that is missing, not at all. With the ``clearings`` of earlier rounds it is the same, sooner.
    """
    ledger = Ledger(snapshot)
    running = [s for s in snapshot.sessions if s.state is SessionState.RUNNING]
    due = {s.id: _due(s, rules.of(s.request.resource_group), ledger, snapshot.now_s) for s in running}
    preempting = [name for name in _groups(snapshot) if rules.of(name).preempt]
    if preempting:
        otherwise = [s.id for s in running if due[s.id] is not None]
        from_s = {s.id: preemptible_from_s(s, rules.of(s.request.resource_group)) for s in running}
        # Their warning may come ahead of that, as the end comes a grace after it.
        too_soon = [
            s.id
            for s in running
            if from_s[s.id] > snapshot.now_s + rules.of(s.request.resource_group).grace_s
        ]
        for session_id in victims(
            snapshot,
            plan,
            ledger,
            groups=preempting,
            ending=otherwise,
            spared=too_soon,
            clearings=clearings,
        ):
            due[session_id] = _Due(EndCause.PREEMPTED, max(snapshot.now_s, from_s[session_id]), None)
    found = (
        _decision(s, due[s.id], rules.of(s.request.resource_group), snapshot.now_s, warned_for_s.get(s.id, 0))
        for s in running
    )
    return tuple(one for one in found if one is not None)


def _groups(snapshot: Snapshot) -> list[str]:
    return sorted({session.request.resource_group for session in snapshot.sessions})


@dataclass(frozen=True, slots=True)
class _Due:
    """Why a session is to end, and from when on. ``limit_s`` is that of a lifetime, which may be short."""

    cause: EndCause
    at_s: int
    limit_s: int | None

    def grace_s(self, rules: Rules) -> int:
        # The warning of an hour's end cannot come a day ahead.
        return rules.grace_s if self.limit_s is None else min(rules.grace_s, self.limit_s // 2)


def _due(session: Session, rules: Rules, ledger: Ledger, now_s: int) -> _Due | None:
    """Return what the session is to be warned of now for itself, whatever others need."""
    found = []
    limit_s = lifetime_s(session, rules, ledger)
    if limit_s is not None and session.started_at_s is not None:
        due = _Due(EndCause.TIME_LIMIT, session.started_at_s + limit_s, limit_s)
        if now_s >= due.at_s - due.grace_s(rules) - WARNED_AHEAD_S:
            found.append(due)
    if rules.idle_after_s is not None and session.idle_since_s is not None:
        kept = session.kept_until_s is not None and now_s < session.kept_until_s
        if now_s >= session.idle_since_s + rules.idle_after_s and not kept:
            found.append(_Due(EndCause.IDLE, now_s, None))
    earliest = [(max(due.at_s, now_s + due.grace_s(rules)), CAUSES.index(due.cause), due) for due in found]
    standing = [due for due in found if due.cause is session.ends_cause]
    if standing and session.ends_at_s is not None:
        # The standing warning is not one of `earliest` any more: its grace began when it was given.
        earliest = [one for one in earliest if one[2] is not standing[0]]
        earliest.append((session.ends_at_s, CAUSES.index(standing[0].cause), standing[0]))
    return min(earliest, key=lambda one: one[:2])[2] if earliest else None


def lifetime_s(session: Session, rules: Rules, ledger: Ledger) -> int | None:
    """Return for how long a session may run: by its own limit, the rules' and its quotas', the shortest. Or None."""
    limits = session.time_limit_s, rules.max_lifetime_s, ledger.limit_s(session.request)
    return min((limit for limit in limits if limit is not None), default=None)


def preemptible_from_s(session: Session, rules: Rules) -> int:
    """Return the instant before which a running session is not ended for one of higher priority."""
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
    # Past, with some of its grace missing or its lifetime longer now; or far off, since the clock was set back.
    if past or session.ends_at_s > max(due.at_s, now_s + grace_s):
        return Warn(session.id, due.cause, max(due.at_s, now_s + missing_s))
    return None


def end_message(cause: EndCause, *, requeued: bool = False) -> str:
    """Return what the owner is told of a session that was ended."""
    match cause:
        case EndCause.TIME_LIMIT:
            return "the session's time was over, as its owner was warned"
        case EndCause.IDLE:
            return "the session was idle, and was not kept after the warning"
        case _:
            again = "; it waits at its old place in the queue" if requeued else ""
            return f"a session of higher priority needed the place, as its owner was warned{again}"


def warned(session: Session, decision: Warn | WithdrawWarning) -> Session:
    """Return the session with its owner warned, or not any more.

    Raises:
        StaleVersion: it does not run.
    """
    _check_running(session)
    if isinstance(decision, WithdrawWarning):
        return replace(session, ends_at_s=None, ends_cause=None)
    return replace(session, ends_at_s=decision.ends_at_s, ends_cause=decision.cause)


def terminating(session: Session, decision: End, *, now_s: int) -> Session:
    """Return the session TERMINATING.

    Raises:
        StaleVersion: it does not run, or was not warned that it would be ended by now, and for this.
    """
    _check_running(session)
    if session.ends_cause is not decision.cause or session.ends_at_s is None or session.ends_at_s > now_s:
        raise StaleVersion(f"session {session.id} was not warned that it is ended now ({decision.cause})")
    to = SessionState.TERMINATING
    return moved(session, to, now_s=now_s, cause=decision.cause, message=decision.message)


def requeued(session: Session, *, now_s: int) -> Session:
    """Return the session that takes the old one's place in the queue; the store gives it its id.

    It is held: nobody waits to launch it yet. Its submission is the old one's.
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
    )


def kept_while_idle(session: Session, until_s: int) -> Session:
    """Return the session with the owner's answer to a warning for being idle. A later instant is not taken back."""
    idle = session.ends_cause is EndCause.IDLE
    return replace(
        session,
        kept_until_s=max(until_s, session.kept_until_s or until_s),
        ends_at_s=None if idle else session.ends_at_s,
        ends_cause=None if idle else session.ends_cause,
    )


def extended(session: Session, by_s: int) -> Session:
    """Return the session with a longer time limit.

    A standing warning of the old one's end is of the new one's then: it is not given once more, with a grace of its own.
    """
    _check_running(session)
    ends_at_s = session.ends_at_s
    if ends_at_s is not None and session.ends_cause is EndCause.TIME_LIMIT:
        ends_at_s += by_s
    return replace(session, extended_s=session.extended_s + by_s, ends_at_s=ends_at_s)


def _check_running(session: Session) -> None:
    if session.state is not SessionState.RUNNING:
        raise StaleVersion(f"session {session.id} is {session.state}, and does not run")


class WarningAges:
    """For how long each warning has stood, measured on a clock that nobody sets."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, EndCause], float] = {}

    def warned_for_s(self, sessions: Sequence[Session], steady_s: float) -> Mapping[int, int]:
        """Return for how many whole seconds the warning of each session was seen to stand, at an instant of that clock.

        To be asked on every snapshot: a warning that one lacks begins anew. After a restart all of them do.
        """
        standing = [(s.id, s.ends_cause) for s in sessions if s.ends_cause is not None]
        self._since = {key: self._since.get(key, steady_s) for key in standing}
        return {key[0]: int(steady_s - since) for key, since in self._since.items()}
