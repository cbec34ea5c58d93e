"""Which running sessions end so that blocked requests of higher priority, or guaranteed ones, can start.

1. For every node, compute its free capacity after the ends that happen anyway, and the sessions there that may be ended
   (`_Node`). Placements of the plan are claimed.
2. For each blocked request, in queue order and within its quotas, compute for each node a lower bound of the sessions
   that must end (`_Candidates.least`), of those that may end for it (`PreemptionRights`). Visit the nodes in the order of
   that bound and find the smallest set of sessions there (`_fewest`), until no other node can be better.
3. Of equally small sets take sessions that were warned already, then the lowest priority, then the youngest.

A session is chosen only if the ends together let a blocked request start: no session ends in vain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from math import comb
from typing import NamedTuple

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.guarantees import PreemptionRights, Within, rights_of, within_guarantees
from fgpu_scheduler.core.lifecycle import taken_placement
from fgpu_scheduler.core.model import (
    EndCause,
    NodeState,
    Placement,
    Request,
    Session,
    SessionState,
    Snapshot,
)
from fgpu_scheduler.core.placement import DeviceFree, NodeFree
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.shares import RequestShape, accepts_model, is_explicit, shape
from fgpu_scheduler.core.usage import taken_milli

#: The sets of sessions that are tried on each node for the fewest; beyond that the largest sessions are taken first.
TRIES = 500
#: The blocked requests for which sessions end at a time.
SERVED = 32
#: A session on several devices counts for each as a part of this number, which has many divisors.
PART = 840

#: Sorts the sessions of a node: those that end first sort first.
_Order = tuple[int, int, int, int]


class _Node(NamedTuple):
    """The free amounts of a node after the ends that happen anyway, and the sessions that may be ended there."""

    left: NodeFree
    may_end: Sequence[Session]


class _Offer(NamedTuple):
    """How many sessions must end on a node, and their orders; the lowest offer wins.

    Without ``ended``, the sessions, it is only a lower bound.
    """

    number: int
    orders: list[_Order]
    node_id: str
    ended: Sequence[Session] | None = None


def victims(
    snapshot: Snapshot,
    plan: Plan,
    ledger: Ledger,
    *,
    groups: Sequence[str],
    ending: Collection[int],
    spared: Collection[int] = (),
) -> tuple[int, ...]:
    """Return, in order, the running sessions of these resource groups that have to end for the requests in its queue.

    ``ending`` are the sessions that end for another reason: requests wait for their shares, and for those of TERMINATING
    sessions. The ``spared`` ones are not chosen. Sessions that were warned already are chosen again if they suffice.
    """
    waiting = {number: s for queue in snapshot.index.waiting.values() for number, s in queue.items()}
    there = _nodes(snapshot, groups, frozenset(ending), frozenset(spared))
    within = within_guarantees(snapshot)
    for placed in plan.placed:
        session, where = waiting[placed.session_id], placed.placement
        ledger.take(session, where)
        node_id = where.node_id
        if node_id in there:
            left = placement.claimed_if_fits(there[node_id].left, session.request, where)
            assert left is not None, "a placement of the plan fits the plan's snapshot"
            there[node_id] = _Node(left, there[node_id].may_end)
    nodes = _Nodes(there, within)
    served = 0
    unservable: set[tuple[RequestShape, PreemptionRights]] = set()
    for session in _blocked(snapshot, plan, groups, waiting):
        if served == SERVED:
            break
        asked = session.request
        own = rights_of(session, ledger)
        key = shape(asked), own
        if key in unservable or not ledger.allows(session):
            continue
        found = nodes.best(asked, own)
        if found is None:
            unservable.add(key)
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
        # The cluster that refused a session one node might refuse it the node that other sessions end for, too.
        waits = not session.held and not session.refusing_nodes(snapshot.now_s)
        waits = waits and not session.request.on_demand
        if session.id not in placed and waits and session.request.resource_group in groups:
            yield session


def _nodes(
    snapshot: Snapshot, groups: Sequence[str], ending: frozenset[int], spared: frozenset[int]
) -> dict[str, _Node]:
    """Return the nodes of these resource groups by id, in the order of their ids."""
    found = {}
    for node in snapshot.nodes:
        if node.resource_group not in groups:
            continue
        there = snapshot.index.on_node.get(node.id, {})
        left, may_end = placement.free_on_node(node, there), []
        for session in there.values():
            where = taken_placement(session)
            if where is None:
                continue
            if session.state is SessionState.TERMINATING or session.id in ending:
                left = placement.released(left, session.request, where)
            elif (
                session.state is SessionState.RUNNING
                and session.id not in spared
                and session.request.resource_group in groups
            ):
                may_end.append(session)
        found[node.id] = _Node(left, sorted(may_end, key=_order))
    return found


def _order(session: Session) -> _Order:
    warned = session.ends_cause is EndCause.PREEMPTED
    return (0 if warned else 1, session.request.priority, -(session.started_at_s or 0), -session.id)


class _Nodes:
    """The nodes of all groups while sessions are chosen for one request after the other."""

    def __init__(self, nodes: dict[str, _Node], within: Within) -> None:
        self._nodes = nodes
        self._within = within
        self._candidates: dict[tuple[str, PreemptionRights], _Candidates] = {}
        #: For each shape and rights the offers by node id; None: the ends of all candidates there are not enough.
        self._offers: dict[tuple[RequestShape, PreemptionRights], dict[str, _Offer | None]] = {}
        self.ended: set[int] = set()

    def best(self, asked: Request, own: PreemptionRights) -> tuple[Placement, Sequence[Session]] | None:
        """Return the placement that needs the fewest ends, and the sessions to end; None if no ends are enough."""
        form = shape(asked)
        offers = self._offers.setdefault((form, own), {})
        for node_id, node in self._nodes.items():
            if node_id not in offers and node.left.node.resource_group == asked.resource_group:
                candidates = self._candidates_on(node_id, own)
                least = candidates.least(form)
                orders = list(map(_order, candidates.sessions[:least]))
                offers[node_id] = None if least is None else _Offer(least, orders, node_id)
        while (best := min(filter(None, offers.values()), default=None)) is not None:
            candidates = self._candidates_on(best.node_id, own)
            if best.ended is not None:
                where = _fits(asked, candidates.left, best.ended)
                assert where is not None
                return where, best.ended
            ended = _fewest(asked, candidates, best.number)
            offers[best.node_id] = (
                None
                if ended is None
                else best._replace(number=len(ended), orders=sorted(map(_order, ended)), ended=ended)
            )
        return None

    def _candidates_on(self, node_id: str, own: PreemptionRights) -> _Candidates:
        found = self._candidates.get((node_id, own))
        if found is None:
            left, may_end = self._nodes[node_id]
            sessions = [s for s in may_end if own.may_end(s, self._within)]
            found = self._candidates[node_id, own] = _Candidates(left, sessions)
        return found

    def give(self, asked: Request, where: Placement, ended: Sequence[Session]) -> None:
        """Claim the placement, and count these sessions as ended."""
        self.ended.update(session.id for session in ended)
        left, may_end = self._nodes[where.node_id]
        rest = placement.claimed_if_fits(_without(left, ended), asked, where)
        assert rest is not None, "the placement was found on these free amounts"
        self._nodes[where.node_id] = _Node(rest, [s for s in may_end if s.id not in self.ended])
        self._candidates = {key: one for key, one in self._candidates.items() if key[0] != where.node_id}
        for offers in self._offers.values():
            offers.pop(where.node_id, None)


class _Gpu(NamedTuple):
    """A GPU that takes sessions, and the most that is free on it after none, one, two... of its candidates have ended.

    ``clear`` are the ends that empty it, in units of PART; None if other sessions hold a share of it.
    """

    free: DeviceFree
    fgpu_milli: list[int]
    memory_mib: list[int]
    clear: int | None


@dataclass(frozen=True)
class _Candidates:
    """The free amounts of a node and the sessions on it that may end for a request, in the order in which they end."""

    left: NodeFree
    sessions: Sequence[Session]

    @cached_property
    def _machine(self) -> tuple[list[int], list[int]]:
        """The most CPU and memory that is free after none, one, two... of the sessions have ended."""
        return (
            _sums(self.left.cpu_milli, [s.request.cpu_milli for s in self.sessions]),
            _sums(self.left.memory_mib, [s.request.memory_mib for s in self.sessions]),
        )

    @cached_property
    def _gpus(self) -> list[_Gpu]:
        """Computed when needed: on many nodes of a full cluster the CPU is already too little."""
        taken: dict[str, list[tuple[int, int, int]]] = {}
        for session in self.sessions:
            shares = session.placement.shares if session.placement else ()
            for share in shares:
                part = share.fgpu_milli, share.memory_mib, PART // len(shares)
                taken.setdefault(share.device_uuid, []).append(part)
        found = []
        for free in self.left.devices if self.left.node.state is NodeState.READY else ():
            own = taken.get(free.device.uuid, [])
            if not free.device.cordoned:
                fgpu_milli = _sums(free.fgpu_milli, [part[0] for part in own])
                memory_mib = _sums(free.memory_mib, [part[1] for part in own])
                is_clear = free.shares + len(own) == free.device.max_shares
                found.append(
                    _Gpu(free, fgpu_milli, memory_mib, sum(part[2] for part in own) if is_clear else None)
                )
        return found

    @cached_property
    def _capacities(self) -> tuple[int, int]:
        """The smallest and the largest capacity of the GPUs."""
        found = [gpu.free.device.capacity_milli for gpu in self._gpus] or [1]
        return min(found), max(found)

    def least(self, asked: RequestShape) -> int | None:
        """Return a lower bound of the ends that a request needs; None if the end of all sessions is not enough."""
        cpu_milli, memory_mib = self._machine
        least = max(bisect_left(cpu_milli, asked.cpu_milli), bisect_left(memory_mib, asked.memory_mib))
        of_gpus = self._least_of_gpus(asked) if least <= len(self.sessions) else None
        return None if of_gpus is None else max(least, of_gpus)

    def _least_of_gpus(self, asked: RequestShape) -> int | None:
        if asked.fgpu_milli == 0 and not is_explicit(asked):
            return 0
        gpus = self._gpus
        if asked.gpu_models:
            gpus = [gpu for gpu in gpus if accepts_model(asked, gpu.free.device.model)]
        smallest, largest = self._capacities
        needed = -(-asked.fgpu_milli // largest)
        if needed > 1:
            clear = sorted(gpu.clear for gpu in gpus if gpu.clear is not None)[:needed]
            return -(-sum(clear) // PART) if len(clear) == needed else None
        if is_explicit(asked):
            wanted, amounts = asked.gpu_memory_mib or 0, [gpu.memory_mib for gpu in gpus]
        else:
            wanted, amounts = min(asked.fgpu_milli, smallest), [gpu.fgpu_milli for gpu in gpus]
        return min([bisect_left(sums, wanted) for sums in amounts if sums[-1] >= wanted], default=None)

    def may_fit(self, asked: Request, ended: Iterable[Session]) -> bool:
        """Return whether enough GPUs have enough free fGPU after these ends."""
        gives: dict[str, int] = {}
        for session in ended:
            for share in session.placement.shares if session.placement else ():
                gives[share.device_uuid] = gives.get(share.device_uuid, 0) + share.fgpu_milli
        return placement.may_fit(self.left, asked, gives)


def _sums(free: int, gives: list[int]) -> list[int]:
    """Return the most that is free after none, one, two... of the sessions have ended that give these amounts back."""
    return list(accumulate(sorted(gives, reverse=True), initial=free))


def _fewest(asked: Request, candidates: _Candidates, least: int) -> list[Session] | None:
    """Return a smallest set of sessions that must end for the request on the node; fewer than ``least`` never suffice."""
    node, sessions = candidates.left, candidates.sessions
    if least == 0 and _starts(asked, node, ()):
        return []
    warned = [s for s in sessions if s.ends_cause is EndCause.PREEMPTED]
    if warned and _starts(asked, node, warned):
        # A better choice would have to be warned first, and these would have been warned in vain.
        sessions = warned
    tries, checked = TRIES, False
    for number in range(1, len(sessions)):
        tries -= comb(len(sessions), number)
        if number > least and not checked:
            # Most nodes need exactly the least: only for the others is it checked whether all sessions are enough.
            if not _starts(asked, node, sessions):
                return None
            checked = True
        if tries < 0:
            break
        if number < least:
            continue
        for some in combinations(sessions, number):
            if candidates.may_fit(asked, some) and _starts(asked, node, some):
                return list(some)
    if not _starts(asked, node, sessions):
        return None
    return _device_after_device(asked, node, sessions) if tries < 0 else list(sessions)


def _device_after_device(asked: Request, node: NodeFree, sessions: Sequence[Session]) -> list[Session]:
    """Return few sessions that must end for the request: empty one device, then the one with the fewest sessions."""
    on: dict[str, list[Session]] = {device.device.uuid: [] for device in node.devices}
    for session in sorted(sessions, key=_size, reverse=True):
        for share in session.placement.shares if session.placement else ():
            on.setdefault(share.device_uuid, []).append(session)
    fewest = sorted(on, key=lambda uuid: (len(on[uuid]), uuid))
    best = list(sessions)
    for cleared in fewest:
        others = [uuid for uuid in fewest if uuid != cleared]
        ended: dict[int, Session] = {}
        for session in (*(s for uuid in (cleared, *others) for s in on[uuid]), *sessions):
            ended[session.id] = session
            if len(ended) >= len(best) or _starts(asked, node, ended.values()):
                break
        if len(ended) < len(best):
            best = list(ended.values())
            for session in reversed(list(ended.values())):
                rest = [s for s in best if s is not session]
                if _starts(asked, node, rest):
                    best = rest
    return best


def _size(session: Session) -> tuple[int, ...]:
    return (taken_milli(session), session.started_at_s or 0, session.id)


def _fits(asked: Request, node: NodeFree, ended: Iterable[Session]) -> Placement | None:
    found = placement.place(asked, (_without(node, ended),), score=placement.best_fit)
    return None if found is None else found[0]


def _starts(asked: Request, node: NodeFree, ended: Iterable[Session]) -> bool:
    return placement.fits_on(_without(node, ended), asked)


def _without(node: NodeFree, ended: Iterable[Session]) -> NodeFree:
    for session in ended:
        assert session.placement is not None
        node = placement.released(node, session.request, session.placement)
    return node
