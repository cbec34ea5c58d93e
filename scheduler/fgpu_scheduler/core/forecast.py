"""Position, expected start and reason: the same passes as the planner's, run forward from a snapshot.

No second implementation of the policy: a session is expected to start when, in a world where those who run end as
others did before them, and by their time limits, a pass would start it. Later passes go on in the order of the first, but
for those who by then have waited for as long as they may. Nobody knows when one session ends: so that is run forward
several times, in worlds that differ in who ends when, and what they make of a start is its range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import assert_never

from fgpu_scheduler.core import orders, placement
from fgpu_scheduler.core.admission import MIN_CPU_MILLI, MIN_MEMORY_MIB, Caps, amounts_that_fit
from fgpu_scheduler.core.backfill import SURE_ENDS
from fgpu_scheduler.core.hindsight import Experience, Range
from fgpu_scheduler.core.lengths import Lengths
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    NodeState,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.passes import Floor, Ground, Queue
from fgpu_scheduler.core.planner import Place, Plan, Reserve, applied, plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.quota import Ledger, quota_words
from fgpu_scheduler.core.scores.chosen import score_for
from fgpu_scheduler.core.shares import Shape, shape
from fgpu_scheduler.core.shortage import shortage
from fgpu_scheduler.core.units import MEMORY_GRAIN_MIB
from fgpu_scheduler.core.usage import held_milli

BASIS_NOW = "free now"
BASIS_LIMITS = "time limits"
BASIS_TYPICAL = "how long sessions usually run"
BASIS_UNKNOWN = "no estimate yet: too few sessions have ended"
BASIS_NO_NODE = "no estimate: no machine that takes sessions now could hold it"
BASIS_QUOTA = "no estimate: its quota leaves no room"
BASIS_FAR = "no estimate: too many wait ahead of it"

STARTS_NOW = "starts now"
HELD = "the Hub has restarted, and resumes this request soon"
KEPT = "a place is kept for it"
BEHIND = "enough is free, but it is kept for somebody ahead in the queue"

Beside = Callable[[int], tuple[int, int]]
"""Of an amount of fGPU x 1000: the CPU x 1000 and the memory in MiB that go with it."""

SOON_S = 60
"""A session that has outlived its time limit is expected to end about this much later."""

WORLDS = 9
"""So many worlds make a range, from the earliest start in any of them to the latest: of ten equally likely starts eight
lie between the least and the most of nine others."""
WORLD_STARTS = 24
"""So many starts are looked for in each world; a later one is told from how much faster or slower these came there."""
ORDERS = (1, 2, 4, 5, 7, 8)
"""What has no divisor in common with `WORLDS`: each session ends in each ninth of the cases in one of the worlds."""

MOST_PASSES = 3000
"""Bound of the passes that a forecast makes; who would start later is told nothing."""

NOBODY = 0
"""No session's id."""

CPU_GRAIN_MILLI = 100
"""Other amounts of CPU are offered in tenths of a core."""
SIDE_BY_SIDE = 8
MOST_OFFERS = 8
"""Bound of the other amounts of CPU and memory that are planned for one forecast."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """With whose end a session starts, as far as ends are known: sessions, what they hold in fGPU x 1000, and, for
    administrators only, their ids. None of them could be left out."""

    sessions: int
    fgpu_milli: int
    ids: tuple[int, ...] = ()


NOT_LOOKED_AT = Ahead(0, 0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known of one waiting session.

    ``position`` 0 means that it starts now; 1 is the first of those of its resource group that wait on.
    ``promised_at_s`` is the latest start where a place is kept for it. From ``early_at_s`` to ``late_at_s`` are 80
    of 100 starts, 10 are before and 10 after it; both are the expected start where nothing of it is uncertain.
    ``planned`` is the same before experience has stretched it.
    """

    session_id: int
    position: int
    reason: WaitReason
    text: str
    expected_start_at_s: int | None
    basis: str
    promised_at_s: int | None = None
    ahead: Ahead | None = None
    early_at_s: int | None = None
    late_at_s: int | None = None
    planned: Range | None = None

    @property
    def told(self) -> Range | None:
        """The range that is told, with the expected start in its middle; None where no start is expected."""
        early_s, middle_s, late_s = self.early_at_s, self.expected_start_at_s, self.late_at_s
        if early_s is None or middle_s is None or late_s is None:
            return None
        return Range(early_s, middle_s, late_s)


