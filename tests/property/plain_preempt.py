"""Reference for choosing victims: tries every blocked request on every node, with every set of its sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import comb

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import EndCause, Placement, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.placement import NodeFree
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.preemption import SERVED
from fgpu_scheduler.core.quota import Ledger


def plain_victims(
    snapshot: Snapshot, plan: Plan, *, tries: int, spared: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return what `victims` must return, for all resource groups, with at most ``tries`` on each node."""
    sessions = {s.id: s for s in snapshot.sessions}
    ledger = Ledger(snapshot)
    left = {node.node.id: node for node in placement.free(snapshot)}
    for one in plan.placed:
        ledger.take(sessions[one.session_id], one.placement)
        asked = sessions[one.session_id].request
        left[one.placement.node_id] = placement.claimed(left[one.placement.node_id], asked, one.placement)
    for session in snapshot.sessions:
        if session.state is SessionState.TERMINATING and session.placement is not None:
            node_id = session.placement.node_id
            left[node_id] = placement.released(left[node_id], session.request, session.placement)
    could = [s for s in snapshot.sessions if s.state is SessionState.RUNNING and s.id not in spared]
    placed = [one.session_id for one in plan.placed]
    blocked = [sessions[d.session_id] for d in plan.decisions if d.session_id not in placed]
    chosen: list[int] = []
    served = 0
    for session in blocked:
        if served == SERVED or session.held or not ledger.allows(session):
            continue
        asked = session.request
        lower = [s for s in could if s.request.priority < asked.priority and s.id not in chosen]
        found = _on_any(asked, left, lower, tries)
        if found is not None:
            where, ended = found
            for victim in ended:
                assert victim.placement is not None
                left[where.node_id] = placement.released(
                    left[where.node_id], victim.request, victim.placement
                )
                chosen.append(victim.id)
            left[where.node_id] = placement.claimed(left[where.node_id], asked, where)
            ledger.take(session, where)
            served += 1
    return tuple(sorted(chosen))


def _on_any(
    asked: Request, left: dict[str, NodeFree], lower: Sequence[Session], tries: int
) -> tuple[Placement, list[Session]] | None:
    found = []
    for node_id, node in left.items():
        there = [s for s in lower if s.placement is not None and s.placement.node_id == node_id]
        ended = _fewest(asked, node, sorted(there, key=_first), tries)
        if ended is not None:
            where = _fits(asked, node, ended)
            assert where is not None
            found.append((len(ended), [_first(s) for s in sorted(ended, key=_first)], node_id, where, ended))
    return min(found)[3:] if found else None


def _first(session: Session) -> tuple[int, ...]:
    warned = session.ends_cause is EndCause.PREEMPTED
    return (0 if warned else 1, session.request.priority, -(session.started_at_s or 0), -session.id)


def _fewest(asked: Request, node: NodeFree, there: Sequence[Session], tries: int) -> list[Session] | None:
    if _fits(asked, node, ()) is not None:
        return []
    if _fits(asked, node, there) is None:
        return None
    warned = [s for s in there if s.ends_cause is EndCause.PREEMPTED]
    if warned and _fits(asked, node, warned) is not None:
        there = warned
    for number in range(1, len(there)):
        tries -= comb(len(there), number)
        if tries < 0:
            return _device_after_device(asked, node, there)
        for some in combinations(there, number):
            if _fits(asked, node, some) is not None:
                return list(some)
    return list(there)


def _device_after_device(asked: Request, node: NodeFree, there: Sequence[Session]) -> list[Session]:
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
    found = list(ended)
    for session in reversed(ended):
        rest = [s for s in found if s is not session]
        if _fits(asked, node, rest) is not None:
            found = rest
    return found


def _fits(asked: Request, node: NodeFree, ended: Iterable[Session]) -> Placement | None:
    for session in ended:
        assert session.placement is not None
        node = placement.released(node, session.request, session.placement)
    found = placement.place(asked, (node,), score=placement.best_fit)
    return None if found is None else found[0]
