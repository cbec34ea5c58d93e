"""When each who waits is expected to start: the same passes as the planner's, run forward from a snapshot.

No second implementation of the policy: a session is expected to start when, in a world where those who run end as
others did before them, and by their time limits, a pass would start it. Later passes go on in the order of the first, but
for those who by then have waited for as long as they may. Nobody knows when one session ends: so that is run forward
several times, in worlds that differ in who ends when, and what they make of a start is its range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from fgpu_scheduler.core import orders, placement
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory, StartRange
from fgpu_scheduler.core.free_capacity import FreeCapacity, PlanCache
from fgpu_scheduler.core.group_scheduler import GroupScheduler
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    NodeState,
    Placement,
    Session,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.pending_queue import PendingQueue
from fgpu_scheduler.core.placement import NodeFree, best_fit
from fgpu_scheduler.core.placer import Placer
from fgpu_scheduler.core.policies import GroupPolicy, Policy
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.reservations import SURE_ENDS, Reservation, free_at_s
from fgpu_scheduler.core.run_lengths import RemainingTime, RunLengths
from fgpu_scheduler.core.usage import taken_milli

BASIS_NOW = "free now"
BASIS_LIMITS = "time limits"
BASIS_TYPICAL = "how long sessions usually run"
BASIS_UNKNOWN = "no estimate yet: too few sessions have ended"
BASIS_NO_NODE = "no estimate: no machine that takes sessions now could hold it"
BASIS_QUOTA = "no estimate: its quota leaves no room"
BASIS_FAR = "no estimate: too many wait ahead of it"

SOON_S = 60
"""A session that has outlived its time limit is expected to end about this much later."""

WORLDS = 9
"""So many worlds make a range, from the earliest start in any of them to the latest: of ten equally likely starts eight
lie between the least and the most of nine others."""
WORLD_STARTS = 24
"""So many starts are looked for in each world; a later one is told from how much faster or slower these came there."""
STRIDES = (1, 2, 4, 5, 7, 8)
"""What has no divisor in common with `WORLDS`: each session ends in each ninth of the cases in one of the worlds."""

MOST_PASSES = 300
"""Bound of the passes that a forecast makes; who would start later is told by how fast the queue moves until then."""

NOBODY = 0
"""No session's id."""


@dataclass(frozen=True, slots=True)
class BlockingSessions:
    """With whose end a session starts, as far as ends are known: sessions, what they hold in fGPU x 1000, and, for
    administrators only, their ids. None of them could be left out."""

    sessions: int
    fgpu_milli: int
    ids: tuple[int, ...] = ()


NOT_LOOKED_AT = BlockingSessions(0, 0)


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """When one is expected to start, by what that is known, and with whose end."""

    at_s: int
    basis: str
    ahead: BlockingSessions
    range: StartRange | None = None

    @property
    def planned(self) -> StartRange:
        return self.range or StartRange(self.at_s, self.at_s, self.at_s)


@dataclass(frozen=True, slots=True)
class SimulatedPass:
    """One pass of a future: what ended, what it started, the place that was kept then, and the nodes that changed.

    ``nodes`` are as the pass left them. ``typical``: the instant is known by how long others ran.
    """

    at_s: int
    typical: bool
    started: Sequence[tuple[Session, Placement]]
    kept: Reservation | None
    nodes: Mapping[str, NodeFree]
    ended: Sequence[tuple[Session, Placement]]


@dataclass(frozen=True, slots=True)
class SimulatedQueue:
    """The passes over one queue in one world, in order, and who ends after the last of them."""

    moments: Sequence[SimulatedPass]
    ends: Sequence[tuple[int, bool, Session, Placement]]
    left: Mapping[str, NodeFree]
    queue_is_empty: bool
    pace: float = 1.0
    """How much later starts come here than in the first of the futures, in parts of the wait."""


