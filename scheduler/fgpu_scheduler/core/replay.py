"""A history of requests, run again under another policy: the real planner, driven by events in virtual time.

It is pure. A session holds its shares for as long as it did, from its new start. Requests come when they came, whatever
happened to earlier ones of the same user. The planner runs after each arrival, end and cancellation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil
from statistics import median

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.admission import Caps, quota_refusals
from fgpu_scheduler.core.lifecycle import past_runs
from fgpu_scheduler.core.model import (
    Node,
    Placement,
    Quota,
    Request,
    RequestCount,
    Session,
    SessionState,
    Snapshot,
    Usage,
)
from fgpu_scheduler.core.planner import Policy, committed, plan
from fgpu_scheduler.core.quota import Ledger, over_pending
from fgpu_scheduler.core.request_counts import count_requests, counted_ids
from fgpu_scheduler.core.run_lengths import PastRuns
from fgpu_scheduler.core.units import MILLI
from fgpu_scheduler.core.usage import decayed, fgpu_seconds


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a history.

    The session holds its shares for ``length_s``. Its user cancels it after ``patience_s`` in the queue; None: never.
    """

    request: Request
    submitted_at_s: int
    length_s: int
    patience_s: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job. ``taken_milli`` is the fGPU x 1000 that it held.

    ``placed_at_s`` is None if it never started, and ``left_at_s`` is when it ended or was cancelled. ``refused`` jobs
    never entered the queue.
    """

    job: Job
    placed_at_s: int | None
    left_at_s: int
    taken_milli: int = 0
    refused: bool = False

    @property
    def waited_s(self) -> int:
        """The seconds that it was in the queue."""
        until_s = self.left_at_s if self.placed_at_s is None else self.placed_at_s
        return max(0, until_s - self.job.submitted_at_s)


def replay(
    jobs: Iterable[Job],
    nodes: Iterable[Node],
    policy: Policy,
    *,
    quotas: Iterable[Quota] = (),
    seen: Callable[[Snapshot], None] | None = None,
) -> tuple[Outcome, ...]:
    """Run the jobs through the planner, and return the result of each, in order of submission.

    Every node takes sessions, whatever its state. Jobs of one instant come in the given order. A job is refused if no
    node could ever hold it, if a quota never lets it start, or over a pending quota; a quota's lifetime ends a
    session. ``seen`` is called with each snapshot before the planner decides. A session's id is its place in the
    order of submission, from 1.
    """
    return _Replay(jobs, nodes, policy, quotas, seen).outcomes()


_END, _GIVE_UP = 0, 1


class _Replay:
    def __init__(
        self,
        jobs: Iterable[Job],
        nodes: Iterable[Node],
        policy: Policy,
        quotas: Iterable[Quota],
        seen: Callable[[Snapshot], None] | None = None,
    ) -> None:
        self._seen = seen
        self._jobs = sorted(jobs, key=lambda job: job.submitted_at_s)
        opened = (node.opened() for node in nodes)
        self._nodes = tuple(sorted(opened, key=lambda node: node.id))
        self._policy = policy
        self._quotas = tuple(quotas)
        #: In the order of the ids.
        self._live: dict[int, Session] = {}
        self._waiting = 0
        self._due: list[tuple[int, int, int]] = []
        self._outcomes: dict[int, Outcome] = {}
        #: The usage of ended sessions by user and resource group, and the instant to which it is decayed.
        self._used: dict[tuple[str, str, str], tuple[float, int]] = {}
        self._fits: dict[Request, bool] = {}
        self._lifetimes = Ledger(Snapshot(0, 0, self._nodes, quotas=self._quotas))
        self._version = 0
        self._asked: tuple[RequestCount, ...] = ()
        self._runs = PastRuns()

    def outcomes(self) -> tuple[Outcome, ...]:
        """Run all events, and return the result of each job."""
        coming = 0
        now_s = 0
        while coming < len(self._jobs) or self._due:
            instants = [self._due[0][0]] if self._due else []
            if coming < len(self._jobs):
                instants.append(self._jobs[coming].submitted_at_s)
            now_s = min(instants)
            while self._due and self._due[0][0] == now_s:
                _, kind, session_id = heappop(self._due)
                self._leaves(session_id, kind, now_s)
            while coming < len(self._jobs) and self._jobs[coming].submitted_at_s == now_s:
                coming += 1
                if (ids := counted_ids(coming)) != counted_ids(coming - 1):
                    self._asked = count_requests(self._job(i).request for i in ids)
                self._comes(coming, now_s)
            if self._waiting:
                self._plan(now_s)
        for session_id in self._live:
            # No event is left that could start it: a quota of 0, for example.
            self._outcomes[session_id] = Outcome(self._job(session_id), None, now_s)
        return tuple(self._outcomes[i] for i in range(1, len(self._jobs) + 1))

    def _job(self, session_id: int) -> Job:
        return self._jobs[session_id - 1]

    def _comes(self, session_id: int, now_s: int) -> None:
        job = self._job(session_id)
        if not self._could_ever_start(job.request) or self._over_pending(job.request):
            self._outcomes[session_id] = Outcome(job, None, now_s, refused=True)
            return
        self._live[session_id] = Session(session_id, job.request, SessionState.PENDING, now_s)
        self._waiting += 1
        if job.patience_s is not None:
            heappush(self._due, (now_s + job.patience_s, _GIVE_UP, session_id))

    def _could_ever_start(self, asked: Request) -> bool:
        shape = replace(asked, server_name="", image="", time_limit_s=None, priority=0)
        if not self._quotas:
            # Without quotas the user does not matter.
            shape = replace(shape, user="", groups=())
        if shape not in self._fits:
            caps = Caps(fgpu_step_milli=MILLI)
            self._fits[shape] = placement.could_ever_fit(shape, self._nodes) and not quota_refusals(
                shape, 0, self._nodes, caps, self._quotas
            )
        return self._fits[shape]

    def _over_pending(self, asked: Request) -> bool:
        if all(quota.max_pending is None for quota in self._quotas):
            return False
        waiting = [s.request for s in self._live.values() if s.state is SessionState.PENDING]
        return over_pending(self._quotas, waiting, [asked]) is not None

    def _leaves(self, session_id: int, kind: int, now_s: int) -> None:
        session = self._live.get(session_id)
        waits = session is not None and session.state is SessionState.PENDING
        if session is None or (kind == _GIVE_UP and not waits):
            return
        del self._live[session_id]
        self._waiting -= waits
        if waits:
            self._outcomes[session_id] = Outcome(self._job(session_id), None, now_s)
        else:
            self._runs = self._runs.then(past_runs([replace(session, ended_at_s=now_s)]))
            asked = session.request
            own = asked.user, asked.resource_group, asked.account
            self._used[own] = self._left_of(own, now_s) + fgpu_seconds(session, now_s), now_s

    def _left_of(self, own: tuple[str, str, str], now_s: int) -> float:
        amount, at_s = self._used.get(own, (0.0, now_s))
        half_life_s = self._policy.of(own[1]).half_life_s
        return decayed(amount, age_s=now_s - at_s, half_life_s=half_life_s)

    def _usage(self, now_s: int) -> tuple[Usage, ...]:
        used = ((own, round(self._left_of(own, now_s))) for own in sorted(self._used))
        return tuple(Usage(user, group, amount, account) for (user, group, account), amount in used)

    def _plan(self, now_s: int) -> None:
        self._version += 1
        snapshot = Snapshot(
            now_s,
            self._version,
            self._nodes,
            tuple(self._live.values()),
            self._usage(now_s),
            self._quotas,
            self._asked,
            self._runs,
        )
        if self._seen is not None:
            self._seen(snapshot)
        for _, session in committed(plan(snapshot, self._policy), snapshot, now_s=now_s):
            self._live[session.id] = session
            if session.placement is not None:
                self._starts(session, session.placement, now_s)

    def _starts(self, session: Session, where: Placement, now_s: int) -> None:
        job = self._job(session.id)
        running = replace(session, state=SessionState.RUNNING, attempt=1, started_at_s=now_s)
        self._live[session.id] = running
        self._waiting -= 1
        limit_s = self._lifetimes.limit_s(job.request)
        ends_at_s = now_s + (job.length_s if limit_s is None else min(job.length_s, limit_s))
        heappush(self._due, (ends_at_s, _END, session.id))
        self._outcomes[session.id] = Outcome(job, now_s, ends_at_s, where.fgpu_milli)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a replay.

    Waits are in seconds, of all jobs that entered the queue, until their start or cancellation. ``utilisation`` is
    the part of the devices' fGPU x time that was held. ``fairness`` is Jain's index over the users of the part of
    their sessions' fGPU x time, waiting and holding, that was holding: 1 if all are served alike.
    """

    sessions: int
    started: int
    never_started: int
    refused: int
    mean_wait_s: float
    median_wait_s: float
    p95_wait_s: float
    longest_wait_s: float
    utilisation: float
    fairness: float