def forecast(snapshot: Snapshot, policy: Policy, experience: Experience) -> tuple[Forecast, ...]:
    """Return a forecast for every waiting session, in queue order.

    ``experience`` is that of the resource group; without any, only ends by time limits are known.
    A held session is forecast as if somebody waited for it again.
    """
    return _forecast(snapshot, policy, experience, None)


def _forecast(
    snapshot: Snapshot, policy: Policy, experience: Experience, only: Collection[int] | None
) -> tuple[Forecast, ...]:
    """Forecast; where ``only`` is given those alone are told of."""
    now = plan(snapshot, policy)
    # What starts in this very pass is not free for those who wait on.
    world = applied(snapshot, now)
    return _told(snapshot, world, now, _starts(world, policy, experience, only), only, experience)


def _told(
    snapshot: Snapshot,
    world: Snapshot,
    now: Plan,
    starts: _Starts,
    only: Collection[int] | None,
    experience: Experience,
) -> tuple[Forecast, ...]:
    left = placement.free(world)
    ledger = Ledger(world)
    sessions = {s.id: s for s in snapshot.sessions}
    placed_now = {p.session_id for p in now.placed}
    length: dict[str, int] = {}
    shortages: dict[Shape, str] = {}
    found = []
    for decision in now.decisions:
        session = sessions[decision.session_id]
        told = only is None or session.id in only
        if session.id in placed_now:
            if not told:
                continue
            at_s = snapshot.now_s
            found.append(
                Forecast(
                    session.id,
                    0,
                    WaitReason.RESOURCES,
                    STARTS_NOW,
                    at_s,
                    BASIS_NOW,
                    early_at_s=at_s,
                    late_at_s=at_s,
                )
            )
            continue
        assert not isinstance(decision, Place)
        group = session.request.resource_group
        length[group] = length.get(group, 0) + 1
        if not told:
            continue
        match decision.reason:
            case WaitReason.HELD:
                text = HELD
            case WaitReason.RESERVED:
                text = KEPT
            case WaitReason.PRIORITY:
                text = BEHIND
            case WaitReason.QUOTA:
                text = _over_quota(ledger, session)
            case WaitReason.CLUSTER:
                text = _refused(session)
            case WaitReason.RESOURCES:
                asked = shape(session.request)
                if asked not in shortages:
                    shortages[asked] = shortage(session.request, left)
                text = shortages[asked]
            case _:
                assert_never(decision.reason)
        start = starts.found.get(session.id)
        # Over a quota it waits for those that count there, and not for whoever is on the GPU that it gets later.
        of_quota = decision.reason is WaitReason.QUOTA
        promised_at_s = decision.starts_at_s if isinstance(decision, Reserve) else None
        told_of = Forecast(
            session.id,
            length[group],
            decision.reason,
            text,
            None,
            starts.why_not(session, decision.reason) if start is None else start.basis,
            promised_at_s,
            None if start is None or of_quota else start.ahead,
        )
        found.append(told_of if start is None else _ranged(told_of, start, snapshot.now_s, experience))
    return tuple(found)


def _ranged(told: Forecast, start: _Start, now_s: int, experience: Experience) -> Forecast:
    """Return a forecast with the start and its range, which begins no sooner than now and keeps what was promised."""
    found = experience.stretch.of(start.planned)
    middle_s = max(found.middle_at_s, min(now_s, start.at_s))
    late_s = max(found.late_at_s, middle_s)
    if told.promised_at_s is not None:
        late_s = min(late_s, max(told.promised_at_s, start.at_s))
    middle_s = min(middle_s, late_s)
    return replace(
        told,
        expected_start_at_s=middle_s,
        early_at_s=min(max(found.early_at_s, now_s), middle_s),
        late_at_s=late_s,
        planned=start.planned,
    )


def _refused(session: Session) -> str:
    last = session.refused[-1]
    return f"the cluster had no place on {last.node_id} after all, and is asked again soon: {last.words}"


def _over_quota(ledger: Ledger, session: Session) -> str:
    quota = ledger.stops(session)
    of = "its quota" if quota is None else f"the quota of {quota_words(quota)}"
    return f"{of} is used up until a session ends"


@dataclass(frozen=True, slots=True)
class _Start:
    at_s: int
    basis: str
    ahead: Ahead
    range: Range | None = None

    @property
    def planned(self) -> Range:
        return self.range or Range(self.at_s, self.at_s, self.at_s)


