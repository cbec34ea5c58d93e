"""When each waiting session is expected to start: the planner's passes, run forward from a snapshot.

1. `_Ground` makes a pass at the snapshot's time and notes what is known of the end of each session: a time limit, an
   announced end, or how long similar sessions ran.
2. Ends are uncertain, so `WORLDS` simulations (`_World`) run on copies of this ground, in which sessions end earlier or
   later. Each ends the next sessions, makes a pass, and so on, with the same `GroupScheduler` as the planner.
3. After `WORLD_STARTS` starts a world goes on without places: a session starts once enough fGPU has become free.
4. A start is expected at the median over the worlds, and its range is from the earliest to the latest of them.

Later passes keep the order of the first, except for requests that reach their longest wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from fgpu_scheduler.core import orders, placement
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory, StartRange
from fgpu_scheduler.core.free_capacity import FreeCapacity, PlanCache
from fgpu_scheduler.core.group_scheduler import GroupScheduler
from fgpu_scheduler.core.lifecycle import HOLDING, taken_placement
from fgpu_scheduler.core.model import (
    NodeState,
    Placement,
    Session,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.pending_queue import PendingQueue
from fgpu_scheduler.core.placement import NodeFree
from fgpu_scheduler.core.policies import GroupPolicy, Policy
from fgpu_scheduler.core.quota import Ledger, least_limit
from fgpu_scheduler.core.reservations import NEVER_S, SURE_ENDS, Reservation, free_at_s
from fgpu_scheduler.core.run_lengths import RemainingTime, RunLengths
from fgpu_scheduler.core.usage import taken_milli

BASIS_NOW = "free now"
BASIS_LIMITS = "time limits"
BASIS_TYPICAL = "how long sessions usually run"
BASIS_UNKNOWN = "no estimate yet: too few sessions have ended"
BASIS_NO_NODE = "no estimate: no machine that takes sessions now could hold it"
BASIS_QUOTA = "no estimate: its quota leaves no room"

#: A session that has outlived its time limit is expected to end after this time.
SOON_S = 60

#: The number of worlds. A start is expected to lie between the least and the most of nine in 8 of 10 cases.
WORLDS = 9
#: Numbers without a common divisor with `WORLDS`, so that `_parts` has each ninth in exactly one world.
STRIDES = (1, 2, 4, 5, 7, 8)
#: The number of starts and of passes after which a world goes on without places.
WORLD_STARTS = 64
MOST_PASSES = 100

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
    """When a session is expected to start, before calibration, on what basis, and which ends that needs."""

    planned: StartRange
    basis: str
    ahead: BlockingSessions


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


class SimulatedStart(NamedTuple):
    """A start in one world. ``left`` is the free capacity of its node after it, and ``ended`` what has ended there.
    ``without`` is the starting session if ``left`` does not count it. A start without a place has neither.
    """

    at_s: int
    typical: bool = True
    left: NodeFree | None = None
    ended: Sequence[tuple[Session, Placement]] = ()
    without: Session | None = None


@dataclass(frozen=True, slots=True)
class SimulatedQueue:
    """The passes over one queue in one world, in order, and the ends after the last of them."""

    passes: Sequence[SimulatedPass]
    #: Instant, whether it rests on how long other sessions ran, session and placement.
    ends: Sequence[tuple[int, bool, Session, Placement]]
    #: By node id, after the last pass.
    free: Mapping[str, NodeFree]
    queue_is_empty: bool
    #: The starts by session id.
    found: Mapping[int, SimulatedStart]


@dataclass(slots=True)
class ExpectedStarts:
    """When each waiting session is expected to start."""

    #: By session id.
    found: dict[int, ExpectedStart]
    #: Whether enough sessions have ended to estimate how long others run.
    typical: bool
    #: The resource groups with a node that takes sessions now.
    open: frozenset[str]
    #: By resource group: its queue in each world.
    futures: dict[str, tuple[SimulatedQueue, ...]] = field(default_factory=dict)

    def why_not(self, session: Session, reason: WaitReason) -> str:
        """Return why a session has no expected start."""
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
    starts = ExpectedStarts({}, bool(history.lengths), open_groups)
    for group, queue in orders.queue_snapshots(world, policy.accounts).items():
        own = policy.of(group)
        with (cache or PlanCache()).free_capacity(world, group) as capacity:
            ground = _Ground(world, queue, own, history.lengths, capacity)
        wanted = [s.id for s in queue.waiting if only is None or s.id in only]
        # Without past runs no end is uncertain, and all worlds are the same.
        numbers = range(WORLDS if history.lengths else 1)
        futures = tuple(_World(ground, n, wanted).simulated() for n in numbers)
        starts.futures[group] = futures
        for i in wanted:
            start = _expected([one.found.get(i) for one in futures])
            if start is not None:
                starts.found[i] = start
    return starts


def _expected(seen: Sequence[SimulatedStart | None]) -> ExpectedStart | None:
    """Return the start that is expected from those in each world; None if there is none in half of them."""
    known = sorted((one for one in seen if one is not None), key=itemgetter(0))
    if 2 * len(known) <= len(seen):
        return None
    middle = known[len(known) // 2]
    ahead = NOT_COMPUTED if middle.left is None else _ahead(middle.left, middle.ended, middle.without)
    basis = BASIS_TYPICAL if middle.typical else BASIS_LIMITS
    return ExpectedStart(StartRange(known[0].at_s, middle.at_s, known[-1].at_s), basis, ahead)


def start_behind(
    session: Session,
    ahead: Mapping[int, Session],
    futures: Sequence[SimulatedQueue],
    quotas: QuotasAhead | None = None,
) -> ExpectedStart | None:
    """Return when a request starts that was not simulated, behind the sessions ``ahead`` of it in the queue.

    In each world that is the first pass that leaves room for it without the sessions behind it, or else about when the
    last session ahead of it starts. If ``quotas`` may stop it, there is no start in a world without such a pass.
    """
    return _expected([_start_behind(session, ahead, one, quotas) for one in futures])


def _start_behind(
    session: Session, ahead: Mapping[int, Session], simulated: SimulatedQueue, quotas: QuotasAhead | None
) -> SimulatedStart | None:
    fit = _first_fit(session, ahead, simulated, None if quotas is None else _QuotaUsage(quotas, ahead))
    if fit is None:
        # Where nothing more is known to end, the last start ahead says nothing.
        goes_on = len(simulated.found) >= WORLD_STARTS or len(simulated.passes) >= MOST_PASSES
        if simulated.queue_is_empty or not goes_on or quotas is not None:
            return None
        there = [simulated.found[i].at_s for i in ahead if i in simulated.found]
        return SimulatedStart(max(there)) if there else None
    at_s, typical, node_id, left = fit
    ends = (end for one_pass in simulated.passes if one_pass.at_s <= at_s for end in one_pass.ended)
    later = ((s, where) for end_s, _, s, where in simulated.ends if end_s <= at_s)
    gone = [
        (s, where) for s, where in (*ends, *later) if where.node_id == node_id and s.placement is not None
    ]
    return SimulatedStart(at_s, typical, left, gone, session)


class QuotasAhead:
    """The present usage of quotas and the free nodes, for a request that quotas may stop.

    In ``world`` the sessions that start now have started; ``nodes`` are as they leave them.
    """

    def __init__(self, world: Snapshot, nodes: Iterable[NodeFree]) -> None:
        self.ledger = Ledger(world)
        #: The sessions that the ledger counts, by id.
        self.holding = {s.id: (s, taken_placement(s)) for s in world.sessions if s.state in HOLDING}
        self.nodes = {left.node.id: left for left in nodes}


class _QuotaUsage:
    """The usage of quotas along the passes of one world, for a request behind the sessions ``ahead`` of it."""

    def __init__(self, quotas: QuotasAhead, ahead: Mapping[int, Session]) -> None:
        self._ledger = quotas.ledger.copy()
        self._ahead = ahead
        self._holding = dict(quotas.holding)
        #: What the pass at hand has started behind the request: not counted yet.
        self._behind: list[tuple[Session, Placement]] = []
        self._reserved: Session | None = None
        self._nodes = dict(quotas.nodes)
        #: Whether a quota stopped the request when it was last tried.
        self._stopped = False

    def limit_s(self, session: Session) -> int | None:
        return least_limit((session.time_limit_s, self._ledger.limit_s(session.request)))

    def tried(self, session: Session, changed: Mapping[str, NodeFree]) -> Mapping[str, NodeFree]:
        """Return the nodes to try now: all if a quota stopped the request before, else those that have changed."""
        self._nodes.update(changed)
        before, self._stopped = self._stopped, not self._ledger.allows(session)
        if self._stopped:
            return {}
        return self._nodes if before else changed

    def end(self, session: Session) -> None:
        held = self._holding.pop(session.id, None)
        if held is not None:
            self._ledger.give_back(*held)

    def leave(self) -> None:
        """Go behind the pass at hand: what it started behind the request counts from now on."""
        if self._reserved is not None:
            self._ledger.give_back(self._reserved)
        for session, where in self._behind:
            self._ledger.take(session, where)
        self._reserved, self._behind = None, []

    def enter(self, one_pass: SimulatedPass, reserved: Reservation | None) -> None:
        """Go into the next pass until it comes to the request."""
        self.leave()
        for session, _ in one_pass.ended:
            self.end(session)
        for session, where in one_pass.started:
            # It may have started since these passes were simulated.
            if session.id not in self._holding:
                self._holding[session.id] = session, where
                if session.id in self._ahead:
                    self._ledger.take(session, where)
                else:
                    self._behind.append((session, where))
        if reserved is not None:
            self._reserved = self._ahead[reserved.session_id]
            self._ledger.take(self._reserved)


def _first_fit(
    session: Session, ahead: Collection[int], simulated: SimulatedQueue, usage: _QuotaUsage | None
) -> tuple[int, bool, str, NodeFree] | None:
    """Return the first instant with room for a request, whether it is typical, and the node with its free amounts."""
    request = session.request
    limit_s = session.time_limit_s if usage is None else usage.limit_s(session)
    for one_pass in simulated.passes:
        reserved, tried = one_pass.reserved, one_pass.nodes
        if reserved is not None and reserved.session_id not in ahead:
            reserved = None
        if usage is not None:
            usage.enter(one_pass, reserved)
            tried = usage.tried(session, tried)
        in_time = reserved is None or reserved.ends_before(free_at_s(session, one_pass.at_s, limit_s=limit_s))
        for node_id, left in tried.items():
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
    nodes = dict(simulated.free)
    if usage is not None:
        usage.leave()
    for at_s, typical, ended, where in simulated.ends:
        own = where.node_id
        if own in nodes:
            nodes[own] = placement.released(nodes[own], ended.request, where)
        tried = {own: nodes[own]} if own in nodes else {}
        if usage is not None:
            usage.end(ended)
            tried = usage.tried(session, tried)
        for node_id, left in tried.items():
            if placement.fits_on(left, request):
                return at_s, typical, node_id, left
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
        if stays is not None and without is not None and not placement.fits_on(stays, without.request):
            stays = None
        if stays is None:
            needed.append(session)
        else:
            left = stays
    return BlockingSessions(len(needed), sum(map(taken_milli, needed)), tuple(sorted(s.id for s in needed)))


class KnownEnd(NamedTuple):
    """What is known of the end of a session: the most seconds until then, and the past runs; both None: nothing."""

    most_s: int | None
    rest: RemainingTime | None = None

    def left_s(self, parts: Sequence[float]) -> list[int] | None:
        """Return the seconds until the end if it runs for as long as each of these parts of similar sessions, or None."""
        if self.rest is None:
            return None if self.most_s is None else [self.most_s] * len(parts)
        most_s = NEVER_S if self.most_s is None else self.most_s
        return [most_s if at_s > most_s else at_s or 1 for at_s in self.rest.at_s(parts)]


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
        return KnownEnd(1)
    if session.ends_at_s is not None and session.ends_cause in SURE_ENDS:
        return KnownEnd(max(session.ends_at_s - now_s, 1))
    # The clock may have been set back since.
    started_s = now_s if session.started_at_s is None else min(now_s, session.started_at_s)
    request = session.request
    limit_s = least_limit((session.time_limit_s, ledger.limit_s(request), policy.max_lifetime_s))
    ran_s = now_s - started_s
    left_s = None if limit_s is None else limit_s - ran_s
    if left_s is not None and left_s <= 0:
        return KnownEnd(SOON_S)
    return KnownEnd(left_s, rest(request.user, request.image, ran_s))


class _Holder(NamedTuple):
    """A session that holds shares, and the fGPU x 1000 that its end frees on the nodes of the resource group."""

    session: Session
    where: Placement
    milli: int
    #: Whether its end rests on how long other sessions ran.
    typical: bool


#: An instant, a session's id, and the session that ends then.
_End = tuple[int, int, _Holder | None]


class _Ground:
    """What all worlds of a queue begin with: the sessions that hold shares, their ends, and the pass of now."""

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
        self._ledger = Ledger(world)
        self._policy = policy
        self._rest = cache(lengths.rest)
        self._runs_s: dict[int, tuple[list[int] | None, bool]] = {}
        #: The sessions that hold shares and have a known end, and how long they go on in each world.
        self.holders: list[tuple[_Holder, list[int]]] = []
        for s in world.sessions:
            # With quotas, sessions of the same user in other resource groups may have to end first.
            matters = self.by_user or s.request.resource_group == queue.resource_group
            if matters and (where := taken_placement(s)) is not None:
                run_s, typical = self.run_s(s)
                milli = where.fgpu_milli if where.node_id in capacity.placer.nodes else 0
                if run_s is not None:
                    self.holders.append((_Holder(s, where, milli, typical), run_s))
        scheduler = GroupScheduler(world, capacity, policy, Ledger(world), reasons=False)
        self.queue = PendingQueue(scheduler.in_order(queue), by_user=self.by_user, held=True)
        # A node that refused a session is tried again from then on: an event without an end.
        tried_s = [node.until_s(world.now_s) for s in queue.waiting for node in s.refused]
        self.tried: list[_End] = [(at_s, NO_SESSION, None) for at_s in tried_s if at_s is not None]
        self.started = scheduler.fill(self.queue)
        self.scheduler = scheduler.copy()

    @cached_property
    def later(self) -> list[tuple[int, int, list[int] | None]]:
        """The sessions that fit on empty nodes and in their quotas, in queue order: the id, the fGPU x 1000, and how long
        it runs in each world."""
        nodes, fit = [placement.untouched(left.node) for left in self.scheduler.nodes.values()], list[int]()
        for same in self.queue.sets:
            if same.reason is not WaitReason.QUOTA and any(placement.fits_on(n, same.shape) for n in nodes):
                fit += same.positions[same.first :]
        in_order = [self.queue.sessions[position] for position in sorted(fit)]
        return [(s.id, self._ledger.milli(s), self.run_s(s)[0]) for s in in_order]

    def run_s(self, session: Session) -> tuple[list[int] | None, bool]:
        """Return for each world how long a session runs that holds shares now, or from its start on, and whether that
        rests on how long other sessions ran."""
        found = self._runs_s.get(session.id)
        if found is None:
            end = known_end(session, self.now_s, ledger=self._ledger, policy=self._policy, rest=self._rest)
            found = self._runs_s[session.id] = end.left_s(_parts(session.id)), end.rest is not None
        return found


class _World:
    """The passes over one queue in one world, one after the other, until the ``wanted`` sessions have started."""

    def __init__(self, ground: _Ground, number: int, wanted: Sequence[int]) -> None:
        self.found: dict[int, SimulatedStart] = {}
        self._ground = ground
        self._number = number
        self._scheduler = ground.scheduler.copy()
        self._queue = ground.queue.copy()
        self._passes: list[SimulatedPass] = []
        #: By node, the sessions of the snapshot that have ended, in the order of their ends.
        self._ended_on: dict[str, tuple[tuple[Session, Placement], ...]] = {}
        #: A heap.
        self._ends: list[_End] = [
            (ground.now_s + run_s[number], holder.session.id, holder) for holder, run_s in ground.holders
        ]
        self._ends += ground.tried
        heapify(self._ends)
        self._forward(wanted)

    def _forward(self, wanted: Sequence[int]) -> None:
        """Make passes and end sessions in between, until all wanted ones have started or nothing can change."""
        scheduler, found = self._scheduler, self.found
        placed, ended, typical = self._ground.started, list[tuple[Session, Placement]](), False
        while True:
            self._record_pass(placed, ended, typical=typical)
            if not self._ends or all(i in found for i in wanted):
                return
            if len(found) >= WORLD_STARTS or len(self._passes) >= MOST_PASSES:
                self._go_on_without_places()
                return
            instant, ended = self._ends[0][0], []
            scheduler.now_s = max(scheduler.now_s, instant)
            while self._ends and self._ends[0][0] == instant:
                holder = heappop(self._ends)[2]
                if holder is None:
                    continue
                session, where, _, by_typical = holder
                typical = typical or by_typical
                scheduler.end(session, where)
                ended.append((session, where))
                if session.placement is not None:
                    on = self._ended_on.get(where.node_id, ())
                    self._ended_on[where.node_id] = (*on, (session, where))
            again = scheduler.resorted()
            if again is not None:
                left = [s for s in again if s.id not in found]
                self._queue = PendingQueue(left, by_user=self._ground.by_user, held=True)
            placed = scheduler.fill(self._queue)

    def _record_pass(
        self,
        placed: list[tuple[Session, Placement]],
        ended: list[tuple[Session, Placement]],
        *,
        typical: bool,
    ) -> None:
        """Record a pass, and the expected ends of the sessions that it started."""
        scheduler = self._scheduler
        after: dict[str, NodeFree] = {}
        # The last one first: sessions that start after it in this pass take nothing that it needs.
        for session, where in reversed(placed):
            there = after.get(where.node_id) or scheduler.nodes[where.node_id]
            gone = self._ended_on.get(where.node_id, ())
            self.found[session.id] = SimulatedStart(scheduler.now_s, typical, there, gone)
            after[where.node_id] = placement.released(there, session.request, where)
        for session, where in placed:
            run_s, by_typical = self._ground.run_s(session)
            if run_s is not None:
                holder = _Holder(session, where, where.fgpu_milli, by_typical)
                heappush(self._ends, (scheduler.now_s + run_s[self._number], session.id, holder))
        changed = {where.node_id for _, where in (*placed, *ended)}
        for reserved in (scheduler.reservation, self._passes[-1].reserved if self._passes else None):
            if reserved is not None:
                changed.add(reserved.placement.node_id)
        nodes = {
            node_id: scheduler.nodes[node_id] for node_id in sorted(changed) if node_id in scheduler.nodes
        }
        self._passes.append(
            SimulatedPass(scheduler.now_s, typical, placed, scheduler.reservation, nodes, ended)
        )

    def _go_on_without_places(self) -> None:
        """Start the others in queue order, each as soon as enough fGPU has become free, on whatever nodes."""
        found, number, now_s, free_milli = self.found, self._number, self._scheduler.now_s, 0
        ends = [(at_s, holder.milli) for at_s, _, holder in self._ends if holder is not None]
        heapify(ends)
        for waiting_id, needed, run_s in self._ground.later:
            if waiting_id in found:
                continue
            while free_milli < needed:
                if not ends:
                    return
                now_s, milli = heappop(ends)
                free_milli += milli
            free_milli -= needed
            found[waiting_id] = SimulatedStart(now_s)
            if run_s is not None:
                heappush(ends, (now_s + run_s[number], needed))

    def simulated(self) -> SimulatedQueue:
        """Return the simulated queue."""
        is_empty = not self._queue.heads
        ended = sorted(self._ends) if is_empty else ()
        ends = [(at_s, one.typical, one.session, one.where) for at_s, _, one in ended if one is not None]
        return SimulatedQueue(self._passes, ends, self._scheduler.nodes, is_empty, self.found)


@lru_cache(maxsize=1 << 14)
def _parts(session_id: int) -> list[float]:
    """Return which part of similar sessions runs shorter than this one in each world: 0 to 1, in each another ninth.

    The session's id determines the order of the ninths, so equal snapshots give equal forecasts.
    """
    mixed = session_id * 2654435761 % 2**32
    stride, first, inside = STRIDES[mixed % len(STRIDES)], mixed // 64, mixed // 4096
    return [
        ((world * stride + first) % WORLDS + (inside + world * 40503) % 1024 / 1024) / WORLDS
        for world in range(WORLDS)
    ]