def summary(outcomes: Iterable[Outcome], *, capacity_milli: int, from_s: int, until_s: int) -> Summary:
    """Return the figures of the jobs submitted from ``from_s`` on; utilisation counts all jobs until ``until_s``."""
    everything = list(outcomes)
    found = [o for o in everything if o.job.submitted_at_s >= from_s]
    queued = [o for o in found if not o.refused]
    waits = sorted(o.waited_s for o in queued)
    taken = sum(_taken_milli_s(o, from_s, until_s) for o in everything)
    there = capacity_milli * max(0, until_s - from_s)
    started = sum(1 for o in queued if o.placed_at_s is not None)
    return Summary(
        sessions=len(found),
        started=started,
        never_started=len(queued) - started,
        refused=len(found) - len(queued),
        mean_wait_s=sum(waits) / len(waits) if waits else 0.0,
        median_wait_s=float(median(waits)) if waits else 0.0,
        p95_wait_s=float(waits[ceil(0.95 * len(waits)) - 1]) if waits else 0.0,
        longest_wait_s=float(waits[-1]) if waits else 0.0,
        utilisation=taken / there if there else 0.0,
        fairness=jain(_served(queued)),
    )


def _taken_milli_s(outcome: Outcome, from_s: int, until_s: int) -> int:
    if outcome.placed_at_s is None:
        return 0
    return outcome.taken_milli * max(0, min(outcome.left_at_s, until_s) - max(outcome.placed_at_s, from_s))


def _served(outcomes: Sequence[Outcome]) -> list[float]:
    """Return for each user the part of their sessions' fGPU x time that was holding."""
    taken: dict[str, int] = {}
    there: dict[str, int] = {}
    for outcome in outcomes:
        job = outcome.job
        # A job that never started held nothing; its request gives the amount.
        amount = outcome.taken_milli or job.request.fgpu_milli or 1
        lasted_s = 0 if outcome.placed_at_s is None else max(0, outcome.left_at_s - outcome.placed_at_s)
        user = job.request.user
        taken[user] = taken.get(user, 0) + amount * lasted_s
        there[user] = there.get(user, 0) + amount * (lasted_s + outcome.waited_s)
    return [taken[user] / there[user] for user in sorted(there) if there[user]]


def jain(amounts: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all amounts are equal, 1/n if one user has everything."""
    squares = sum(amount * amount for amount in amounts)
    return sum(amounts) ** 2 / (len(amounts) * squares) if squares else 1.0
