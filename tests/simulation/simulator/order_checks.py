"""Checks of the queue's order: no session is overtaken, refused nodes are avoided, and promises are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fgpu_scheduler.core import orders, placement
from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.core.model import EndCause, Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.planner import Plan, Reservation, applied
from fgpu_scheduler.core.policies import Policy
from simulator.quota_checks import guaranteed, limit_s

S = SessionState

SURE_ENDS = (EndCause.TIME_LIMIT, EndCause.PREEMPTED)
"""The causes of ends that the owner cannot prevent; repeated here, independent of the product."""

LAUNCH_S, ENDING_S = 600, 60
"""How long a launch and an end may take for a promise to hold; repeated here, independent of the product.

Half of the time of an end is for the caller that ends the session, half for the engine.
"""


def overtaken(
    before: Mapping[int, Session], after: Iterable[Session], policy: Policy, last: Snapshot
) -> Iterator[str]:
    """In FIFO order no session is placed before a pending one ahead of it that is not held.

    With strict order this holds for all sessions; otherwise for sessions with the same request and the same longest run
    under the quotas of ``last``. Exceptions: a session that waits for a quota or was refused a node blocks no other,
    promised starts and guaranteed requests come first, and a session queued again may be overtaken by one that has waited
    longer.
    """
    waiting, placed = [], []
    for session in after:
        old = before.get(session.id)
        if policy.of(session.request.resource_group).order is not orders.fifo:
            continue
        if session.request.on_demand:
            continue
        if session.state is S.PENDING and not session.held and (old is None or not old.held):
            waiting.append(session)
        elif old is not None and old.state is S.PENDING and session.state is S.SCHEDULED:
            placed.append(session)
    for session in placed:
        own = policy.of(session.request.resource_group)
        for other in waiting:
            if (
                other.wait_reason in (WaitReason.QUOTA, WaitReason.CLUSTER)
                or session.promised_at_s is not None
                or guaranteed(session, last)
            ):
                continue
            if other.queued_at_s is not None and own.longest_wait_s is not None:
                # It ages from its second queueing, so others may be aged before it.
                continue
            if other.request.resource_group != session.request.resource_group or not _ahead(other, session):
                continue
            if _asked(other, last) == _asked(session, last):
                yield f"session {session.id} was placed before {other.id}, which asked for the same earlier"
            elif own.strict:
                yield f"session {session.id} was placed before {other.id}, which is ahead in strict order"


def refused_again(snapshot: Snapshot, decided: Plan) -> Iterator[str]:
    """No session is placed on a node that refused it recently: 30 s ago, doubled at each refusal up to 300 s."""
    sessions = {s.id: s for s in snapshot.sessions}
    for placed in decided.placed:
        for node in sessions[placed.session_id].refused:
            pause_s = min(30 * 2 ** (node.times - 1), 300)
            again = node.node_id == placed.placement.node_id
            if again and 0 <= snapshot.now_s - node.at_s < pause_s:
                yield f"session {placed.session_id} is put on {node.node_id} again, refused at {node.at_s}"


def less_liked(snapshot: Snapshot, decided: Plan) -> Iterator[str]:
    """No session is placed on a less preferred model while a more preferred one stays free to the end of the plan.

    Reserved capacity and models over a quota may be free without being available to the session.
    """
    sessions = {s.id: s for s in snapshot.sessions}
    kept = [one.placement.node_id for one in decided.decisions if isinstance(one, Reservation)]
    model_of = {d.uuid: d.model for node in snapshot.nodes for d in node.devices}
    left = [node for node in placement.free(applied(snapshot, decided)) if node.node.id not in kept]
    for placed in decided.placed:
        session = sessions[placed.session_id]
        models = session.request.gpu_models
        got = {model_of[share.device_uuid] for share in placed.placement.shares}
        if len(models) < 2 or not got or snapshot.quotas or session.request.on_demand:
            continue
        if len(got) > 1 or not got <= set(models):
            yield f"session {session.id} asked for one of {models}, and is put on {got}"
            continue
        refused = [node.node_id for node in session.refused]
        offered = tuple(node for node in left if node.node.id not in refused)
        for model in models[: models.index(min(got))]:
            only = replace(session.request, gpu_models=(model,))
            if placement.place(only, offered, score=placement.best_fit) is not None:
                yield f"session {session.id} is put on {got}, and {model}, which it likes more, is free"


def _asked(session: Session, last: Snapshot) -> tuple[object, ...]:
    asked = session.request
    return (
        asked.fgpu_milli,
        asked.cpu_milli,
        asked.memory_mib,
        asked.gpu_memory_mib,
        asked.compute_percent,
        asked.gpu_models,
        limit_s(session, last),
    )


def _ahead(one: Session, other: Session) -> bool:
    return (-one.request.priority, one.place) < (-other.request.priority, other.place)


class Promises:
    """Checks promised starts: none is later than promised, unless a failure or a session placed ahead voids it.

    These failures void all earlier promises: nodes, quotas or the clock changed; a session was refused its node, took
    longer to launch or end than a promise allows, ran on after its announced end, or had its warning withdrawn; a request
    was held, as after a restart of the Hub.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._made: dict[int, int] = {}
        self._void: dict[int, None] = {}
        self._since: dict[int, tuple[SessionState, int]] = {}
        """Each session's state, and since when it has it (monotonic time)."""

    def look(
        self, last: Snapshot, now: Snapshot, *, steady_s: int, passed_s: int, planned: bool
    ) -> Iterator[str]:
        """Compare two snapshots; ``passed_s`` is the real time between them, ``planned`` whether a plan was committed."""
        before = {s.id: s for s in last.sessions}
        after = {s.id: s for s in now.sessions}
        late = [
            s.request.resource_group
            for s in last.sessions
            if _comes_back(s, after.get(s.id))
            or self._late(s, last, steady_s, now.now_s)
            or _put_off(s, after.get(s.id))
            or _refused(s, after.get(s.id))
        ]
        self._follow(now, after, steady_s)
        if (
            (last.nodes, last.quotas) != (now.nodes, now.quotas)
            or now.now_s - last.now_s != passed_s
            or any(s.held and not before.get(s.id, s).held for s in now.sessions)
        ):
            self._break(self._made)
        for group in sorted({s.request.resource_group for s in now.sessions}):
            own = [s for s in now.sessions if s.request.resource_group == group]
            if group in late:
                self._break(i for i in self._made if i not in after or after[i] in own)
            for newcomer in (s for s in own if _comes(s, before)):
                self._break(
                    i
                    for i in self._made
                    if i in after
                    and after[i] in own
                    and (newcomer.request.on_demand or newcomer.request.priority > after[i].request.priority)
                )
        for session_id, promised_at_s in list(self._made.items()):
            session = after.get(session_id)
            if session is None or session.state is not S.PENDING:
                placed = session is not None and session.state is S.SCHEDULED
                self.kept += placed
                del self._made[session_id]
                self._void[session_id] = None
                if placed and now.now_s > promised_at_s and not planned:
                    yield f"session {session_id} was placed without a plan"
            elif planned and now.now_s >= promised_at_s:
                yield f"session {session_id} was promised a start at {promised_at_s} and waits on at {now.now_s}"

    def _follow(self, now: Snapshot, after: Mapping[int, Session], steady_s: int) -> None:
        for session in now.sessions:
            if self._since.get(session.id, (None, 0))[0] is not session.state:
                self._since[session.id] = session.state, steady_s
            if session.state is S.PENDING and session.promised_at_s is not None:
                if session.held:
                    self._void[session.id] = None
                if session.id not in self._void:
                    self._made.setdefault(session.id, session.promised_at_s)
        self._since = {i: since for i, since in self._since.items() if i in after}

    def _break(self, session_ids: Iterable[int]) -> None:
        for session_id in list(session_ids):
            self._made.pop(session_id, None)
            self._void[session_id] = None

    def _late(self, session: Session, last: Snapshot, steady_s: int, now_s: int) -> bool:
        """Return whether a session stayed too long in its last state, by real time or by the clock."""
        in_state_s = steady_s - self._since.get(session.id, (None, steady_s))[1]
        match session.state:
            case S.TERMINATING:
                return in_state_s > ENDING_S // 2
            case S.RUNNING | S.PARKED | S.RESUMING:
                in_state_s = max(in_state_s, now_s - (session.started_at_s or now_s))
                longest_s = limit_s(session, last)
                return _overdue(session, now_s) or (
                    longest_s is not None and in_state_s > longest_s + ENDING_S // 2
                )
            case S.SCHEDULED | S.PREPARING | S.PULLING:
                # The states of a launch share its time.
                scheduled_s = now_s - (session.scheduled_at_s or now_s)
                return in_state_s > LAUNCH_S // 3 or scheduled_s > LAUNCH_S
            case _:
                return False