@dataclass(slots=True)
class _Starts:
    """When each who waits is expected to start."""

    found: dict[int, _Start]
    typical: bool
    open: frozenset[str]
    """The resource groups with a node that takes sessions now."""
    far: dict[str, None]
    """The resource groups in which the passes did not come to their end."""

    def why_not(self, session: Session, reason: WaitReason) -> str:
        """Return why no start is expected."""
        if session.request.resource_group in self.far:
            return BASIS_FAR
        if reason is WaitReason.QUOTA:
            return BASIS_QUOTA
        none_is_open = session.request.resource_group not in self.open
        return BASIS_NO_NODE if self.typical or none_is_open else BASIS_UNKNOWN


def _starts(
    world: Snapshot, policy: Policy, experience: Experience, only: Collection[int] | None = None
) -> _Starts:
    """Run the passes forward until all who wait have started, or only those.

    What starts now is placed in ``world`` already.
    """
    takers = frozenset(
        n.resource_group
        for n in world.nodes
        if n.state is NodeState.READY and not (n.devices and all(d.cordoned for d in n.devices))
    )
    starts = _Starts({}, bool(experience.lengths), takers, {})
    for group, line in orders.lines(world).items():
        own = _Starts({}, starts.typical, takers, starts.far)
        run = _Run(world, group, policy, experience.lengths, None)
        run.forward(line, own, only, MOST_PASSES)
        if run.is_uncertain:
            _range(own.found, world, line, policy, experience.lengths)
        starts.found |= own.found
    return starts


