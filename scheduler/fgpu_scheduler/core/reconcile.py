"""Compare the records of the store with the reports of the engines, and return how to heal each difference.

Observations are racy: a session may change while an engine answers. So the store is read before and after the
observation.

1. A container is *missing* if the earlier snapshot expects it: everything that ran then must still be there, and the
   session must be unchanged in the later snapshot.
2. A container is an *orphan* by the later snapshot, because a launch is committed before its first effect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fgpu_scheduler.core.lifecycle import ENDED, LAUNCHING, UP
from fgpu_scheduler.core.model import EndCause, Session, SessionState, Snapshot


@dataclass(frozen=True, slots=True)
class Observed:
    """One container or process as its engine reports it.

    ``handle`` is the launcher's own name for it. ``end_cause`` and ``message`` say why it is not alive.
    """

    node_id: str
    session_id: int
    attempt: int
    handle: str
    alive: bool
    end_cause: EndCause = EndCause.EXITED
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a container that belongs to no session, or to an earlier attempt of one."""

    observed: Observed
    why: str


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """A running session's process is gone: move it to TERMINATING. Its share is freed by a later `Finish`."""

    session_id: int
    attempt: int
    cause: EndCause
    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The container of a TERMINATING session is gone: free its share."""

    session_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The container of a TERMINATING session still exists: stop it again."""

    session_id: int
    observed: Observed


Healing = Remove | ProcessGone | Finish | Stop


def reconcile(
    before: Snapshot,
    after: Snapshot,
    observed: Sequence[Observed],
    *,
    reachable: Sequence[str],
    launching: Collection[int] = (),
) -> tuple[Healing, ...]:
    """Return how to heal each difference, sessions first, each in order of id or handle.

    ``reachable`` names the nodes whose engine answered; nothing is concluded about the others. ``launching`` are the
    sessions that this process was launching when ``before`` was read: the engine may create their container after the
    observation, so a missing container does not free their shares.
    """
    by_session: dict[int, list[Observed]] = {}
    for thing in observed:
        by_session.setdefault(thing.session_id, []).append(thing)
    now = {session.id: session for session in after.sessions}
    healings: list[Healing] = []
    for session in before.sessions:
        later = now.get(session.id)
        if (
            later is None
            or (later.state, later.attempt) != (session.state, session.attempt)
            or session.placement is None
            or session.placement.node_id not in reachable
        ):
            continue
        # A container of this session on another node is an orphan there, and says nothing about the session.
        there = (o for o in by_session.get(session.id, ()) if o.node_id == session.placement.node_id)
        own = sorted(there, key=lambda o: (o.attempt, o.handle))
        current = [o for o in own if o.attempt == session.attempt]
        if session.state in UP:
            if not any(o.alive for o in current):
                healings.append(_ended(session, current))
        elif session.state is SessionState.TERMINATING:
            if own:
                healings.extend(Stop(session.id, o) for o in own)
            elif session.id not in launching:
                healings.append(Finish(session.id))
    for thing in sorted(observed, key=lambda o: (o.session_id, o.attempt, o.handle)):
        why = orphan_reason(thing, now.get(thing.session_id))
        if why is not None:
            healings.append(Remove(thing, why))
    return tuple(healings)


def _ended(session: Session, current: Sequence[Observed]) -> ProcessGone:
    if current:
        last = current[-1]
        message = last.message or "the session's process ended"
        return ProcessGone(session.id, session.attempt, last.end_cause, message)
    message = "the session's container or process was removed outside JupyterHub"
    return ProcessGone(session.id, session.attempt, EndCause.EXITED, message)


def orphan_reason(thing: Observed, session: Session | None) -> str | None:
    """Return why a container belongs to no session, or None if it belongs to one."""
    if session is None or session.state in ENDED:
        return "its session has ended or never was"
    if session.placement is not None and thing.node_id != session.placement.node_id:
        return f"its session is on node {session.placement.node_id}"
    if session.state is SessionState.TERMINATING:
        return None  # Stop, above.
    if session.state not in (*LAUNCHING, *UP):
        return f"its session is {session.state} and has launched nothing"
    if thing.attempt != session.attempt:
        return f"it is of attempt {thing.attempt}, and its session is at attempt {session.attempt}"
    return None
