"""When each waiting session is expected to start: the planner's passes, run forward from a snapshot.

1. `_SimulationStart` makes a pass at the snapshot's time and notes what is known of the end of each session: a time
   limit, an announced end, or how long similar sessions ran.
2. One `_Simulation` runs in which every session ends after the median time. It ends the next sessions, makes a pass, and
   so on, with the same `GroupScheduler` as the planner. A session starts when a pass starts it.
3. Ends are uncertain, so `WORLDS` more simulations run in which sessions end earlier or later. The range of a start is
   from the earliest to the latest of them.
4. Sessions that the simulations do not reach get a start from how fast the queue moves.

Later passes keep the order of the first, except for requests that reach their longest wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from fgpu_scheduler.core import orders, placement
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory, StartRange
from fgpu_scheduler.core.free_capacity import FreeCapacity, PlanCache
from fgpu_scheduler.core.group_scheduler import GroupScheduler
from fgpu_scheduler.core.lifecycle import taken_placement
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

#: A session that has outlived its time limit is expected to end after this time.
SOON_S = 60

#: The number of worlds for a range. A start is expected to lie between the least and the most of nine in 8 of 10 cases.
WORLDS = 9
#: The number of starts that each world simulates; later ones follow from how fast or slow these are there.
WORLD_STARTS = 24
#: Numbers without a common divisor with `WORLDS`, so that `_part` returns each ninth in exactly one world.
STRIDES = (1, 2, 4, 5, 7, 8)

#: Bound of the passes of a forecast; later starts follow from how fast the queue moves until then.
MOST_PASSES = 300

#: In place of a session's id, in the heap of ends: an event at which no session ends.
NO_SESSION = 0


@dataclass(frozen=True, slots=True)
class BlockingSessions:
    """The sessions that must end before a start, by what is known: their number, the fGPU x 1000 that they hold, and
    their ids, which only administrators see. None of them can be left out."""

    sessions: int
    fgpu_milli: int
    ids: tuple[int, ...] = ()


#: Stands for blocking sessions that were not computed.
NOT_COMPUTED = BlockingSessions(0, 0)


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """When a session is expected to start, on what basis, and which ends that needs."""

    at_s: int
    basis: str
    ahead: BlockingSessions
    range: StartRange | None = None

    @property
    def planned(self) -> StartRange:
        """The range before calibration: the instant alone if nothing is uncertain."""
        return self.range or StartRange(self.at_s, self.at_s, self.at_s)


@dataclass(frozen=True, slots=True)
class SimulatedPass:
    """One simulated pass: what ended before it, what it started, its reservation, and the nodes that changed.

    ``nodes`` are as the pass left them. ``typical``: ``at_s`` rests on how long other sessions ran.
    """

    at_s: int
    typical: bool
    started: Sequence[tuple[Session, Placement]]
    reserved: Reservation | None
    nodes: Mapping[str, NodeFree]
    ended: Sequence[tuple[Session, Placement]]


@dataclass(frozen=True, slots=True)
class SimulatedQueue:
    """The passes over one queue in one world, in order, and the ends after the last of them."""

    passes: Sequence[SimulatedPass]
    #: Instant, whether it rests on how long other sessions ran, session and placement.
    ends: Sequence[tuple[int, bool, Session, Placement]]
    #: By node id, after the last pass.
    free: Mapping[str, NodeFree]
    queue_is_empty: bool
    #: The waits in this world, as a factor of those in the median simulation.
    pace: float = 1.0


@dataclass(slots=True)
class ExpectedStarts:
    """When each waiting session is expected to start."""

    #: By session id.
    found: dict[int, ExpectedStart]
    #: Whether enough sessions have ended to estimate how long others run.
    typical: bool
    #: The resource groups with a node that takes sessions now.
    open: frozenset[str]
    #: The resource groups in which the simulation reached its bound.
    far: dict[str, None]
    #: By resource group: the median simulation, then the worlds of the range.
    futures: dict[str, tuple[SimulatedQueue, ...]] = field(default_factory=dict)

    def why_not(self, session: Session, reason: WaitReason) -> str:
        """Return why a session has no expected start."""
        if session.request.resource_group in self.far:
            return BASIS_FAR
        if reason is WaitReason.QUOTA:
            return BASIS_QUOTA
        none_is_open = session.request.resource_group not in self.open
        return BASIS_NO_NODE if self.typical or none_is_open else BASIS_UNKNOWN


def expected_starts(
    world: Snapshot,
    policy: Policy,
    history: ForecastHistory,
    only: Collection[int] | None = None,
    cache: PlanCache | None = None,
) -> ExpectedStarts:
    """Run the passes forward until all waiting sessions, or ``only`` those, have started.

    In ``world`` the sessions that start now have started. ``cache`` is that of the plan that started them.
    """
    open_groups = frozenset(
        n.resource_group
        for n in world.nodes
        if n.state is NodeState.READY and not (n.devices and all(d.cordoned for d in n.devices))
    )
    starts = ExpectedStarts({}, bool(history.lengths), open_groups, {})
    for group, queue in orders.queue_snapshots(world, policy.accounts).items():
        own = policy.of(group)
        with (cache or PlanCache()).free_capacity(world, group, own.placing) as capacity:
            begin = _SimulationStart(world, queue, own, history.lengths, capacity)
        run = _Simulation(begin, None)
        run.forward(only, MOST_PASSES)
        if not run.is_done:
            run.estimate_far_starts(only)
        if not run.is_done:
            starts.far[group] = None
        futures = [run.simulated()]
        if begin.is_uncertain or run.is_uncertain:
            futures += _range(run.found, begin)
        starts.futures[group] = tuple(futures)
        starts.found |= run.found
    return starts


def _range(found: dict[int, ExpectedStart], begin: _SimulationStart) -> list[SimulatedQueue]:
    """Replace each expected start by the median over all worlds, with the range; return the worlds."""
    now_s = begin.now_s
    by_start = sorted(found, key=lambda i: found[i].at_s)[:WORLD_STARTS]
    first = dict.fromkeys(by_start)
    seen: list[tuple[dict[int, ExpectedStart], SimulatedQueue]] = []
    for n in range(WORLDS):
        run = _Simulation(begin, n)
        run.forward(first, 2 * WORLD_STARTS)
        there = [i for i in by_start if i in run.found]
        waited_s = sum(found[i].at_s - now_s for i in there)
        pace = sum(run.found[i].at_s - now_s for i in there) / waited_s if waited_s else 1.0
        seen.append((run.found, replace(run.simulated(), pace=pace)))
    for i, start in found.items():
        found[i] = _ranged(
            start,
            now_s,
            [own[i].at_s if i in first and i in own else simulated.pace for own, simulated in seen],
        )
    return [simulated for _, simulated in seen]


def _ranged(start: ExpectedStart, now_s: int, seen: Iterable[int | float]) -> ExpectedStart:
    """Return a start with its range. ``seen`` has for each world the instant or, as a float, the world's pace."""
    wait_s = start.at_s - now_s
    instants = sorted(one if isinstance(one, int) else now_s + round(one * wait_s) for one in seen)
    middle_s = instants[len(instants) // 2]
    return replace(start, at_s=middle_s, range=StartRange(instants[0], middle_s, instants[-1]))


def start_behind(
    session: Session, ahead: Collection[int], futures: Sequence[SimulatedQueue], now_s: int
) -> ExpectedStart | None:
    """Return when a request starts that was not simulated, behind the sessions ``ahead`` of it in the queue.

    In each simulation that is the first pass that leaves room for it without the sessions behind it. None if the
    simulations end before.
    """
    found = _first_fit(session, ahead, futures[0])
    if found is None:
        return None
    at_s, typical, node_id, left = found
    ends = (end for one_pass in futures[0].passes if one_pass.at_s <= at_s for end in one_pass.ended)
    later = ((s, where) for end_s, _, s, where in futures[0].ends if end_s <= at_s)
    gone = [
        (s, where) for s, where in (*ends, *later) if where.node_id == node_id and s.placement is not None
    ]
    start = ExpectedStart(at_s, BASIS_TYPICAL if typical else BASIS_LIMITS, _ahead(left, gone, session))
    if len(futures) == 1:
        return start
    others = (_first_fit(session, ahead, simulated) for simulated in futures[1:])
    seen = [
        simulated.pace if one is None else one[0] for one, simulated in zip(others, futures[1:], strict=True)
    ]
    return _ranged(start, now_s, seen)


def _first_fit(
    session: Session, ahead: Collection[int], simulated: SimulatedQueue
) -> tuple[int, bool, str, NodeFree] | None:
    """Return the first instant with room for a request, whether it is typical, and the node with its free amounts."""
    request = session.request
    for one_pass in simulated.passes:
        reserved = (
            one_pass.reserved
            if one_pass.reserved is not None and one_pass.reserved.session_id in ahead
            else None
        )
        in_time = reserved is None or reserved.ends_before(
            free_at_s(session, one_pass.at_s, limit_s=session.time_limit_s)
        )
        for node_id, left in one_pass.nodes.items():
            for behind, where in one_pass.started:
                if where.node_id == node_id and behind.id not in ahead:
                    left = placement.released(left, behind.request, where)
            within = (
                None
                if reserved is None or in_time or reserved.placement.node_id != node_id
                else reserved.remaining
            )
            if placement.place(request, (left,), score=placement.best_fit, within=within) is not None:
                return one_pass.at_s, one_pass.typical, node_id, left
    if not simulated.queue_is_empty:
        return None
    nodes: dict[str, NodeFree] = {}
    for at_s, typical, ended, where in simulated.ends:
        before = nodes.get(where.node_id) or simulated.free.get(where.node_id)
        if before is not None:
            left = nodes[where.node_id] = placement.released(before, ended.request, where)
            if placement.place(request, (left,), score=placement.best_fit) is not None:
                return at_s, typical, where.node_id, left
    return None


def _ahead(
    left: NodeFree, ended: Iterable[tuple[Session, Placement]], without: Session | None = None
) -> BlockingSessions:
    """Return which of the ``ended`` sessions had to end for a start; ``left`` is the free capacity of its node after it.

    A session did not have to end if it still fits there. ``without`` is the starting session if ``left`` is without it.
    """
    offered = {d.device.uuid for d in left.devices if not d.device.cordoned}
    needed: list[Session] = []
    for session, where in ended:
        # Shares of a cordoned device are in the way of no start.
        shares = tuple(share for share in where.shares if share.device_uuid in offered)
        stays = placement.claimed_shares(left, session.request, replace(where, shares=shares))
        if stays is not None and without is not None:
            fits = placement.place(without.request, (stays,), score=placement.best_fit)
            stays = None if fits is None else stays
        if stays is None:
            needed.append(session)
        else:
            left = stays
    return BlockingSessions(len(needed), sum(map(taken_milli, needed)), tuple(sorted(s.id for s in needed)))


class KnownEnd(NamedTuple):
    """What is known of the end of a session: the instant, or the rest of its limit and the past runs."""

    sure_s: int | None = None
    left_s: int | None = None
    rest: RemainingTime | None = None

    def at_s(self, part: float, now_s: int) -> int | None:
        """Return the instant of the end if it runs for as long as this part of similar sessions; None if unknown."""
        if self.rest is not None:
            at_s = now_s + max(1, self.rest.at_s(part))
            return at_s if self.left_s is None else min(at_s, now_s + self.left_s)
        return self.sure_s if self.left_s is None else now_s + self.left_s


def known_end(
    session: Session,
    now_s: int,
    *,
    ledger: Ledger,
    policy: GroupPolicy,
    rest: Callable[[str, str, int], RemainingTime | None],
) -> KnownEnd:
    """Return what is known of the end of a session that holds shares at an instant, or starts then.

    ``rest`` returns how long a session of a user and image that has run for some seconds goes on.
    """
    if session.state is SessionState.TERMINATING:
        return KnownEnd(now_s + 1)
    if session.ends_at_s is not None and session.ends_cause in SURE_ENDS:
        return KnownEnd(max(session.ends_at_s, now_s + 1))
    # The clock may have been set back since.
    started_s = now_s if session.started_at_s is None else min(now_s, session.started_at_s)
    request = session.request
    limits = session.time_limit_s, ledger.limit_s(request), policy.max_lifetime_s
    limit_s = min((limit for limit in limits if limit is not None), default=None)
    ran_s = now_s - started_s
    left_s = None if limit_s is None else limit_s - ran_s
    if left_s is not None and left_s <= 0:
        return KnownEnd(now_s + SOON_S)
    return KnownEnd(None, left_s, rest(request.user, request.image, ran_s))


class _SimulationStart:
    """What all simulations of a queue begin with: the sessions that hold shares, their ends, and the pass of now."""

    def __init__(
        self,
        world: Snapshot,
        queue: orders.QueueSnapshot,
        policy: GroupPolicy,
        lengths: RunLengths,
        capacity: FreeCapacity,
    ) -> None:
        self.now_s = world.now_s
        self.by_user = bool(world.quotas)
        self._policy = policy
        self._lengths = lengths
        self._ledger = Ledger(world)
        #: By user and image, how long a session runs that starts now.
        self._rest_at_start: dict[tuple[str, str], RemainingTime | None] = {}
        #: By id, the sessions that hold shares, and where.
        self.holding: dict[int, tuple[Session, Placement]] = {}
        self.ends: dict[int, KnownEnd] = {}
        for s in world.sessions:
            # With quotas, sessions of the same user in other resource groups may have to end first.
            matters = self.by_user or s.request.resource_group == queue.resource_group
            if matters and (where := taken_placement(s)) is not None:
                self.holding[s.id] = s, where
                self.ends[s.id] = self.end_of(s, world.now_s)
        #: Whether an end rests on how long other sessions ran.
        self.is_uncertain = any(end.rest is not None for end in self.ends.values())
        scheduler = GroupScheduler(world, capacity, policy, Ledger(world), reasons=False)
        self.queue = PendingQueue(scheduler.in_order(queue), by_user=self.by_user, held=True)
        self.started = scheduler.fill(self.queue)
        self.scheduler = scheduler.copy(self.started)

    def end_of(self, session: Session, now_s: int) -> KnownEnd:
        """Return what is known of the end of a session that holds shares at an instant, or starts then."""
        return known_end(session, now_s, ledger=self._ledger, policy=self._policy, rest=self._rest)

    def _rest(self, user: str, image: str, ran_s: int) -> RemainingTime | None:
        if ran_s:
            return self._lengths.rest(user, image, ran_s)
        key = user, image
        if key not in self._rest_at_start:
            self._rest_at_start[key] = self._lengths.rest(*key, 0)
        return self._rest_at_start[key]


class _Simulation:
    """The passes over one queue in one world, one after the other."""

    def __init__(self, begin: _SimulationStart, number: int | None) -> None:
        """``number`` is that of the world; None is the one in which every session ends after the median time."""
        self.found: dict[int, ExpectedStart] = {}
        self.is_uncertain = False
        #: Whether all sessions have started, or nothing can change.
        self.is_done = False
        self._begin = begin
        self._number = number
        self._scheduler = begin.scheduler.copy(begin.started)
        self._queue = begin.queue.copy()
        self._holding = dict(begin.holding)
        self._passes: list[SimulatedPass] = []
        #: By node, the sessions of the snapshot that have ended, in the order of their ends.
        self._ended_on: dict[str, list[tuple[Session, Placement]]] = {}
        #: A heap of instant, session id, and whether the instant is typical.
        self._ends: list[tuple[int, int, bool]] = []
        for session in self._queue.sessions:
            # A node that refused the session is tried again from then on: an event without an end.
            tried_s = (node.until_s(begin.now_s) for node in session.refused)
            self._ends += [(until_s, NO_SESSION, False) for until_s in tried_s if until_s is not None]
        for session_id, end in begin.ends.items():
            self._expect(session_id, end, begin.now_s)
        heapify(self._ends)

    def forward(self, only: Collection[int] | None, most_passes: int) -> None:
        """Make passes and end sessions in between, until all (or ``only`` those) have started or nothing can change."""
        scheduler = self._scheduler
        waiting = self._queue.sessions
        wanted = len(waiting) if only is None else sum(1 for s in waiting if s.id in only)
        placed, ended, by_typical = self._begin.started, list[tuple[Session, Placement]](), False
        for _ in range(most_passes):
            self._record_pass(placed, ended, by_typical=by_typical)
            wanted -= sum(1 for session, _ in placed if only is None or session.id in only)
            if not wanted or not self._ends:
                self.is_done = True
                return
            instant, ended = self._ends[0][0], []
            scheduler.now_s = max(scheduler.now_s, instant)
            while self._ends and self._ends[0][0] == instant:
                _, session_id, typical = heappop(self._ends)
                by_typical = by_typical or typical
                if session_id == NO_SESSION:
                    continue
                session, where = self._holding.pop(session_id)
                scheduler.end(session, where)
                ended.append((session, where))
                if session_id in self._begin.holding:
                    self._ended_on.setdefault(where.node_id, []).append((session, where))
            again = scheduler.resorted()
            if again is not None:
                left = [s for s in again if s.id not in self.found]
                self._queue = PendingQueue(left, by_user=self._begin.by_user, held=True)
            placed = scheduler.fill(self._queue)

    def _record_pass(
        self,
        placed: list[tuple[Session, Placement]],
        ended: list[tuple[Session, Placement]],
        *,
        by_typical: bool,
    ) -> None:
        """Record a pass, and the expected ends of the sessions that it started."""
        scheduler = self._scheduler
        basis = BASIS_TYPICAL if by_typical else BASIS_LIMITS
        after: dict[str, NodeFree] = {}
        on = Counter(where.node_id for _, where in placed)
        # The last one first: sessions that start after it in this pass take nothing that it needs.
        for session, where in reversed(placed):
            there = after.get(where.node_id, scheduler.nodes[where.node_id])
            ahead = NOT_COMPUTED
            if self._number is None:
                ahead = _ahead(there, self._ended_on.get(where.node_id, ()))
            self.found[session.id] = ExpectedStart(scheduler.now_s, basis, ahead)
            on[where.node_id] -= 1
            if on[where.node_id]:
                after[where.node_id] = placement.released(there, session.request, where)
        for session, where in placed:
            self._holding[session.id] = session, where
            if self._expect(session.id, self._begin.end_of(session, scheduler.now_s), scheduler.now_s):
                heappush(self._ends, self._ends.pop())
        changed = {where.node_id for _, where in (*placed, *ended)}
        for reserved in (scheduler.reservation, self._passes[-1].reserved if self._passes else None):
            if reserved is not None:
                changed.add(reserved.placement.node_id)
        nodes = {
            node_id: scheduler.nodes[node_id] for node_id in sorted(changed) if node_id in scheduler.nodes
        }
        self._passes.append(
            SimulatedPass(scheduler.now_s, by_typical, placed, scheduler.reservation, nodes, ended)
        )

    def estimate_far_starts(self, only: Collection[int] | None) -> None:
        """Estimate the other starts from the fGPU requested ahead of them and how fast fGPU has started."""
        scheduler, began_s = self._scheduler, self._begin.now_s
        started = sum(s.request.fgpu_milli for m in self._passes[1:] for s, _ in m.started)
        if not started or scheduler.now_s <= began_s:
            return
        empty = Placer(
            tuple(placement.untouched(left.node) for left in scheduler.nodes.values()), score=best_fit
        )
        ahead_milli = 0
        for session, same in zip(self._queue.sessions, self._queue.set_of, strict=True):
            if session.id in self.found or same is None or same.reason is WaitReason.QUOTA:
                continue
            if not empty.fits(session.request):
                continue
            ahead_milli += session.request.fgpu_milli
            if only is None or session.id in only:
                at_s = scheduler.now_s + ahead_milli * (scheduler.now_s - began_s) // started
                self.found[session.id] = ExpectedStart(at_s, BASIS_TYPICAL, NOT_COMPUTED)
        self.is_done = True

    def simulated(self) -> SimulatedQueue:
        """Return the simulated queue."""
        ends = [
            (at_s, typical, *self._holding[i]) for at_s, i, typical in sorted(self._ends) if i != NO_SESSION
        ]
        is_empty = not self._queue.heads
        return SimulatedQueue(self._passes, ends if is_empty else (), self._scheduler.nodes, is_empty)

    def _expect(self, session_id: int, end: KnownEnd, now_s: int) -> bool:
        """Append the expected end of a session to the heap's list; return False if its end is not known."""
        typical = end.rest is not None
        self.is_uncertain = self.is_uncertain or typical
        at_s = end.at_s(0.5 if self._number is None else _part(session_id, self._number), now_s)
        if at_s is None:
            return False
        self._ends.append((at_s, session_id, typical))
        return True


def _part(session_id: int, world: int) -> float:
    """Return which part of similar sessions runs shorter than this one in a world: 0 to 1, in each world another ninth.

    The session's id determines the order of the ninths, so equal snapshots give equal forecasts.
    """
    mixed = session_id * 2654435761 % 2**32
    ninth = (world * STRIDES[mixed % len(STRIDES)] + mixed // 64) % WORLDS
    inside = (mixed // 4096 + world * 40503) % 1024 / 1024
    return (ninth + inside) / WORLDS