def _put_off(before: Session, after: Session | None) -> bool:
    """Return whether a sure and announced end was postponed."""
    if (
        after is None
        or before.ends_at_s is None
        or before.ends_cause
        not in (
            EndCause.TIME_LIMIT,
            EndCause.PREEMPTED,
        )
    ):
        return False
    later = after.ends_at_s is None or after.ends_at_s > before.ends_at_s
    return after.state in UP and later


def _comes_back(before: Session, after: Session | None) -> bool:
    """Return whether a parked session claims its shares again, or has them back: it comes before all that wait."""
    if after is None or before.parked_at_s is None:
        return False
    claims = [s.wanted_at_s is not None and s.wait_reason is not WaitReason.QUOTA for s in (before, after)]
    return after.state is S.RESUMING or (after.state is S.PARKED and claims == [False, True])


def _refused(before: Session, after: Session | None) -> bool:
    return after is not None and after.refused != before.refused


def _overdue(session: Session, now_s: int) -> bool:
    """Return whether the session ran on after a sure and announced end, because the scheduler ended it late."""
    sure = session.ends_cause in SURE_ENDS
    return sure and session.ends_at_s is not None and session.ends_at_s + ENDING_S // 2 < now_s


def _comes(session: Session, before: Mapping[int, Session]) -> bool:
    """Return whether the session has become pending."""
    old = before.get(session.id)
    waits = session.state is S.PENDING and not session.held
    return waits and (old is None or old.held or old.state is not S.PENDING)