def _range(
    found: dict[int, _Start], world: Snapshot, line: orders.Line, policy: Policy, lengths: Lengths
) -> None:
    """Put in place of each expected start that in the middle of all worlds, with the earliest and the latest."""
    by_start = sorted(found, key=lambda i: found[i].at_s)[:WORLD_STARTS]
    if not by_start:
        return
    now_s = world.now_s
    first = dict.fromkeys(by_start)
    seen: list[tuple[dict[int, _Start], float]] = []
    for n in range(WORLDS):
        own = _Starts({}, True, frozenset(), {})
        run = _Run(world, line.resource_group, policy, lengths, n)
        run.forward(line, own, first, 2 * WORLD_STARTS)
        # How fast the queue moves in this world, as far as it was looked at.
        there = [i for i in by_start if i in own.found]
        waited_s = sum(found[i].at_s - now_s for i in there)
        pace = sum(own.found[i].at_s - now_s for i in there) / waited_s if waited_s else 1.0
        seen.append((own.found, pace))
    for i, start in found.items():
        instants = sorted(
            own[i].at_s if i in first and i in own else now_s + round(pace * (start.at_s - now_s))
            for own, pace in seen
        )
        middle_s = instants[WORLDS // 2]
        found[i] = replace(start, at_s=middle_s, range=Range(instants[0], middle_s, instants[-1]))


class _Run:
    """The passes over the queue of one resource group, one after the other."""

    def __init__(
        self, world: Snapshot, group: str, policy: Policy, lengths: Lengths, number: int | None
    ) -> None:
        """``number`` is that of the world; None: where everything lasts as half of what was like it did."""
        self._lengths = lengths
        self._number = number
        self.is_uncertain = False
        self._ledger = Ledger(world)
        self._by_user = bool(world.quotas)
        own, ground = policy.of(group), Ground()
        ground.lay(world, group, own.placing)
        self._floor = Floor(world, ground, own, self._ledger, reasons=False)
        self._holding: dict[int, tuple[Session, Placement]] = {}
        self._ends: list[tuple[int, int, bool]] = []
        """Instant, session, and whether that is known by how long others ran."""
        self._ended_on: dict[str, list[int]] = {}
        """Of those who hold something now, by node, who has ended, in this order."""
        for s in world.sessions:
            # With quotas the others of a user, in other groups too, may have to end first.
            matters = self._by_user or s.request.resource_group == group
            if matters and s.state in HOLDING and s.placement is not None:
                self._hold(s, s.placement, world.now_s)
        self._at_first = dict(self._holding)
        heapify(self._ends)

    def forward(
        self, line: orders.Line, starts: _Starts, only: Collection[int] | None, most_passes: int
    ) -> None:
        """Make passes, and end sessions in between, until all have started or nothing changes any more."""
        floor = self._floor
        queue = Queue(floor.in_order(line), by_user=self._by_user, held=True)
        for session in queue.sessions:
            # From then on a node that it was refused is tried again: an instant at which nobody ends.
            tried_s = (node.until_s(floor.now_s) for node in session.refused)
            self._ends += [(until_s, NOBODY, False) for until_s in tried_s if until_s is not None]
        heapify(self._ends)
        wanted = len(queue.sessions) if only is None else sum(1 for s in queue.sessions if s.id in only)
        by_typical = False
        for _ in range(most_passes):
            placed = floor.fill(queue)
            basis = BASIS_TYPICAL if by_typical else BASIS_LIMITS
            after: dict[str, placement.NodeFree] = {}
            on = Counter(where.node_id for _, where in placed)
            # The last one first: who starts after it in this pass takes nothing that it needs.
            for session, where in reversed(placed):
                there = after.get(where.node_id, floor.left[where.node_id])
                ahead = self._ahead(there) if self._number is None else NOT_LOOKED_AT
                starts.found[session.id] = _Start(floor.now_s, basis, ahead)
                on[where.node_id] -= 1
                if on[where.node_id]:
                    after[where.node_id] = placement.returned(there, session.request, where)
            for session, where in placed:
                self._hold(session, where, floor.now_s)
                wanted -= only is None or session.id in only
            if not wanted or not self._ends:
                return
            instant = self._ends[0][0]
            floor.now_s = max(floor.now_s, instant)
            while self._ends and self._ends[0][0] == instant:
                _, session_id, typical = heappop(self._ends)
                by_typical = by_typical or typical
                if session_id == NOBODY:
                    continue
                session, where = self._holding.pop(session_id)
                floor.end(session, where)
                if session_id in self._at_first:
                    self._ended_on.setdefault(where.node_id, []).append(session_id)
            again = floor.in_order_now()
            if again is not None:
                left = [s for s in again if s.id not in starts.found]
                queue = Queue(left, by_user=self._by_user, held=True)
        starts.far[line.resource_group] = None

    def _hold(self, session: Session, where: Placement, now_s: int) -> None:
        self._holding[session.id] = session, where
        end = self._expected_end(session, now_s)
        if end is not None:
            heappush(self._ends, (end[0], session.id, end[1]))

    def _expected_end(self, session: Session, now_s: int) -> tuple[int, bool] | None:
        """Return when a session is expected to end, and whether how long others ran tells."""
        if session.state is SessionState.TERMINATING:
            return now_s + 1, False
        if session.ends_at_s is not None and session.ends_cause in SURE_ENDS:
            return max(session.ends_at_s, now_s + 1), False
        # The clock may have been set back since.
        started_s = now_s if session.started_at_s is None else min(now_s, session.started_at_s)
        limits = session.time_limit_s, self._ledger.limit_s(session.request)
        limit_s = min((limit for limit in limits if limit is not None), default=None)
        ran_s = now_s - started_s
        left_s = None if limit_s is None else limit_s - ran_s
        if left_s is not None and left_s <= 0:
            return now_s + SOON_S, False
        rest = self._lengths.rest(session.request.user, session.request.image, ran_s)
        if rest is None:
            return None if left_s is None else (now_s + left_s, False)
        self.is_uncertain = True
        rest_s = max(1, rest.at_s(0.5 if self._number is None else _part(session.id, self._number)))
        return now_s + (rest_s if left_s is None else min(rest_s, left_s)), True

    def _ahead(self, left: placement.NodeFree) -> Ahead:
        """Return whose ends a session needed that leaves this of its node: who ended first is tried first without."""
        spare = _Spare(left)
        ended = self._ended_on.get(left.node.id, ())
        ids = tuple(sorted(i for i in ended if not spare.takes(*self._at_first[i])))
        return Ahead(len(ids), sum(held_milli(self._at_first[i][0]) for i in ids), ids)


def _part(session_id: int, world: int) -> float:
    """Return before which part of those like it a session ends in a world: in each of them before another ninth.

    Which in which differs by its id, and equal worlds make equal forecasts.
    """
    mixed = session_id * 2654435761 % 2**32
    ninth = (world * ORDERS[mixed % len(ORDERS)] + mixed // 64) % WORLDS
    inside = (mixed // 4096 + world * 40503) % 1024 / 1024
    return (ninth + inside) / WORLDS


class _Spare:
    """What a node has left once somebody has started there."""

    def __init__(self, left: placement.NodeFree) -> None:
        self._left = left
        self._cpu_milli, self._memory_mib = left.cpu_milli, left.memory_mib
        self._devices: dict[str, list[int]] = {}

    def takes(self, session: Session, where: Placement) -> bool:
        """Return whether a session could have stayed after all; it is taken in, if so."""
        cpu_milli = self._cpu_milli - session.request.cpu_milli
        memory_mib = self._memory_mib - session.request.memory_mib
        if cpu_milli < 0 or memory_mib < 0:
            return False
        devices = {}
        for share in where.shares:
            free = self._device(share)
            if free is None:
                # It is not offered now: nobody is there in its place.
                continue
            amounts = share.fgpu_milli, share.memory_mib, share.compute_percent, 1
            after = [has - wants for has, wants in zip(free, amounts, strict=True)]
            if min(after) < 0:
                return False
            devices[share.device_uuid] = after
        self._cpu_milli, self._memory_mib = cpu_milli, memory_mib
        self._devices |= devices
        return True

    def _device(self, share: Share) -> list[int] | None:
        """Return what a device has left for a share; nothing where it is shared in another mode."""
        free = self._devices.get(share.device_uuid)
        if free is not None:
            return free
        own = next((d for d in self._left.devices if d.device.uuid == share.device_uuid), None)
        if own is None or own.device.cordoned:
            return None
        if own.mode not in (None, share.mode):
            return [0, 0, 0, 0]
        return [own.fgpu_milli, own.memory_mib, own.compute_percent, own.shares]


@dataclass(frozen=True, slots=True)
class RequestForecast:
    """What would become of ``count`` sessions submitted now, and what would start now or sooner.

    ``largest_now_milli`` is the largest amount with which all would start at once. Where there is none, ``soonest_milli``
    is the amount with which all have started soonest, at ``soonest_at_s``, if that is sooner than with what was asked
    for. ``beside_now`` is the most CPU, in thousandths of a core, and memory in MiB beside the same GPU with which all
    would start at once, where only these are short. ``reason`` and ``ahead`` are those of the first that waits.
    """

    startable_now: int
    position: int | None
    expected_start_at_s: int | None
    basis: str
    text: str
    largest_now_milli: int | None
    reason: WaitReason | None = None
    ahead: Ahead | None = None
    early_at_s: int | None = None
    late_at_s: int | None = None
    soonest_milli: int | None = None
    soonest_at_s: int | None = None
    beside_now: tuple[int, int] | None = None


def forecast_request(
    request: Request,
    count: int,
    snapshot: Snapshot,
    policy: Policy,
    caps: Caps,
    experience: Experience,
) -> RequestForecast:
    """Forecast a request that is not submitted yet, by submitting it to a copy of the world.

    ``position`` and the expected start are those of the last of the sessions, when all have started.
    """
    submitted, ids = _submitted(snapshot, request, count)
    found = {f.session_id: f for f in _forecast(submitted, policy, experience, ids)}
    own = [found[i] for i in ids]
    waiting = [f for f in own if f.basis != BASIS_NOW]
    largest = largest_now_milli(request, snapshot, policy, caps, count=count)
    if not waiting:
        return RequestForecast(count, None, snapshot.now_s, BASIS_NOW, STARTS_NOW, largest)
    first = min(waiting, key=lambda f: f.position)
    last = max(waiting, key=lambda f: f.position)
    told = RequestForecast(
        startable_now=count - len(waiting),
        position=last.position,
        expected_start_at_s=last.expected_start_at_s,
        basis=last.basis,
        text=first.text,
        largest_now_milli=largest,
        reason=first.reason,
        ahead=first.ahead,
        early_at_s=last.early_at_s,
        late_at_s=last.late_at_s,
        beside_now=_beside_now(request, count, snapshot, policy),
    )
    if largest is not None:
        return told
    sooner = _soonest(request, count, snapshot, policy, caps, experience)
    start = last.expected_start_at_s
    if sooner is None or (start is not None and sooner[1] >= start):
        return told
    return replace(told, soonest_milli=sooner[0], soonest_at_s=sooner[1])


def _submitted(snapshot: Snapshot, request: Request, count: int) -> tuple[Snapshot, tuple[int, ...]]:
    """Return the world in which a request was submitted now, and the ids of its sessions."""
    next_id = max((s.id for s in snapshot.sessions), default=0) + 1
    new = [Session(next_id + n, request, SessionState.PENDING, snapshot.now_s) for n in range(count)]
    return snapshot.with_sessions((*snapshot.sessions, *new)), tuple(s.id for s in new)


def _amounts(request: Request, snapshot: Snapshot, caps: Caps) -> list[Request]:
    """Return the request with each other amount that could be asked for, smallest first."""
    own = [n for n in snapshot.nodes if n.resource_group == request.resource_group]
    plain = replace(request, gpu_memory_mib=None, compute_percent=None)
    return [replace(plain, fgpu_milli=amount) for amount in amounts_that_fit(own, caps)]


def largest_now_milli(
    request: Request,
    snapshot: Snapshot,
    policy: Policy,
    caps: Caps,
    *,
    count: int = 1,
    beside: Beside | None = None,
) -> int | None:
    """Return the largest amount with which ``count`` would start at once, or None.

    The CPU and memory with it are the request's, or what goes ``beside`` each amount. What is free so often is
    submitted to a copy of the world, and planned there.
    """
    score = score_for(policy.of(request.resource_group).placing, snapshot, request.resource_group)
    left = placement.free(snapshot)
    for asked in reversed(_amounts(request, snapshot, caps)):
        if beside is not None:
            cpu_milli, memory_mib = beside(asked.fgpu_milli)
            asked = replace(asked, cpu_milli=cpu_milli, memory_mib=memory_mib)
        if _is_free(asked, count, left, score) and _all_start(asked, count, snapshot, policy):
            return asked.fgpu_milli
    return None


def _all_start(asked: Request, count: int, snapshot: Snapshot, policy: Policy) -> bool:
    """Return whether ``count`` of a request, submitted to a copy of the world, are all placed there at once."""
    submitted, ids = _submitted(snapshot, asked, count)
    return {p.session_id for p in plan(submitted, policy).placed}.issuperset(ids)


def _beside_now(request: Request, count: int, snapshot: Snapshot, policy: Policy) -> tuple[int, int] | None:
    """Return the most CPU and memory with which all would start at once with the same GPU; None where less does not help.

    What is tried is what each node has left, for one of them or for several side by side.
    """
    score = score_for(policy.of(request.resource_group).placing, snapshot, request.resource_group)
    left = placement.free(snapshot)
    least = replace(request, cpu_milli=MIN_CPU_MILLI, memory_mib=MIN_MEMORY_MIB)
    if not _is_free(least, count, left, score):
        return None
    own = [n for n in left if n.node.resource_group == request.resource_group]
    sides = sorted({*range(1, min(count, SIDE_BY_SIDE) + 1), -(-count // len(own)), count})
    tried = {
        (
            min(request.cpu_milli, node.cpu_milli // side // CPU_GRAIN_MILLI * CPU_GRAIN_MILLI),
            min(request.memory_mib, node.memory_mib // side // MEMORY_GRAIN_MIB * MEMORY_GRAIN_MIB),
        )
        for node in own
        for side in sides
    }
    offers = (
        replace(request, cpu_milli=c, memory_mib=m) for c, m in sorted(tried, reverse=True) if c > 0 and m > 0
    )
    fits = (asked for asked in offers if _is_free(asked, count, left, score))
    starts = (asked for asked in islice(fits, MOST_OFFERS) if _all_start(asked, count, snapshot, policy))
    found = next(starts, None)
    return None if found is None else (found.cpu_milli, found.memory_mib)


def _is_free(asked: Request, count: int, left: placement.Free, score: placement.Score) -> bool:
    """Return whether ``count`` of a request fit beside each other, placed one after the other."""
    for _ in range(count):
        found = placement.place(asked, left, score=score)
        if found is None:
            return False
        left = found[1]
    return True


def _soonest(
    request: Request,
    count: int,
    snapshot: Snapshot,
    policy: Policy,
    caps: Caps,
    experience: Experience,
) -> tuple[int, int] | None:
    """Return the smallest amount, and when all of them would have started.

    Nothing larger starts sooner: it fits wherever that does.
    """
    amounts = _amounts(request, snapshot, caps)
    if not amounts or (amounts[0].fgpu_milli >= request.fgpu_milli and request.gpu_memory_mib is None):
        return None
    submitted, ids = _submitted(snapshot, amounts[0], count)
    now = plan(submitted, policy)
    found = _starts(applied(submitted, now), policy, experience, ids).found
    waiting = set(ids) - {p.session_id for p in now.placed}
    if not waiting <= found.keys():
        return None
    return amounts[0].fgpu_milli, max((found[i].at_s for i in waiting), default=snapshot.now_s)
