"""Compare what the store expects with what the engines report, and say how to heal the difference.

Observations are racy: a session may move while an engine answers. So the store is read before and after
the observation. That something is *missing* is judged by the earlier reading (whatever ran then must still
be there), that something is a *ghost* by the later one (a launch is committed before its first effect).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fgpu_scheduler.core.lifecycle import ENDED, LAUNCHING
from fgpu_scheduler.core.model import EndCause, Session, SessionState, Snapshot


@dataclass(frozen=True, slots=True)
class Observed:
    """One launched thing (container, process) as its engine reports it.

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
    """Remove something that belongs to no session, or to an earlier attempt of one."""

    observed: Observed
    why: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A running session's process is gone: move it to TERMINATING. Its share is freed by a later `Finish`."""

    session_id: int
    attempt: int
    cause: EndCause
    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left of a TERMINATING session: free its share."""

    session_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """A TERMINATING session's container still stands: stop it again."""

    session_id: int
    observed: Observed


Healing = Remove | Ended | Finish | Stop


def reconcile(
    before: Snapshot,
    after: Snapshot,
    observed: Sequence[Observed],
    *,
    reachable: Sequence[str],
    launching: Collection[int] = (),
) -> tuple[Healing, ...]:
    """Return what heals the difference, sessions first, each in order of id or handle.

    ``reachable`` names the nodes whose engine answered; of the others nothing is concluded. ``launching``
    are the sessions whose launch was under way in this process when ``before`` was read: an engine that was
    asked for a container may make it after the observation, so that its absence frees nothing.
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
        # What another machine says that it runs of this session is a ghost there, and says nothing of the session.
        there = (o for o in by_session.get(session.id, ()) if o.node_id == session.placement.node_id)
        own = sorted(there, key=lambda o: (o.attempt, o.handle))
        current = [o for o in own if o.attempt == session.attempt]
        if session.state is SessionState.RUNNING:
            if not any(o.alive for o in current):
                healings.append(_ended(session, current))
        elif session.state is SessionState.TERMINATING:
            if own:
                healings.extend(Stop(session.id, o) for o in own)
            elif session.id not in launching:
                healings.append(Finish(session.id))
    for thing in sorted(observed, key=lambda o: (o.session_id, o.attempt, o.handle)):
        why = ghostly(thing, now.get(thing.session_id))
        if why is not None:
            healings.append(Remove(thing, why))
    return tuple(healings)


def _ended(session: Session, current: Sequence[Observed]) -> Ended:
    if current:
        last = current[-1]
        message = last.message or "the session's process ended"
        return Ended(session.id, session.attempt, last.end_cause, message)
    message = "the session's container or process was removed outside JupyterHub"
    return Ended(session.id, session.attempt, EndCause.EXITED, message)


def ghostly(thing: Observed, session: Session | None) -> str | None:
    """Return why ``thing`` belongs to nobody, or None if it is some session's own."""
    if session is None or session.state in ENDED:
        return "its session has ended or never was"
    if session.placement is not None and thing.node_id != session.placement.node_id:
        return f"its session is on node {session.placement.node_id}"
    if session.state is SessionState.TERMINATING:
        return None  # Stop, above.
    if session.state not in (*LAUNCHING, SessionState.RUNNING):
        return f"its session is {session.state} and has launched nothing"
    if thing.attempt != session.attempt:
        return f"it is of attempt {thing.attempt}, and its session is at attempt {session.attempt}"
    return None
