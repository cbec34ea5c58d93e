"""Whose place sessions of higher priority take: the fewest, of the lowest priority, the youngest.

Nobody is chosen in vain: only such sessions whose ends, together, let a blocked one start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from math import comb

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import EndCause, Placement, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.placement import NodeFree
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.shares import Shape, shape

TRIES = 500
"""On each node so many sets of victims are tried for the fewest; beyond that the largest are taken first."""

SERVED = 32
"""For so many blocked sessions at a time others are ended."""


def victims(
    snapshot: Snapshot,
    plan: Plan,
    ledger: Ledger,
    *,
    groups: Sequence[str],
    ending: Collection[int],
    spared: Collection[int] = (),
) -> tuple[int, ...]:
    """Return, in order, the running sessions of these resource groups that have to end for those of higher priority.

    ``ending`` are the sessions that end for another reason; what they and the TERMINATING ones give back is waited
    for. The ``spared`` ones are not chosen. Who was warned already is chosen again if that will do.
    """
    sessions = {s.id: s for s in snapshot.sessions}
    left = {node.node.id: node for node in placement.free(snapshot)}
    for placed in plan.placed:
        session = sessions[placed.session_id]
        ledger.take(session, placed.placement)
        left[placed.placement.node_id] = _taken(left, session.request, placed.placement)
    gone = [s for s in snapshot.sessions if s.state is SessionState.TERMINATING or s.id in ending]
    for session in gone:
        _returned(left, session)
    could = [
        s
        for s in snapshot.sessions
        if s.state is SessionState.RUNNING
        and s.id not in ending
        and s.id not in spared
        and s.request.resource_group in groups
    ]
    chosen: list[int] = []
    served = 0
    misfits: list[tuple[Shape, int]] = []
    for session in _blocked(snapshot, plan, groups):
        if served == SERVED:
            break
        asked = session.request
        alike = shape(asked), asked.priority
        if alike in misfits or not ledger.allows(session):
            continue
        lower = [s for s in could if s.request.priority < asked.priority and s.id not in chosen]
        found = _for(asked, left, lower)
        if found is None:
            misfits.append(alike)
            continue
        where, ended = found
        for victim in ended:
            _returned(left, victim)
            chosen.append(victim.id)
        left[where.node_id] = _taken(left, asked, where)
        ledger.take(session, where)
        served += 1
    return tuple(sorted(chosen))


def _blocked(snapshot: Snapshot, plan: Plan, groups: Sequence[str]) -> Iterable[Session]:
    placed = {one.session_id for one in plan.placed}
    sessions = {s.id: s for s in snapshot.sessions}
    for decision in plan.decisions:
        session = sessions[decision.session_id]
        # Whoever was refused a node a moment ago might be refused the one that others are ended for, too.
        waits = not session.held and not session.left_out(snapshot.now_s)
        if session.id not in placed and waits and session.request.resource_group in groups:
            yield session


def _for(
    asked: Request, left: dict[str, NodeFree], lower: Sequence[Session]
) -> tuple[Placement, list[Session]] | None:
    """Return where a request fits after which sessions have ended, on the node where the fewest have to."""
    best: tuple[tuple[int, ...], str, Placement, list[Session]] | None = None
    for node_id in sorted(left):
        node = left[node_id]
        if node.node.resource_group != asked.resource_group:
            continue
        there = [s for s in lower if s.placement is not None and s.placement.node_id == node_id]
        ended = _fewest(asked, node, sorted(there, key=_first))
        if ended is not None:
            where = _fits(asked, node, ended)
            assert where is not None
            key = (len(ended), *(value for s in sorted(ended, key=_first) for value in _first(s)))
            if best is None or (key, node_id) < best[:2]:
                best = key, node_id, where, ended
    return None if best is None else best[2:]


def _first(session: Session) -> tuple[int, ...]:
    """Who is taken first of equally many: the warned, then of the lowest priority, then the youngest."""
    warned = session.ends_cause is EndCause.PREEMPTED
    return (0 if warned else 1, session.request.priority, -(session.started_at_s or 0), -session.id)


def _fewest(asked: Request, node: NodeFree, there: Sequence[Session]) -> list[Session] | None:
    """Return as few of the sessions as possible whose ends let the request start on the node; [] where none has to."""
    if _fits(asked, node, ()) is not None:
        return []
    if _fits(asked, node, there) is None:
        return None
    warned = [s for s in there if s.ends_cause is EndCause.PREEMPTED]
    if warned and _fits(asked, node, warned) is not None:
        # A better choice would have to be warned first, and these were warned in vain.
        there = warned
    tries = TRIES
    for number in range(1, len(there)):
        tries -= comb(len(there), number)
        if tries < 0:
            return _device_after_device(asked, node, there)
        for some in combinations(there, number):
            if _fits(asked, node, some) is not None:
                return list(some)
    return list(there)


def _device_after_device(asked: Request, node: NodeFree, there: Sequence[Session]) -> list[Session]:
    """Return few sessions whose ends let the request start: one device is cleared, then the one with the fewest."""
    on: dict[str, list[Session]] = {device.device.uuid: [] for device in node.devices}
    for session in sorted(there, key=_size, reverse=True):
        for share in session.placement.shares if session.placement else ():
            on.setdefault(share.device_uuid, []).append(session)
    fewest = sorted(on, key=lambda uuid: (len(on[uuid]), uuid))
    best = list(there)
    for first in fewest:
        others = [uuid for uuid in fewest if uuid != first]
        ended: dict[int, Session] = {}
        for session in (*(s for uuid in (first, *others) for s in on[uuid]), *there):
            ended[session.id] = session
            if len(ended) >= len(best) or _fits(asked, node, ended.values()) is not None:
                break
        if len(ended) < len(best):
            best = _without_the_needless(asked, node, list(ended.values()))
    return best


def _size(session: Session) -> tuple[int, ...]:
    shares = session.placement.shares if session.placement else ()
    return (sum(share.fgpu_milli for share in shares), session.started_at_s or 0, session.id)


def _without_the_needless(asked: Request, node: NodeFree, ended: Sequence[Session]) -> list[Session]:
    """Return a set of which none can be left out: who was added last is let go first."""
    found = list(ended)
    for session in reversed(ended):
        rest = [s for s in found if s is not session]
        if _fits(asked, node, rest) is not None:
            found = rest
    return found


def _fits(asked: Request, node: NodeFree, ended: Iterable[Session]) -> Placement | None:
    for session in ended:
        assert session.placement is not None
        node = placement.returned(node, session.request, session.placement)
    found = placement.place(asked, (node,), score=placement.best_fit)
    return None if found is None else found[0]


def _returned(left: dict[str, NodeFree], session: Session) -> None:
    where = session.placement
    if session.state in HOLDING and where is not None and where.node_id in left:
        left[where.node_id] = placement.returned(left[where.node_id], session.request, where)


def _taken(left: dict[str, NodeFree], asked: Request, where: Placement) -> NodeFree:
    after = placement.after(left[where.node_id], asked, where)
    assert after is not None, "what was planned on this snapshot fits it"
    return after