@dataclass(slots=True)
class ExpectedStarts:
    """When each who waits is expected to start."""

    found: dict[int, ExpectedStart]
    typical: bool
    open: frozenset[str]
    """The resource groups with a node that takes sessions now."""
    far: dict[str, None]
    """The resource groups in which the passes did not come to their end."""
    futures: dict[str, tuple[SimulatedQueue, ...]] = field(default_factory=dict)
    """By resource group: what is expected, then the worlds of the range."""

    def why_not(self, session: Session, reason: WaitReason) -> str:
        """Return why no start is expected."""
        if session.request.resource_group in self.far:
            return BASIS_FAR
        if reason is WaitReason.QUOTA:
            return BASIS_QUOTA
        none_is_open = session.request.resource_group not in self.open
        return BASIS_NO_NODE if self.typical or none_is_open else BASIS_UNKNOWN


def expected_starts(
    world: Snapshot,
    policy: Policy,
    experience: ForecastHistory,
    only: Collection[int] | None = None,
    memory: PlanCache | None = None,
) -> ExpectedStarts:
    """Run the passes forward until all who wait have started, or ``only`` those.

    What starts now is placed in ``world`` already. The ``memory`` is that of the plan that did so.
    """
    takers = frozenset(
        n.resource_group
        for n in world.nodes
        if n.state is NodeState.READY and not (n.devices and all(d.cordoned for d in n.devices))
    )
    starts = ExpectedStarts({}, bool(experience.lengths), takers, {})
    for group, line in orders.queue_snapshots(world).items():
        own = policy.of(group)
        with (memory or PlanCache()).ground(world, group, own.placing) as ground:
            begin = _SimulationStart(world, line, own, experience.lengths, ground)
        run = _Simulation(begin, None)
        run.forward(only, MOST_PASSES)
        if not run.is_done:
            run.tell_the_far(only)
        if not run.is_done:
            starts.far[group] = None
        futures = [run.future()]
        if begin.is_uncertain or run.is_uncertain:
            futures += _range(run.found, begin)
        starts.futures[group] = tuple(futures)
        starts.found |= run.found
    return starts


def _range(found: dict[int, ExpectedStart], begin: _SimulationStart) -> list[SimulatedQueue]:
    """Put in place of each expected start that in the middle of all worlds, with the earliest and the latest."""
    now_s = begin.now_s
    by_start = sorted(found, key=lambda i: found[i].at_s)[:WORLD_STARTS]
    first = dict.fromkeys(by_start)
    seen: list[tuple[dict[int, ExpectedStart], SimulatedQueue]] = []
    for n in range(WORLDS):
        run = _Simulation(begin, n)
        run.forward(first, 2 * WORLD_STARTS)
        # How fast the queue moves in this world, as far as it was looked at.
        there = [i for i in by_start if i in run.found]
        waited_s = sum(found[i].at_s - now_s for i in there)
        pace = sum(run.found[i].at_s - now_s for i in there) / waited_s if waited_s else 1.0
        seen.append((run.found, replace(run.future(), pace=pace)))
    for i, start in found.items():
        found[i] = _ranged(
            start, now_s, [own[i].at_s if i in first and i in own else future.pace for own, future in seen]
        )
    return [future for _, future in seen]


