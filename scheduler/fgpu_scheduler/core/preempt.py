"""Whose place sessions of higher priority take: the fewest, of the lowest priority, the youngest.

Nobody is chosen in vain: only such sessions whose ends, together, let a blocked one start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, count
from math import comb

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import EndCause, NodeState, Placement, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.placement import NodeFree
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.shares import Shape, explicit, shape

TRIES = 500
"""On each node so many sets of victims are tried for the fewest; beyond that the largest are taken first."""

SERVED = 32
"""For so many blocked sessions at a time others are ended."""


PART = 840
"""Whoever is on several devices counts for each as a part of one: thousands would be rounded more often."""

_First = tuple[int, int, int, int]
_Offer = tuple[int, list[_First], str, int, "_Room", list[Session] | None]
"""How many have to end on a node, who, its id, a serial number, and those sessions; None while that is only the least."""


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
    nodes = _Nodes(left, could)
    served = 0
    misfits: list[tuple[Shape, int]] = []
    for session in _blocked(snapshot, plan, groups):
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


def _blocked(snapshot: Snapshot, plan: Plan, groups: Sequence[str]) -> Iterable[Session]:
    placed = {one.session_id for one in plan.placed}
    sessions = {s.id: s for s in snapshot.sessions}
    for decision in plan.decisions:
        session = sessions[decision.session_id]
        # Whoever was refused a node a moment ago might be refused the one that others are ended for, too.
        waits = not session.held and not session.left_out(snapshot.now_s)
        if session.id not in placed and waits and session.request.resource_group in groups:
            yield session


class _Nodes:
    """What is left of each node, and who could be ended there."""

    def __init__(self, left: dict[str, NodeFree], could: Iterable[Session]) -> None:
        self._left = left
        self._could: dict[str, list[tuple[_First, Session]]] = {}
        for session in could:
            if session.placement is not None:
                self._could.setdefault(session.placement.node_id, []).append((_first(session), session))
        self._rooms: dict[int, dict[str, _Room]] = {}
        """For a request of that priority, by node."""
        self._heaps: dict[tuple[Shape, int], tuple[list[_Offer], int]] = {}
        """The nodes' offers to requests of a shape and priority, and how many of the changes they know of."""
        self._changed: list[str] = []
        self._serial = count()
        self.ended: set[int] = set()

    def best(self, asked: Request) -> tuple[Placement, list[Session]] | None:
        """Return where a request fits after which sessions have ended, on the node where the fewest have to.

        Nodes are looked at in the order of the best that could be found there, as long as that beats what was found.
        """
        alike = shape(asked), asked.priority
        rooms = self._rooms.setdefault(asked.priority, {})
        heap, known = self._heaps.get(alike, ([], None))
        found: list[_Offer] = []
        for node_id in self._left if known is None else dict.fromkeys(self._changed[known:]):
            if self._left[node_id].node.resource_group != asked.resource_group:
                continue
            room = rooms.get(node_id)
            if room is None:
                room = rooms[node_id] = self._room(node_id, asked.priority)
            least = room.least(asked)
            if least is not None:
                found.append((least, room.firsts[:least], node_id, next(self._serial), room, None))
        if known is None:
            heap = found
            heapify(heap)
        else:
            for offer in found:
                heappush(heap, offer)
        self._heaps[alike] = heap, len(self._changed)
        while heap:
            least, _, node_id, _, room, ended = heap[0]
            if room is rooms.get(node_id) and ended is not None:
                where = _fits(asked, room.left, ended)
                assert where is not None
                return where, ended
            heappop(heap)
            if room is rooms.get(node_id) and (ended := _fewest(asked, room, least)) is not None:
                firsts = sorted(map(_first, ended))
                heappush(heap, (len(ended), firsts, node_id, next(self._serial), room, ended))
        return None

    def _room(self, node_id: str, priority: int) -> _Room:
        there = self._could.get(node_id, ())
        return _Room(self._left[node_id], [one for one in there if one[1].request.priority < priority])

    def give(self, asked: Request, where: Placement, ended: Sequence[Session]) -> None:
        """Count the place as taken, and these sessions as ended."""
        for session in ended:
            _returned(self._left, session)
            self.ended.add(session.id)
        self._left[where.node_id] = _taken(self._left, asked, where)
        if ended:
            could = self._could[where.node_id]
            self._could[where.node_id] = [one for one in could if one[1].id not in self.ended]
        self._changed.append(where.node_id)
        for rooms in self._rooms.values():
            rooms.pop(where.node_id, None)


class _Room:
    """What is left of a node, and who of lower priority than some request is there.

    The lists say how much is free at the most, of each kind, once so many of them have ended.
    """

    __slots__ = ("_cpu_milli", "_devices", "_memory_mib", "firsts", "left", "there")

    def __init__(self, left: NodeFree, lower: list[tuple[_First, Session]]) -> None:
        lower.sort()
        self.left = left
        self.firsts = [first for first, _ in lower]
        self.there = there = [session for _, session in lower]
        """In the order in which they are taken."""
        self._cpu_milli = _sums(left.cpu_milli, [s.request.cpu_milli for s in there])
        self._memory_mib = _sums(left.memory_mib, [s.request.memory_mib for s in there])
        self._devices: _Devices | None = None

    @property
    def devices(self) -> _Devices:
        """Its GPUs. On many nodes of a full cluster the processor says already that nothing fits."""
        if self._devices is None:
            self._devices = _Devices(self.left, self.there)
        return self._devices

    def least(self, asked: Request) -> int | None:
        """Return of how many the end is needed at least; None where that of all is not enough."""
        least = max(
            bisect_left(self._cpu_milli, asked.cpu_milli), bisect_left(self._memory_mib, asked.memory_mib)
        )
        if least > len(self.there):
            return None
        of_devices = self.devices.least(asked)
        return None if of_devices is None else max(least, of_devices)


