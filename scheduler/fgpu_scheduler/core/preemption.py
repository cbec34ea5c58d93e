"""Whose place sessions of higher priority take: the fewest, of the lowest priority, the youngest.

Nobody is chosen in vain: only such sessions whose ends, together, let a blocked one start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import combinations, count
from math import comb

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import EndCause, Placement, Request, Session, Snapshot
from fgpu_scheduler.core.placement import NodeFree
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.preemption_candidates import (
    Candidates,
    NodeCandidates,
    Offer,
    PreemptionCandidates,
    first,
)
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.shares import RequestShape, shape

TRIES = 500
"""On each node so many sets of victims are tried for the fewest; beyond that the largest are taken first."""

SERVED = 32
"""For so many blocked sessions at a time others are ended."""


_Entry = tuple[Offer, int, Candidates, list[Session] | None]
"""What a node offers, a serial number, and who has to end; None while that is only the least that it could be."""


def victims(
    snapshot: Snapshot,
    plan: Plan,
    ledger: Ledger,
    *,
    groups: Sequence[str],
    ending: Collection[int],
    spared: Collection[int] = (),
    clearings: PreemptionCandidates | None = None,
) -> tuple[int, ...]:
    """Return, in order, the running sessions of these resource groups that have to end for those of higher priority.

    ``ending`` are the sessions that end for another reason; what they and the TERMINATING ones give back is waited
    for. The ``spared`` ones are not chosen. Who was warned already is chosen again if that will do. With the
    ``clearings`` of earlier rounds they are the same, sooner.
    """
    waiting = {number: s for line in snapshot.index.waiting.values() for number, s in line.items()}
    there = (clearings or PreemptionCandidates()).of(snapshot, groups=groups, ending=ending, spared=spared)
    for placed in plan.placed:
        session = waiting[placed.session_id]
        ledger.take(session, placed.placement)
        node_id = placed.placement.node_id
        if node_id in there:
            left = placement.after(there[node_id].left, session.request, placed.placement)
            assert left is not None, "what was planned on this snapshot fits it"
            there[node_id] = there[node_id].then(left, ())
    nodes = _Nodes(there)
    served = 0
    misfits: list[tuple[RequestShape, int]] = []
    for session in _blocked(snapshot, plan, groups, waiting):
        if served == SERVED:
            break
        asked = session.request
        alike = shape(asked), asked.priority
        if alike in misfits or not ledger.allows(session):
            continue
        found = nodes.best(asked)
        if found is None:
            misfits.append(alike)
            continue
        where, ended = found
        nodes.give(asked, where, ended)
        ledger.take(session, where)
        served += 1
    return tuple(sorted(nodes.ended))


def _blocked(
    snapshot: Snapshot, plan: Plan, groups: Sequence[str], waiting: Mapping[int, Session]
) -> Iterable[Session]:
    placed = {one.session_id for one in plan.placed}
    for decision in plan.decisions:
        session = waiting[decision.session_id]
        # Whoever was refused a node a moment ago might be refused the one that others are ended for, too.
        waits = not session.held and not session.left_out(snapshot.now_s)
        if session.id not in placed and waits and session.request.resource_group in groups:
            yield session


class _Nodes:
    """What is left of each node, and who could be ended there."""

    def __init__(self, clearings: dict[str, NodeCandidates]) -> None:
        self._there = clearings
        self._rooms: dict[tuple[str, int], dict[str, Candidates]] = {}
        """Those of a resource group for requests of a priority, by node."""
        self._heaps: dict[tuple[RequestShape, int], tuple[list[_Entry], int]] = {}
        """What nodes offer to requests of a shape and priority, and how many of the changes that knows of."""
        self._changed: list[str] = []
        self._serial = count()
        self.ended: set[int] = set()

    def best(self, asked: Request) -> tuple[Placement, list[Session]] | None:
        """Return where a request fits after which sessions have ended, on the node where the fewest have to.

        Nodes are looked at in the order of the best that could be found there, as long as that beats what was found.
        """
        alike = shape(asked), asked.priority
        rooms = self._rooms_for(asked)
        heap, known = self._heaps.get(alike, ([], None))
        changed = () if known is None else dict.fromkeys(self._changed[known:])
        new = rooms.values() if known is None else [rooms[node_id] for node_id in changed if node_id in rooms]
        found = [
            (offer, next(self._serial), candidates, None)
            for candidates in new
            if (offer := candidates.offer(alike[0])) is not None
        ]
        if known is None:
            heap = [*found]
            heapify(heap)
        else:
            for entry in found:
                heappush(heap, entry)
        self._heaps[alike] = heap, len(self._changed)
        while heap:
            (least, _, node_id), _, candidates, ended = heap[0]
            stands = candidates is rooms[node_id]
            if stands and ended is not None:
                where = _fits(asked, candidates.left, ended)
                assert where is not None
                return where, ended
            heappop(heap)
            if (
                stands
                and (ended := candidates.fewest(alike[0], partial(_fewest, asked, candidates, least)))
                is not None
            ):
                offer = len(ended), sorted(map(first, ended)), node_id
                heappush(heap, (offer, next(self._serial), candidates, ended))
        return None

    def _rooms_for(self, asked: Request) -> dict[str, Candidates]:
        key = asked.resource_group, asked.priority
        if key not in self._rooms:
            self._rooms[key] = {
                node_id: there.candidates(asked.priority)
                for node_id, there in self._there.items()
                if there.left.node.resource_group == asked.resource_group
            }
        return self._rooms[key]

    def give(self, asked: Request, where: Placement, ended: Sequence[Session]) -> None:
        """Count the place as taken, and these sessions as ended."""
        self.ended.update(session.id for session in ended)
        there = self._there[where.node_id]
        left = placement.after(_without(there.left, ended), asked, where)
        assert left is not None, "what was planned on this snapshot fits it"
        there = self._there[where.node_id] = there.then(left, self.ended)
        for (_, priority), rooms in self._rooms.items():
            if where.node_id in rooms:
                rooms[where.node_id] = there.candidates(priority)
        self._changed.append(where.node_id)


def _fewest(asked: Request, candidates: Candidates, least: int) -> list[Session] | None:
    """Return as few of the sessions as possible whose ends let the request start on the node; [] where none has to.

    Fewer than ``least`` are not enough.
    """
    node, there = candidates.left, candidates.there
    if least == 0 and _starts(asked, node, ()):
        return []
    warned = [s for s in there if s.ends_cause is EndCause.PREEMPTED]
    if warned and _starts(asked, node, warned):
        # A better choice would have to be warned first, and these were warned in vain.
        there = warned
    tries, checked = TRIES, False
    for number in range(1, len(there)):
        tries -= comb(len(there), number)
        if number > least and not checked:
            # Most nodes need no more than the least: whether all together are enough is asked of the others only.
            if not _starts(asked, node, there):
                return None
            checked = True
        if tries < 0:
            break
        if number < least:
            continue
        for some in combinations(there, number):
            if candidates.devices.may_fit(asked, some) and _starts(asked, node, some):
                return list(some)
    if not _starts(asked, node, there):
        return None
    return _device_after_device(asked, node, there) if tries < 0 else list(there)


def _device_after_device(asked: Request, node: NodeFree, there: Sequence[Session]) -> list[Session]:
    """Return few sessions whose ends let the request start: one device is cleared, then the one with the fewest."""
    on: dict[str, list[Session]] = {device.device.uuid: [] for device in node.devices}
    for session in sorted(there, key=_size, reverse=True):
        for share in session.placement.shares if session.placement else ():
            on.setdefault(share.device_uuid, []).append(session)
    fewest = sorted(on, key=lambda uuid: (len(on[uuid]), uuid))
    best = list(there)
    for cleared in fewest:
        others = [uuid for uuid in fewest if uuid != cleared]
        ended: dict[int, Session] = {}
        for session in (*(s for uuid in (cleared, *others) for s in on[uuid]), *there):
            ended[session.id] = session
            if len(ended) >= len(best) or _starts(asked, node, ended.values()):
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
        if _starts(asked, node, rest):
            found = rest
    return found


def _fits(asked: Request, node: NodeFree, ended: Iterable[Session]) -> Placement | None:
    found = placement.place(asked, (_without(node, ended),), score=placement.best_fit)
    return None if found is None else found[0]


def _starts(asked: Request, node: NodeFree, ended: Iterable[Session]) -> bool:
    return next(placement.placements(_without(node, ended), asked), None) is not None


def _without(node: NodeFree, ended: Iterable[Session]) -> NodeFree:
    for session in ended:
        assert session.placement is not None
        node = placement.released(node, session.request, session.placement)
    return node
