"""Everything that decides which change of state is legal. The table in the documentation is generated from this one.

PREPARING is committed before the first effect of a launch. After it every end passes TERMINATING, because only a
container that its reachable engine reports as exited or absent frees the GPU. A session that its engine refused to
run, and has removed again, goes back to PENDING.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter

from fgpu_scheduler.core.model import (
    EndCause,
    Placement,
    RefusedNode,
    Session,
    SessionState,
    Size,
    WaitReason,
)
from fgpu_scheduler.core.run_lengths import PastRun
from fgpu_scheduler.errors import InvalidTransition

S = SessionState

LEGAL: dict[SessionState, tuple[SessionState, ...]] = {
    S.PENDING: (S.SCHEDULED, S.CANCELLED),
    S.SCHEDULED: (S.PREPARING, S.PENDING, S.CANCELLED),
    S.PREPARING: (S.PULLING, S.RUNNING, S.PARKED, S.PENDING, S.TERMINATING),
    S.PULLING: (S.RUNNING, S.PARKED, S.PENDING, S.TERMINATING),
    S.RUNNING: (S.PARKED, S.TERMINATING),
    S.PARKED: (S.RESUMING, S.TERMINATING),
    S.RESUMING: (S.RUNNING, S.PARKED, S.TERMINATING),
    S.TERMINATING: (S.TERMINATED, S.ERROR),
    S.TERMINATED: (),
    S.ERROR: (),
    S.CANCELLED: (),
}

#: The component that moves a session into each state, for the documentation.
MOVED_BY: dict[SessionState, str] = {
    S.PENDING: "the scheduler, when a request is admitted or its node is lost before the launch; the spawner, when the "
    "cluster refuses the node",
    S.SCHEDULED: "the planner, when a placement is committed",
    S.PREPARING: "the spawner, before its first effect",
    S.PULLING: "the spawner, when the engine has to fetch the image",
    S.RUNNING: "the spawner, when the server answers; the Hub, when the GPU memory of a resuming session is back",
    S.PARKED: "the Hub, when an idle session's GPU memory is in the host's memory; the spawner, when the server of "
    "a session on demand answers",
    S.RESUMING: "the planner, when the shares that a parked session wants back are free",
    S.TERMINATING: "the spawner or reconcile, at the first sign of an end",
    S.TERMINATED: "the spawner or reconcile, when the engine reports the container gone",
    S.ERROR: "the spawner or reconcile, when the engine reports a failed container gone",
    S.CANCELLED: "the spawner or the queue's deadline, before anything was started",
}

#: The states in which a session has a placement. It holds its shares unless it is parked: `holds_shares`.
HOLDING: tuple[SessionState, ...] = (
    S.SCHEDULED,
    S.PREPARING,
    S.PULLING,
    S.RUNNING,
    S.PARKED,
    S.RESUMING,
    S.TERMINATING,
)
#: The states in which its server answers.
UP: tuple[SessionState, ...] = (S.RUNNING, S.PARKED, S.RESUMING)
WAITING: tuple[SessionState, ...] = (S.PENDING,)
LAUNCHING: tuple[SessionState, ...] = (S.PREPARING, S.PULLING)
ENDED: tuple[SessionState, ...] = (S.TERMINATED, S.ERROR, S.CANCELLED)
LIVE: tuple[SessionState, ...] = (S.PENDING, *HOLDING)
#: The states in which a session is its server's current one; a server has at most one. TERMINATING is left out: a server
#: may be requested again while its last container stops.
SERVING: tuple[SessionState, ...] = (S.PENDING, S.SCHEDULED, S.PREPARING, S.PULLING, *UP)

#: The causes after which a session ends in ERROR and not in TERMINATED.
FAILURES: tuple[EndCause, ...] = (
    EndCause.NODE_LOST,
    EndCause.PULL_FAILED,
    EndCause.LAUNCH_FAILED,
    EndCause.OOM,
    EndCause.ISOLATION_FAILED,
    EndCause.DISK_LIMIT,
)

#: The most refusing nodes that are stored with a session, and the most characters of each engine's message.
MOST_REFUSED, MOST_WORDS = 20, 500


def holds_shares(session: Session) -> bool:
    """Return whether a session holds the shares of its placement."""
    return session.state in HOLDING and session.parked_at_s is None


def wants_shares(session: Session) -> bool:
    """Return whether a parked session wants its shares back."""
    return session.wanted_at_s is not None and session.state is S.PARKED


def claims_shares(session: Session) -> bool:
    """Return whether the shares of a parked session are kept free for it: it wants them, and its quotas allow it."""
    return wants_shares(session) and session.wait_reason is not WaitReason.QUOTA


def taken_placement(session: Session) -> Placement | None:
    """Return what no other session can have because of this one: its placement, without shares while it is parked.

    The shares are there while it claims them. None if it takes nothing.
    """
    where = session.placement
    if where is None or session.state not in HOLDING:
        return None
    free = session.parked_at_s is not None and not claims_shares(session)
    return Placement(where.node_id, ()) if free else where


def moved(
    session: Session,
    to: SessionState,
    *,
    now_s: int,
    cause: EndCause | None = None,
    message: str | None = None,
) -> Session:
    """Return ``session`` in state ``to``, with the fields that follow from it.

    The first end cause stays, with the message that came with it, which replaces the text of an earlier warning. The
    placement stays too, as a record of what the session held, unless it returns to the queue. A session on demand is
    parked from its placement on.

    Raises:
        InvalidTransition: the life cycle has no such change.
    """
    if to not in LEGAL[session.state]:
        legal = ", ".join(LEGAL[session.state]) or "none: it has ended"
        raise InvalidTransition(
            f"session {session.id}: {session.state} -> {to} is not legal (legal: {legal})"
        )
    if to in (S.TERMINATING, S.CANCELLED) and cause is None:
        raise InvalidTransition(f"session {session.id}: {to} needs an end_cause")
    ends = session.end_cause is None and to in (S.TERMINATING, S.CANCELLED)
    parks = to is S.PARKED or (to is S.SCHEDULED and session.request.on_demand)
    # What kept it from its GPU is over when it runs.
    before = None if to is S.RUNNING and session.state is S.RESUMING else session.message
    sizes = session.sizes
    if to is S.RESUMING:
        sizes = with_size(session, Size(now_s, 0, 0, 0, 0))
    return replace(
        session,
        state=to,
        wait_reason=session.wait_reason if to is S.PENDING else None,
        held=session.held if to not in ENDED else False,
        placement=None if to is S.PENDING else session.placement,
        scheduled_at_s=now_s if to is S.SCHEDULED else None if to is S.PENDING else session.scheduled_at_s,
        started_at_s=now_s if to in UP and session.started_at_s is None else session.started_at_s,
        ended_at_s=now_s if to in ENDED else None,
        end_cause=session.end_cause or (cause if to in (S.TERMINATING, *ENDED) else None),
        message=message if ends else before or message,
        refused=session.refused if to in (S.PENDING, S.SCHEDULED, *LAUNCHING) else (),
        sizes=sizes,
        parked_at_s=now_s if parks else None if to in (S.PENDING, S.RESUMING) else session.parked_at_s,
        park_asked_at_s=None if to is S.PARKED else session.park_asked_at_s,
        park_refused=None if to is S.PARKED else session.park_refused,
        wanted_at_s=None if to in (S.RUNNING, S.PARKED) else session.wanted_at_s,
        parked_mib=0 if to is S.RUNNING else session.parked_mib,
        # A session that wants its GPU is not idle.
        idle_since_s=None if to is S.RESUMING else session.idle_since_s,
    )


#: The most amounts that are stored with a session; the oldest ones are then stored as their mean.
MOST_SIZES = 100


def with_size(session: Session, size: Size) -> tuple[Size, ...]:
    """Return the amounts that a session held, with one that ends now; the two oldest become one if there are too many."""
    sizes = (*session.sizes, size)
    if len(sizes) <= MOST_SIZES:
        return sizes
    first, second, *others = sizes
    since_s = session.scheduled_at_s or 0
    before_s, after_s = max(0, first.until_s - since_s), max(0, second.until_s - first.until_s)
    total_s = max(1, before_s + after_s)

    def mean(of: Callable[[Size], int]) -> int:
        return round((of(first) * before_s + of(second) * after_s) / total_s)

    fields = ("fgpu_milli", "gpu_millionths", "memory_mib", "compute_percent")
    return (Size(second.until_s, *(mean(attrgetter(name)) for name in fields)), *others)


def returned_to_queue(session: Session, words: str, *, now_s: int) -> Session:
    """Return a launching session to its position in the queue, because its engine refused it the node with these words.

    Raises:
        InvalidTransition: the life cycle has no such change.
    """
    waits = moved(session, S.PENDING, now_s=now_s)
    assert session.placement is not None
    node_id = session.placement.node_id
    times = 1 + max((node.times for node in session.refused if node.node_id == node_id), default=0)
    others = (node for node in session.refused if node.node_id != node_id)
    refused = RefusedNode(node_id, now_s, times, " ".join(words.split())[:MOST_WORDS])
    return replace(
        waits,
        wait_reason=WaitReason.CLUSTER,
        launched=None,
        refused=(*others, refused)[-MOST_REFUSED:],
    )


def final_state(cause: EndCause | None) -> SessionState:
    """Return the state in which a TERMINATING session with this cause ends."""
    return S.ERROR if cause in FAILURES else S.TERMINATED


def past_runs(sessions: Iterable[Session]) -> list[PastRun]:
    """Return the runs of the sessions that have run and ended."""
    return [
        PastRun(
            s.request.resource_group,
            s.request.user,
            s.request.image,
            s.ended_at_s - s.started_at_s,
            s.ended_at_s,
            s.id,
        )
        for s in sessions
        if s.started_at_s is not None and s.ended_at_s is not None
    ]
