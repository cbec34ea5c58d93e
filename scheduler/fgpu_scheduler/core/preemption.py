"""Which running sessions end so that blocked requests of higher priority, or guaranteed ones, can start.

1. For every node, compute its free capacity after the ends that happen anyway, and the sessions there that may be ended
   (`_Node`). Placements of the plan are claimed.
2. For each blocked request, in queue order and within its quotas, compute for each node the least number of sessions that
   must end (`_Candidates.offer`), of those that may end for it (`PreemptionRights`). Visit the nodes in the order of that
   bound and find the smallest set of sessions there (`_fewest`), until no other node can be better.
3. Of equally small sets take sessions that were warned already, then the lowest priority, then the youngest.

A session is chosen only if the ends together let a blocked request start: no session ends in vain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, count
from math import comb

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
from fgpu_scheduler.core.placement import NodeFree
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.returning import claimed_on_demand
from fgpu_scheduler.core.shares import RequestShape, is_explicit, shape

#: The sets of sessions that are tried on each node for the fewest; beyond that the largest sessions are taken first.
TRIES = 500
#: The blocked requests for which sessions end at a time.
SERVED = 32
#: A session on several devices counts for each as a part of this number, which has many divisors.
PART = 840

#: Sorts the sessions of a node: those that end first sort first.
_Order = tuple[int, int, int, int]
#: The least number of sessions that must end on a node, the order of the first of them, and the node's id. The lowest
#: wins.
_Offer = tuple[int, list[_Order], str]


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
        on_demand = session.request.on_demand
        ledger.take(session, None if on_demand else where)
        node_id = where.node_id
        if node_id in there:
            claimed = claimed_on_demand if on_demand else placement.claimed_if_fits
            left = claimed(there[node_id].left, session.request, where)
            assert left is not None, "a placement of the plan fits the plan's snapshot"
            there[node_id] = there[node_id].then(left, ())
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
        found[node.id] = _Node(left, may_end)
    return found


def _order(session: Session) -> _Order:
    warned = session.ends_cause is EndCause.PREEMPTED
    return (0 if warned else 1, session.request.priority, -(session.started_at_s or 0), -session.id)


class _Node:
    """The free amounts of a node after the ends that happen anyway, and the sessions that may be ended there."""

    __slots__ = ("_may_end", "left")

    def __init__(self, left: NodeFree, may_end: Iterable[Session]) -> None:
        self.left = left
        self._may_end = sorted(may_end, key=_order)

    def candidates(self, own: PreemptionRights, within: Within) -> _Candidates:
        """Return the node for requests with these rights."""
        return _Candidates(self.left, [s for s in self._may_end if own.may_end(s, within)])

    def then(self, left: NodeFree, ended: Collection[int]) -> _Node:
        """Return the node with other free amounts, after these sessions have ended."""
        return _Node(left, [session for session in self._may_end if session.id not in ended])


class _Nodes:
    """The nodes of all groups while sessions are chosen for one request after the other."""

    def __init__(self, nodes: dict[str, _Node], within: Within) -> None:
        self._nodes = nodes
        self._within = within
        #: The candidates on each node of a resource group for requests with these rights.
        self._candidates: dict[tuple[str, PreemptionRights], dict[str, _Candidates]] = {}
        #: For each shape and rights a heap of offers, and how many of ``_changed`` it includes. An entry has a serial
        #: number, and the sessions that end; None while the offer is only a lower bound.
        self._heaps: dict[
            tuple[RequestShape, PreemptionRights],
            tuple[list[tuple[_Offer, int, _Candidates, list[Session] | None]], int],
        ] = {}
        self._changed: list[str] = []
        self._serial = count()
        self.ended: set[int] = set()

    def best(self, asked: Request, own: PreemptionRights) -> tuple[Placement, list[Session]] | None:
        """Return the placement that needs the fewest ends, and the sessions to end; None if no ends are enough."""
        key = shape(asked), own
        on_node = self._candidates_for(asked.resource_group, own)
        heap, known = self._heaps.get(key, ([], None))
        new: Iterable[_Candidates] = on_node.values()
        if known is not None:
            new = [on_node[node_id] for node_id in dict.fromkeys(self._changed[known:]) if node_id in on_node]
        found = [
            (offer, next(self._serial), candidates, None)
            for candidates in new
            if (offer := candidates.offer(key[0])) is not None
        ]
        heap = [*heap, *found]
        heapify(heap)
        self._heaps[key] = heap, len(self._changed)
        while heap:
            (least, _, node_id), _, candidates, ended = heap[0]
            valid = candidates is on_node[node_id]
            if valid and ended is not None:
                where = _fits(asked, candidates.left, ended)
                assert where is not None
                return where, ended
            heappop(heap)
            if valid and (ended := _fewest(asked, candidates, least)) is not None:
                offer = len(ended), sorted(map(_order, ended)), node_id
                heappush(heap, (offer, next(self._serial), candidates, ended))
        return None

    def _candidates_for(self, group: str, own: PreemptionRights) -> dict[str, _Candidates]:
        key = group, own
        if key not in self._candidates:
            self._candidates[key] = {
                node_id: node.candidates(own, self._within)
                for node_id, node in self._nodes.items()
                if node.left.node.resource_group == group
            }
        return self._candidates[key]

    def give(self, asked: Request, where: Placement, ended: Sequence[Session]) -> None:
        """Claim the placement, and count these sessions as ended."""
        self.ended.update(session.id for session in ended)
        node = self._nodes[where.node_id]
        left = placement.claimed_if_fits(_without(node.left, ended), asked, where)
        assert left is not None, "the placement was found on these free amounts"
        node = self._nodes[where.node_id] = node.then(left, self.ended)
        for (_, own), candidates in self._candidates.items():
            if where.node_id in candidates:
                candidates[where.node_id] = node.candidates(own, self._within)
        self._changed.append(where.node_id)


class _Candidates:
    """The free amounts of a node and the sessions on it that may end for a request, in the order in which they end.

    The lists hold the most that is free after none, one, two... of the sessions have ended.
    """

    __slots__ = ("_cpu_milli", "_devices", "_memory_mib", "left", "sessions")

    def __init__(self, left: NodeFree, sessions: list[Session]) -> None:
        self.left, self.sessions = left, sessions
        self._cpu_milli = _sums(left.cpu_milli, [s.request.cpu_milli for s in sessions])
        self._memory_mib = _sums(left.memory_mib, [s.request.memory_mib for s in sessions])
        self._devices: _Devices | None = None

    @property
    def devices(self) -> _Devices:
        """The node's GPUs, computed when needed: on many nodes of a full cluster the CPU is already too little."""
        if self._devices is None:
            self._devices = _Devices(self.left, self.sessions)
        return self._devices

    def offer(self, asked: RequestShape) -> _Offer | None:
        """Return the best that the node could offer; None if the end of all sessions is not enough."""
        least = max(
            bisect_left(self._cpu_milli, asked.cpu_milli), bisect_left(self._memory_mib, asked.memory_mib)
        )
        of_devices = self.devices.least(asked) if least <= len(self.sessions) else None
        if of_devices is None:
            return None
        least = max(least, of_devices)
        return least, [_order(session) for session in self.sessions[:least]], self.left.node.id


