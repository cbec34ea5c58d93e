"""What ends of lower priority would free of a node, and who would have to end: carried from round to round."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.free_capacity import NOBODY
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import EndCause, Node, NodeState, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.placement import NodeFree
from fgpu_scheduler.core.shares import RequestShape, is_explicit

PART = 840
"""Whoever is on several devices counts for each as a part of one: thousands would be rounded more often."""

KEPT_PRIORITIES, KEPT_SHAPES = 8, 64
"""For so many priorities, and shapes of each, it is kept what a node offers; beyond that it is found again."""

First = tuple[int, int, int, int]
Offer = tuple[int, list[First], str]
"""How many have to end on a node at least, the first of those there, and its id: the lowest is the best."""


def first(session: Session) -> First:
    """Who is taken first of equally many: the warned, then of the lowest priority, then the youngest."""
    warned = session.ends_cause is EndCause.PREEMPTED
    return (0 if warned else 1, session.request.priority, -(session.started_at_s or 0), -session.id)


class NodeCandidates:
    """What is left of a node once those have ended who end anyway, and who else could be ended there."""

    __slots__ = ("_could", "_rooms", "left", "made_of")

    def __init__(self, left: NodeFree, could: Iterable[Session], made_of: object = None) -> None:
        self.left = left
        self._could = sorted((first(session), session) for session in could)
        self._rooms: dict[int, Candidates] = {}
        self.made_of = made_of

    def candidates(self, priority: int) -> Candidates:
        """Return it as it is for requests of a priority: only who is of a lower one is ended for them."""
        candidates = self._rooms.get(priority)
        if candidates is None:
            if len(self._rooms) >= KEPT_PRIORITIES:
                self._rooms.clear()
            lower = [one for one in self._could if one[1].request.priority < priority]
            candidates = self._rooms[priority] = Candidates(self.left, lower)
        return candidates

    def then(self, left: NodeFree, ended: Collection[int]) -> NodeCandidates:
        """Return it with something else left, when these have ended too."""
        return NodeCandidates(left, [session for _, session in self._could if session.id not in ended])


class PreemptionCandidates:
    """Those of all nodes, as the last round left them: only nodes that have changed since are looked at again."""

    def __init__(self) -> None:
        self._known: dict[str, NodeCandidates] = {}

    def of(
        self, snapshot: Snapshot, *, groups: Sequence[str], ending: Collection[int], spared: Collection[int]
    ) -> dict[str, NodeCandidates]:
        """Return them of the nodes of these resource groups, in the order of the nodes' ids.

        ``ending`` are the sessions that end for another reason, as TERMINATING ones do. The ``spared`` are not ended.
        """
        ends, spares = _by_node(snapshot, ending), _by_node(snapshot, spared)
        of_groups = tuple(groups)
        on_node = snapshot.index.on_node
        found = {}
        for node in snapshot.nodes:
            if node.resource_group in groups:
                there = on_node.get(node.id, NOBODY)
                made_of = node, there, ends.get(node.id, ()), spares.get(node.id, ()), of_groups
                known = self._known.get(node.id)
                if known is None or not _same(known.made_of, made_of):
                    known = _cleared(node, there, made_of[2], made_of[3], groups, made_of)
                found[node.id] = known
        self._known = dict(found)
        return found


def _same(one: object, other: tuple[object, ...]) -> bool:
    """Return whether both are made of the very same node and sessions, and of equal lists."""
    return isinstance(one, tuple) and one[0] is other[0] and one[1] is other[1] and one[2:] == other[2:]


def _by_node(snapshot: Snapshot, session_ids: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Return which of these sessions are on each node."""
    found: dict[str, tuple[int, ...]] = {}
    wanted = frozenset(session_ids)
    for session in snapshot.sessions if wanted else ():
        if session.id in wanted and session.placement is not None:
            node_id = session.placement.node_id
            found[node_id] = (*found.get(node_id, ()), session.id)
    return found


def _cleared(
    node: Node,
    there: Mapping[int, Session],
    ending: Collection[int],
    spared: Collection[int],
    groups: Collection[str],
    made_of: object,
) -> NodeCandidates:
    left = placement.free_on_node(node, there)
    could = []
    for session in there.values():
        where = session.placement
        if where is None:
            continue
        if session.state is SessionState.TERMINATING or session.id in ending:
            if session.state in HOLDING:
                left = placement.released(left, session.request, where)
        elif (
            session.state is SessionState.RUNNING
            and session.id not in spared
            and session.request.resource_group in groups
        ):
            could.append(session)
    return NodeCandidates(left, could, made_of)


class Candidates:
    """What is left of a node, and who of lower priority than some request is there.

    The lists say how much is free at the most, of each kind, once so many of them have ended.
    """

    __slots__ = ("_cpu_milli", "_devices", "_fewest", "_firsts", "_memory_mib", "_offers", "left", "there")

    def __init__(self, left: NodeFree, lower: Sequence[tuple[First, Session]]) -> None:
        """Take who is there in the order in which they are taken."""
        self.left = left
        self._offers: dict[RequestShape, Offer | None] = {}
        self._fewest: dict[RequestShape, list[Session] | None] = {}
        self._firsts = [one for one, _ in lower]
        self.there = there = [session for _, session in lower]
        """In the order in which they are taken."""
        self._cpu_milli = _sums(left.cpu_milli, [s.request.cpu_milli for s in there])
        self._memory_mib = _sums(left.memory_mib, [s.request.memory_mib for s in there])
        self._devices: CandidateDevices | None = None

    @property
    def devices(self) -> CandidateDevices:
        """Its GPUs. On many nodes of a full cluster the processor says already that nothing fits."""
        if self._devices is None:
            self._devices = CandidateDevices(self.left, self.there)
        return self._devices

    def offer(self, asked: RequestShape) -> Offer | None:
        """Return what the node offers at the best; None where the end of all is not enough."""
        if asked in self._offers:
            return self._offers[asked]
        if len(self._offers) >= KEPT_SHAPES:
            self._offers.clear()
            self._fewest.clear()
        least = self._least(asked)
        found = None if least is None else (least, self._firsts[:least], self.left.node.id)
        self._offers[asked] = found
        return found

    def _least(self, asked: RequestShape) -> int | None:
        least = max(
            bisect_left(self._cpu_milli, asked.cpu_milli), bisect_left(self._memory_mib, asked.memory_mib)
        )
        if least > len(self.there):
            return None
        of_devices = self.devices.least(asked)
        return None if of_devices is None else max(least, of_devices)

    def fewest(self, asked: RequestShape, find: Callable[[], list[Session] | None]) -> list[Session] | None:
        """Return what ``find`` finds for a request of this shape: it is asked once."""
        if asked not in self._fewest:
            self._fewest[asked] = find()
        return self._fewest[asked]


class CandidateDevices:
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

    def least(self, asked: RequestShape) -> int | None:
        """Return of how many the end is needed at least; None where that of all is not enough."""
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