class _Devices:
    """The GPUs of a node that may take sessions, and what those of lower priority hold of them."""

    __slots__ = ("_capacities", "_clear", "_devices", "_fgpu_milli", "_models", "_taken")

    def __init__(self, left: NodeFree, there: Iterable[Session]) -> None:
        self._taken: dict[str, list[tuple[int, int]]] = {}
        """Of each device fGPU x 1000 and memory in MiB that each of them holds."""
        parts: dict[str, int] = {}
        for session in there:
            shares = session.placement.shares if session.placement else ()
            for share in shares:
                uuid = share.device_uuid
                self._taken.setdefault(uuid, []).append((share.fgpu_milli, share.memory_mib))
                parts[uuid] = parts.get(uuid, 0) + PART // len(shares)
        takes = left.node.state is NodeState.READY
        self._devices = [d for d in left.devices if takes and not d.device.cordoned]
        self._models = {d.device.model for d in self._devices}
        self._capacities = sorted({d.device.capacity_milli for d in self._devices})
        self._fgpu_milli = self._most([d.fgpu_milli for d in self._devices], 0)
        clear = [
            parts.get(d.device.uuid, 0)
            for d in self._devices
            if d.shares + len(self._taken.get(d.device.uuid, ())) == d.device.max_shares
        ]
        self._clear = list(accumulate(sorted(clear), initial=0))
        """The same of devices that nobody is on: how many have to end, in parts of one, for so many devices."""

    def _most(self, free: list[int], kind: int) -> list[int]:
        """Return the most that any device has, once none, one, two... have ended of those on it."""
        found = [max(free, default=0)]
        for device, own in zip(self._devices, free, strict=True):
            taken = self._taken.get(device.device.uuid)
            if taken is not None:
                for number, amount in enumerate(_sums(own, [one[kind] for one in taken])):
                    if number == len(found):
                        found.append(found[-1])
                    if amount > found[number]:
                        found[number] = amount
        # More never leave less, also where the device of the most has fewer.
        return list(accumulate(found, max))

    def least(self, asked: Request) -> int | None:
        """Return of how many the end is needed at least; None where that of all is not enough."""
        if asked.fgpu_milli == 0 and not explicit(asked):
            return 0
        if not self._capacities or (asked.gpu_models and self._models.isdisjoint(asked.gpu_models)):
            return None
        if asked.fgpu_milli > self._capacities[-1]:
            devices = -(-asked.fgpu_milli // self._capacities[-1])
            return -(-self._clear[devices] // PART) if devices < len(self._clear) else None
        if explicit(asked):
            sums = self._most([d.memory_mib for d in self._devices], 1)
            wanted = asked.gpu_memory_mib or 0
        else:
            sums, wanted = self._fgpu_milli, min(asked.fgpu_milli, self._capacities[0])
        found = bisect_left(sums, wanted)
        return found if found < len(sums) else None

    def may_fit(self, asked: Request, ended: Iterable[Session]) -> bool:
        """Return whether enough fGPU is free of enough devices once these have ended."""
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
    """Return how much is free at the most once none, one, two... of those have ended who give this back."""
    gives.sort(reverse=True)
    return list(accumulate(gives, initial=free))


def _first(session: Session) -> _First:
    """Who is taken first of equally many: the warned, then of the lowest priority, then the youngest."""
    warned = session.ends_cause is EndCause.PREEMPTED
    return (0 if warned else 1, session.request.priority, -(session.started_at_s or 0), -session.id)


def _fewest(asked: Request, room: _Room, least: int) -> list[Session] | None:
    """Return as few of the sessions as possible whose ends let the request start on the node; [] where none has to.

    Fewer than ``least`` are not enough.
    """
    node, there = room.left, room.there
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
            if room.devices.may_fit(asked, some) and _starts(asked, node, some):
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
    for first in fewest:
        others = [uuid for uuid in fewest if uuid != first]
        ended: dict[int, Session] = {}
        for session in (*(s for uuid in (first, *others) for s in on[uuid]), *there):
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
        node = placement.returned(node, session.request, session.placement)
    return node


def _returned(left: dict[str, NodeFree], session: Session) -> None:
    where = session.placement
    if session.state in HOLDING and where is not None and where.node_id in left:
        left[where.node_id] = placement.returned(left[where.node_id], session.request, where)


def _taken(left: dict[str, NodeFree], asked: Request, where: Placement) -> NodeFree:
    after = placement.after(left[where.node_id], asked, where)
    assert after is not None, "what was planned on this snapshot fits it"
    return after