def _ranged(start: ExpectedStart, now_s: int, seen: Iterable[int | float]) -> ExpectedStart:
    """Return a start with its range: ``seen`` is when it is in each world, or, as a float, how fast that world is."""
    wait_s = start.at_s - now_s
    instants = sorted(one if isinstance(one, int) else now_s + round(one * wait_s) for one in seen)
    middle_s = instants[len(instants) // 2]
    return replace(start, at_s=middle_s, range=StartRange(instants[0], middle_s, instants[-1]))


def start_behind(
    session: Session, ahead: Collection[int], futures: Sequence[SimulatedQueue], now_s: int
) -> ExpectedStart | None:
    """Return when a request starts that these futures do not know, behind the sessions ``ahead`` of it in the queue.

    That is in each of them the first pass that leaves room for it, once those who come after it give way. None where the
    futures end before.
    """
    found = _first_room(session, ahead, futures[0])
    if found is None:
        return None
    at_s, typical, node_id, left = found
    ends = (end for moment in futures[0].moments if moment.at_s <= at_s for end in moment.ended)
    later = ((s, where) for end_s, _, s, where in futures[0].ends if end_s <= at_s)
    gone = [
        (s, where) for s, where in (*ends, *later) if where.node_id == node_id and s.placement is not None
    ]
    start = ExpectedStart(at_s, BASIS_TYPICAL if typical else BASIS_LIMITS, _ahead(left, gone, session))
    if len(futures) == 1:
        return start
    others = (_first_room(session, ahead, future) for future in futures[1:])
    seen = [future.pace if one is None else one[0] for one, future in zip(others, futures[1:], strict=True)]
    return _ranged(start, now_s, seen)


def _first_room(
    session: Session, ahead: Collection[int], future: SimulatedQueue
) -> tuple[int, bool, str, NodeFree] | None:
    """Return when there is room for a request, whether that is known by how long others ran, and on which node."""
    asked = session.request
    for moment in future.moments:
        kept = moment.kept if moment.kept is not None and moment.kept.session_id in ahead else None
        in_time = kept is None or kept.ends_before(
            free_at_s(session, moment.at_s, limit_s=session.time_limit_s)
        )
        for node_id, left in moment.nodes.items():
            for behind, where in moment.started:
                if where.node_id == node_id and behind.id not in ahead:
                    left = placement.released(left, behind.request, where)
            beside = None if kept is None or in_time or kept.placement.node_id != node_id else kept.beside
            if placement.place(asked, (left,), score=placement.best_fit, beside=beside) is not None:
                return moment.at_s, moment.typical, node_id, left
    if not future.queue_is_empty:
        return None
    nodes: dict[str, NodeFree] = {}
    for at_s, typical, ended, where in future.ends:
        before = nodes.get(where.node_id) or future.left.get(where.node_id)
        if before is not None:
            left = nodes[where.node_id] = placement.released(before, ended.request, where)
            if placement.place(asked, (left,), score=placement.best_fit) is not None:
                return at_s, typical, where.node_id, left
    return None


def _ahead(
    left: NodeFree, ended: Iterable[tuple[Session, Placement]], without: Session | None = None
) -> BlockingSessions:
    """Return with whose ends a session started that leaves this of its node: who ended first is tried first without.

    With ``without`` that session is not placed there yet.
    """
    offered = {d.device.uuid for d in left.devices if not d.device.cordoned}
    needed: list[Session] = []
    for session, where in ended:
        # On a device that is not offered now nobody is in its place.
        shares = tuple(share for share in where.shares if share.device_uuid in offered)
        stays = placement.claimed_shares(left, session, replace(where, shares=shares))
        if stays is not None and without is not None:
            fits = placement.place(without.request, (stays,), score=placement.best_fit)
            stays = None if fits is None else stays
        if stays is None:
            needed.append(session)
        else:
            left = stays
    return BlockingSessions(len(needed), sum(map(taken_milli, needed)), tuple(sorted(s.id for s in needed)))


class _End(NamedTuple):
    """How the end of a session is known: an instant, or a limit that is left and how long others ran."""

    sure_s: int | None = None
    left_s: int | None = None
    rest: RemainingTime | None = None


class _SimulationStart:
    """What all futures of a queue begin with: who holds shares, how their ends are known, and the pass made now."""

    def __init__(
        self,
        world: Snapshot,
        line: orders.QueueSnapshot,
        policy: GroupPolicy,
        lengths: RunLengths,
        ground: FreeCapacity,
    ) -> None:
        self.now_s = world.now_s
        self.line = line
        self.by_user = bool(world.quotas)
        self.is_uncertain = False
        self._policy = policy
        self._lengths = lengths
        self._ledger = Ledger(world)
        self._fresh: dict[tuple[str, str], RemainingTime | None] = {}
        self.holding: dict[int, tuple[Session, Placement]] = {}
        self.ends: dict[int, _End] = {}
        for s in world.sessions:
            # With quotas the others of a user, in other groups too, may have to end first.
            matters = self.by_user or s.request.resource_group == line.resource_group
            if matters and s.state in HOLDING and s.placement is not None:
                self.holding[s.id] = s, s.placement
                self.ends[s.id] = self.end_of(s, world.now_s)
        self.is_uncertain = any(end.rest is not None for end in self.ends.values())
        floor = GroupScheduler(world, ground, policy, Ledger(world), reasons=False)
        self.queue = PendingQueue(floor.in_order(line), by_user=self.by_user, held=True)
        self.started = floor.fill(self.queue)
        self.floor = floor.copy(self.started)

    def end_of(self, session: Session, now_s: int) -> _End:
        """Return what is known at an instant of the end of a session that holds shares, or would from then on."""
        if session.state is SessionState.TERMINATING:
            return _End(now_s + 1)
        if session.ends_at_s is not None and session.ends_cause in SURE_ENDS:
            return _End(max(session.ends_at_s, now_s + 1))
        # The clock may have been set back since.
        started_s = now_s if session.started_at_s is None else min(now_s, session.started_at_s)
        asked = session.request
        limits = session.time_limit_s, self._ledger.limit_s(asked), self._policy.max_lifetime_s
        limit_s = min((limit for limit in limits if limit is not None), default=None)
        ran_s = now_s - started_s
        left_s = None if limit_s is None else limit_s - ran_s
        if left_s is not None and left_s <= 0:
            return _End(now_s + SOON_S)
        if ran_s:
            return _End(None, left_s, self._lengths.rest(asked.user, asked.image, ran_s))
        who = asked.user, asked.image
        if who not in self._fresh:
            self._fresh[who] = self._lengths.rest(*who, 0)
        return _End(None, left_s, self._fresh[who])


class _Simulation:
    """One future of a queue: the passes over it, one after the other."""

    def __init__(self, begin: _SimulationStart, number: int | None) -> None:
        """``number`` is that of the world; None: where everything lasts as half of what was like it did."""
        self.found: dict[int, ExpectedStart] = {}
        self.is_uncertain = False
        self.is_done = False
        """Whether all have started, or nothing changes any more."""
        self._begin = begin
        self._number = number
        self._floor = begin.floor.copy(begin.started)
        self._queue = begin.queue.copy()
        self._holding = dict(begin.holding)
        self._moments: list[SimulatedPass] = []
        self._ended_on: dict[str, list[tuple[Session, Placement]]] = {}
        """Of those who held something at first, by node, who has ended, in this order."""
        self._ends: list[tuple[int, int, bool]] = []
        """Instant, session, and whether that is known by how long others ran."""
        for session in self._queue.sessions:
            # From then on a node that it was refused is tried again: an instant at which nobody ends.
            tried_s = (node.until_s(begin.now_s) for node in session.refused)
            self._ends += [(until_s, NOBODY, False) for until_s in tried_s if until_s is not None]
        for session_id, end in begin.ends.items():
            self._expect(session_id, end, begin.now_s)
        heapify(self._ends)

    def forward(self, only: Collection[int] | None, most_passes: int) -> None:
        """Make passes, and end sessions in between, until all (or ``only`` those) have started or nothing changes."""
        floor = self._floor
        waiting = self._queue.sessions
        wanted = len(waiting) if only is None else sum(1 for s in waiting if s.id in only)
        placed, ended, by_typical = self._begin.started, list[tuple[Session, Placement]](), False
        for _ in range(most_passes):
            self._note(placed, ended, by_typical=by_typical)
            wanted -= sum(1 for session, _ in placed if only is None or session.id in only)
            if not wanted or not self._ends:
                self.is_done = True
                return
            instant, ended = self._ends[0][0], []
            floor.now_s = max(floor.now_s, instant)
            while self._ends and self._ends[0][0] == instant:
                _, session_id, typical = heappop(self._ends)
                by_typical = by_typical or typical
                if session_id == NOBODY:
                    continue
                session, where = self._holding.pop(session_id)
                floor.end(session, where)
                ended.append((session, where))
                if session_id in self._begin.holding:
                    self._ended_on.setdefault(where.node_id, []).append((session, where))
            again = floor.in_order_now()
            if again is not None:
                left = [s for s in again if s.id not in self.found]
                self._queue = PendingQueue(left, by_user=self._begin.by_user, held=True)
            placed = floor.fill(self._queue)

    def _note(
        self,
        placed: list[tuple[Session, Placement]],
        ended: list[tuple[Session, Placement]],
        *,
        by_typical: bool,
    ) -> None:
        """Note what a pass has started, and when it ends."""
        floor = self._floor
        basis = BASIS_TYPICAL if by_typical else BASIS_LIMITS
        after: dict[str, NodeFree] = {}
        on = Counter(where.node_id for _, where in placed)
        # The last one first: who starts after it in this pass takes nothing that it needs.
        for session, where in reversed(placed):
            there = after.get(where.node_id, floor.left[where.node_id])
            ahead = NOT_LOOKED_AT
            if self._number is None:
                ahead = _ahead(there, self._ended_on.get(where.node_id, ()))
            self.found[session.id] = ExpectedStart(floor.now_s, basis, ahead)
            on[where.node_id] -= 1
            if on[where.node_id]:
                after[where.node_id] = placement.released(there, session.request, where)
        for session, where in placed:
            self._holding[session.id] = session, where
            if self._expect(session.id, self._begin.end_of(session, floor.now_s), floor.now_s):
                heappush(self._ends, self._ends.pop())
        changed = {where.node_id for _, where in (*placed, *ended)}
        for kept in (floor.kept, self._moments[-1].kept if self._moments else None):
            if kept is not None:
                changed.add(kept.placement.node_id)
        nodes = {node_id: floor.left[node_id] for node_id in sorted(changed) if node_id in floor.left}
        self._moments.append(SimulatedPass(floor.now_s, by_typical, placed, floor.kept, nodes, ended))

    def tell_the_far(self, only: Collection[int] | None) -> None:
        """Tell those whom the passes did not come to by what is asked for ahead of them, and how fast that starts."""
        floor, began_s = self._floor, self._begin.now_s
        started = sum(s.request.fgpu_milli for m in self._moments[1:] for s, _ in m.started)
        if not started or floor.now_s <= began_s:
            return
        empty = Placer(tuple(placement.untouched(left.node) for left in floor.left.values()), score=best_fit)
        ahead_milli = 0
        for session, lane in zip(self._queue.sessions, self._queue.lane_of, strict=True):
            if session.id in self.found or lane is None or lane.reason is WaitReason.QUOTA:
                continue
            if not empty.fits(session.request):
                continue
            ahead_milli += session.request.fgpu_milli
            if only is None or session.id in only:
                at_s = floor.now_s + ahead_milli * (floor.now_s - began_s) // started
                self.found[session.id] = ExpectedStart(at_s, BASIS_TYPICAL, NOT_LOOKED_AT)
        self.is_done = True

    def future(self) -> SimulatedQueue:
        """Return what has been seen."""
        ends = [(at_s, typical, *self._holding[i]) for at_s, i, typical in sorted(self._ends) if i != NOBODY]
        is_empty = not self._queue.heads
        return SimulatedQueue(self._moments, ends if is_empty else (), self._floor.left, is_empty)

    def _expect(self, session_id: int, end: _End, now_s: int) -> bool:
        """Note when a session is expected to end, at the end of the list; return whether anything tells."""
        at_s, typical = end.sure_s, False
        if end.rest is not None:
            self.is_uncertain = typical = True
            part = 0.5 if self._number is None else _part(session_id, self._number)
            at_s = now_s + max(1, end.rest.at_s(part))
            if end.left_s is not None:
                at_s = min(at_s, now_s + end.left_s)
        elif end.left_s is not None:
            at_s = now_s + end.left_s
        if at_s is None:
            return False
        self._ends.append((at_s, session_id, typical))
        return True


def _part(session_id: int, world: int) -> float:
    """Return before which part of those like it a session ends in a world: in each of them before another ninth.

    Which in which differs by its id, and equal worlds make equal forecasts.
    """
    mixed = session_id * 2654435761 % 2**32
    ninth = (world * STRIDES[mixed % len(STRIDES)] + mixed // 64) % WORLDS
    inside = (mixed // 4096 + world * 40503) % 1024 / 1024
    return (ninth + inside) / WORLDS
