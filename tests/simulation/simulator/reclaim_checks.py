"""Checks of reclaiming: no session is ended without its warning, its grace period and a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.core.model import EndCause, Session, SessionState, Snapshot
from fgpu_scheduler.core.reclaim import AllRules
from simulator.quota_checks import guaranteed, limit_s, within

S = SessionState
RECLAIMED = (EndCause.TIME_LIMIT, EndCause.IDLE, EndCause.PREEMPTED)


class Warned:
    """Checks warnings, and remembers since when each stands (monotonic time)."""

    def __init__(self, rules: AllRules) -> None:
        self._rules = rules
        self._since: dict[int, tuple[EndCause, int]] = {}
        self.reclaimed = 0

    def look(
        self,
        last: Snapshot,
        before: Mapping[int, Session],
        after: Mapping[int, Session],
        *,
        now_s: int,
        steady_s: int,
    ) -> Iterator[str]:
        """Compare two states of all sessions; ``last`` is the first one's snapshot, ``now_s`` the second one's time."""
        for session_id, session in after.items():
            old = before.get(session_id)
            ends = old is not None and old.state in UP and session.state is S.TERMINATING
            if old is not None and ends and session.end_cause in RECLAIMED:
                self.reclaimed += 1
                yield from self._unwarned(last, old, session, steady_s)
                yield from self._groundless(last, old, session, now_s)
                yield from self._requeued(old, session, before, after)
            elif session.replaces is not None and old is None:
                replaced = after.get(session.replaces)
                if replaced is None or replaced.end_cause is not EndCause.PREEMPTED:
                    yield f"session {session_id} replaces {session.replaces}, which nobody's priority ended"
        for session_id, session in after.items():
            cause = session.ends_cause if session.state in UP else None
            if cause is None:
                self._since.pop(session_id, None)
            elif self._since.get(session_id, (None, 0))[0] is not cause:
                self._since[session_id] = cause, steady_s

    def _unwarned(self, last: Snapshot, old: Session, new: Session, steady_s: int) -> Iterator[str]:
        cause, since_s = self._since.get(old.id, (None, steady_s))
        grace_s = self._grace_s(last, old, new.end_cause)
        if cause is not new.end_cause:
            yield f"session {old.id} was ended ({new.end_cause}), and its owner was warned of {cause}"
        elif steady_s - since_s < grace_s:
            yield f"session {old.id} was ended {steady_s - since_s} s after its warning; the grace is {grace_s} s"

    def _grace_s(self, last: Snapshot, session: Session, cause: EndCause | None) -> int:
        rules = self._rules.of(session.request.resource_group)
        if cause is not EndCause.TIME_LIMIT:
            return rules.grace_s
        longest_s = self._limit_s(last, session)
        return rules.grace_s if longest_s is None else min(rules.grace_s, longest_s // 2)

    def _limit_s(self, last: Snapshot, session: Session) -> int | None:
        return limit_s(session, last, self._rules.of(session.request.resource_group).max_lifetime_s)

    def _groundless(self, last: Snapshot, old: Session, new: Session, now_s: int) -> Iterator[str]:
        group = old.request.resource_group
        match new.end_cause:
            case EndCause.IDLE:
                rules = self._rules.of(group)
                away_s = now_s - (now_s if old.parked_at_s is None else old.parked_at_s)
                if rules.park_after_s is not None:
                    if old.state is not S.PARKED or rules.parked_for_s is None or away_s < rules.parked_for_s:
                        yield f"session {old.id} was ended for being parked, and was it for {away_s} s"
                elif old.idle_since_s is None:
                    yield f"session {old.id} was ended for being idle, and it is not"
            case EndCause.TIME_LIMIT:
                if self._limit_s(last, old) is None:
                    yield f"session {old.id} was ended by a time limit, and has none"
            case EndCause.PREEMPTED:
                if not self._rules.of(group).preempt:
                    yield f"session {old.id} was pre-empted, and that is off in {group}"
                elif not any(
                    s.state is S.PENDING
                    and not s.held
                    and s.request.resource_group == group
                    and goes_first(s, old, last)
                    for s in last.sessions
                ):
                    yield f"session {old.id} was pre-empted, and nobody of higher priority waits"
                ran_s = now_s - (old.started_at_s or 0)
                least_s = self._rules.of(group).min_runtime_s or 0
                if ran_s < least_s:
                    yield f"session {old.id} was pre-empted after {ran_s} s; it may run for {least_s} s"

    def _requeued(
        self, old: Session, new: Session, before: Mapping[int, Session], after: Mapping[int, Session]
    ) -> Iterator[str]:
        wanted = new.end_cause is EndCause.PREEMPTED and self._rules.of(old.request.resource_group).requeue
        found = [s for i, s in after.items() if s.replaces == old.id and i not in before]
        if len(found) != wanted:
            yield f"session {old.id} ended ({new.end_cause}) and is queued again {len(found)} times"
        for session in found:
            same = (session.request, session.place, session.submitted_at_s) == (
                old.request,
                old.place,
                old.submitted_at_s,
            )
            if not same or session.state is not S.PENDING or not session.held:
                yield f"session {session.id} replaces {old.id}, and not at its place: {session}"


def goes_first(waits: Session, runs: Session, last: Snapshot) -> bool:
    """Return whether a session may end for a waiting one: by priority or guarantee, and not within its own guarantee."""
    both = {*waits.request.account.split("/")} & {*runs.request.account.split("/")}
    if within(runs, last) - both:
        return False
    explicit = waits.request.gpu_memory_mib is not None
    covered = guaranteed(waits, last) - both and (explicit or waits.request.fgpu_milli > 0)
    return waits.request.priority > runs.request.priority or bool(covered)