class _Devices:
    """The GPUs of a node that take sessions, and what the candidates hold of them."""

    __slots__ = ("_capacities", "_clear", "_devices", "_fgpu_milli", "_models", "_taken")

    def __init__(self, left: NodeFree, sessions: Iterable[Session]) -> None:
        #: By device, the fGPU x 1000 and memory in MiB that each candidate holds.
        self._taken: dict[str, list[tuple[int, int]]] = {}
        parts: dict[str, int] = {}
        for session in sessions:
            shares = session.placement.shares if session.placement else ()
            for share in shares:
                uuid = share.device_uuid
                self._taken.setdefault(uuid, []).append((share.fgpu_milli, share.memory_mib))
                parts[uuid] = parts.get(uuid, 0) + PART // len(shares)
        ready = left.node.state is NodeState.READY
        self._devices = [d for d in left.devices if ready and not d.device.cordoned]
        self._models = {d.device.model for d in self._devices}
        self._capacities = sorted({d.device.capacity_milli for d in self._devices})
        self._fgpu_milli = self._most([d.fgpu_milli for d in self._devices], 0)
        clear = [
            parts.get(d.device.uuid, 0)
            for d in self._devices
            if d.shares + len(self._taken.get(d.device.uuid, ())) == d.device.max_shares
        ]
        #: The ends, in units of PART, that empty none, one, two... devices.
        self._clear = list(accumulate(sorted(clear), initial=0))

    def _most(self, free: list[int], kind: int) -> list[int]:
        """Return the most that any device has free after none, one, two... of its sessions have ended."""
        found = [max(free, default=0)]
        for device, own in zip(self._devices, free, strict=True):
            taken = self._taken.get(device.device.uuid)
            if taken is not None:
                for number, amount in enumerate(_sums(own, [one[kind] for one in taken])):
                    if number == len(found):
                        found.append(found[-1])
                    found[number] = max(found[number], amount)
        # More ends never leave less, even if the device with the most has fewer sessions.
        return list(accumulate(found, max))

    def least(self, asked: RequestShape) -> int | None:
        """Return a lower bound of the ends that a request needs; None if all ends are not enough."""
        if asked.fgpu_milli == 0 and not is_explicit(asked):
            return 0
        if not self._capacities or (asked.gpu_models and self._models.isdisjoint(asked.gpu_models)):
            return None
        if asked.fgpu_milli > self._capacities[-1]:
            devices = -(-asked.fgpu_milli // self._capacities[-1])
            return -(-self._clear[devices] // PART) if devices < len(self._clear) else None
        if is_explicit(asked):
            sums = self._most([d.memory_mib for d in self._devices], 1)
            wanted = asked.gpu_memory_mib or 0
        else:
            sums, wanted = self._fgpu_milli, min(asked.fgpu_milli, self._capacities[0])
        found = bisect_left(sums, wanted)
        return found if found < len(sums) else None

    def may_fit(self, asked: Request, ended: Iterable[Session]) -> bool:
        """Return whether enough devices have enough free fGPU after these ends."""
        if asked.fgpu_milli == 0:
            return True
        gives: dict[str, int] = {}
        for session in ended:
            for share in session.placement.shares if session.placement else ():
                gives[share.device_uuid] = gives.get(share.device_uuid, 0) + share.fgpu_milli
        enough = 0
        for device in self._devices:
            free_milli = device.fgpu_milli + gives.get(device.device.uuid, 0)
            enough += free_milli >= min(asked.fgpu_milli, device.device.capacity_milli)
        return enough >= -(-asked.fgpu_milli // self._capacities[-1])


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
            if candidates.devices.may_fit(asked, some) and _starts(asked, node, some):
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
    shares = session.placement.shares if session.placement else ()
    return (sum(share.fgpu_milli for share in shares), session.started_at_s or 0, session.id)


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
