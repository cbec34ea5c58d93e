"""Everything that decides which change of state is legal. The table in the documentation is generated from this one.

PREPARING is committed before the first effect of a launch. After it every end passes TERMINATING, because only a
container that its reachable engine reports as exited or absent frees the GPU. A session that its engine refused to
run, and has removed again, goes back to PENDING.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fgpu_scheduler.core.model import EndCause, RefusedNode, Session, SessionState, WaitReason
from fgpu_scheduler.core.run_lengths import PastRun
from fgpu_scheduler.errors import InvalidTransition

S = SessionState

LEGAL: dict[SessionState, tuple[SessionState, ...]] = {
    S.PENDING: (S.SCHEDULED, S.CANCELLED),
    S.SCHEDULED: (S.PREPARING, S.PENDING, S.CANCELLED),
    S.PREPARING: (S.PULLING, S.RUNNING, S.PENDING, S.TERMINATING),
    S.PULLING: (S.RUNNING, S.PENDING, S.TERMINATING),
    S.RUNNING: (S.TERMINATING,),
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
    S.RUNNING: "the spawner, when the server answers",
    S.TERMINATING: "the spawner or reconcile, at the first sign of an end",
    S.TERMINATED: "the spawner or reconcile, when the engine reports the container gone",
    S.ERROR: "the spawner or reconcile, when the engine reports a failed container gone",
    S.CANCELLED: "the spawner or the queue's deadline, before anything was started",
}

#: The states in which, and only in which, a session holds its shares.
HOLDING: tuple[SessionState, ...] = (S.SCHEDULED, S.PREPARING, S.PULLING, S.RUNNING, S.TERMINATING)
WAITING: tuple[SessionState, ...] = (S.PENDING,)
LAUNCHING: tuple[SessionState, ...] = (S.PREPARING, S.PULLING)
ENDED: tuple[SessionState, ...] = (S.TERMINATED, S.ERROR, S.CANCELLED)
LIVE: tuple[SessionState, ...] = (S.PENDING, *HOLDING)
#: The states in which a session is its server's current one; a server has at most one. TERMINATING is left out: a server
#: may be requested again while its last container stops.
SERVING: tuple[SessionState, ...] = (S.PENDING, S.SCHEDULED, S.PREPARING, S.PULLING, S.RUNNING)

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


def check(session_id: int, current: SessionState, to: SessionState) -> None:
    """Raise `InvalidTransition` unless ``current -> to`` is legal."""
    if to not in LEGAL[current]:
        legal = ", ".join(LEGAL[current]) or "none: it has ended"
        raise InvalidTransition(f"session {session_id}: {current} -> {to} is not legal (legal: {legal})")


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
    placement stays too, as a record of what the session held, unless it returns to the queue.

    Raises:
        InvalidTransition: the life cycle has no such change.
    """
    check(session.id, session.state, to)
    if to in (S.TERMINATING, S.CANCELLED) and cause is None:
        raise InvalidTransition(f"session {session.id}: {to} needs an end_cause")
    ends = session.end_cause is None and to in (S.TERMINATING, S.CANCELLED)
    return replace(
        session,
        state=to,
        wait_reason=session.wait_reason if to is S.PENDING else None,
        held=session.held if to not in ENDED else False,
        placement=None if to is S.PENDING else session.placement,
        scheduled_at_s=now_s if to is S.SCHEDULED else None if to is S.PENDING else session.scheduled_at_s,
        started_at_s=now_s if to is S.RUNNING else session.started_at_s,
        ended_at_s=now_s if to in ENDED else None,
        end_cause=session.end_cause or (cause if to in (S.TERMINATING, *ENDED) else None),
        message=message if ends else session.message or message,
        refused=session.refused if to in (S.PENDING, S.SCHEDULED, *LAUNCHING) else (),
    )


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
