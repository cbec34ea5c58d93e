"""When each who waits is expected to start: the same passes as the planner's, run forward from a snapshot.

No second implementation of the policy: a session is expected to start when, in a world where those who run end as
others did before them, and by their time limits, a pass would start it. Later passes go on in the order of the first, but
for those who by then have waited for as long as they may. Nobody knows when one session ends: so that is run forward
several times, in worlds that differ in who ends when, and what they make of a start is its range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from fgpu_scheduler.core import orders, placement
from fgpu_scheduler.core.backfill import SURE_ENDS
from fgpu_scheduler.core.ground import Ground
from fgpu_scheduler.core.hindsight import Experience, Range
from fgpu_scheduler.core.lanes import Lanes
from fgpu_scheduler.core.lengths import Lengths
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    NodeState,
    Placement,
    Session,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.passes import Floor
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.quota import Ledger
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

MOST_PASSES = 3000
"""Bound of the passes that a forecast makes; who would start later is told nothing."""

NOBODY = 0
"""No session's id."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """With whose end a session starts, as far as ends are known: sessions, what they hold in fGPU x 1000, and, for
    administrators only, their ids. None of them could be left out."""

    sessions: int
    fgpu_milli: int
    ids: tuple[int, ...] = ()


NOT_LOOKED_AT = Ahead(0, 0)


@dataclass(frozen=True, slots=True)
class Start:
    """When one is expected to start, by what that is known, and with whose end."""

    at_s: int
    basis: str
    ahead: Ahead
    range: Range | None = None

    @property
    def planned(self) -> Range:
        return self.range or Range(self.at_s, self.at_s, self.at_s)


@dataclass(slots=True)
class Starts:
    """When each who waits is expected to start."""

    found: dict[int, Start]
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


def expected_starts(
    world: Snapshot, policy: Policy, experience: Experience, only: Collection[int] | None = None
) -> Starts:
    """Run the passes forward until all who wait have started, or ``only`` those.

    What starts now is placed in ``world`` already.
    """
    takers = frozenset(
        n.resource_group
        for n in world.nodes
        if n.state is NodeState.READY and not (n.devices and all(d.cordoned for d in n.devices))
    )
    starts = Starts({}, bool(experience.lengths), takers, {})
    for group, line in orders.lines(world).items():
        own = Starts({}, starts.typical, takers, starts.far)
        run = _Run(world, group, policy, experience.lengths, None)
        run.forward(line, own, only, MOST_PASSES)
        if run.is_uncertain:
            _range(own.found, world, line, policy, experience.lengths)
        starts.found |= own.found
    return starts


def _range(
    found: dict[int, Start], world: Snapshot, line: orders.Line, policy: Policy, lengths: Lengths
) -> None:
    """Put in place of each expected start that in the middle of all worlds, with the earliest and the latest."""
    by_start = sorted(found, key=lambda i: found[i].at_s)[:WORLD_STARTS]
    if not by_start:
        return
    now_s = world.now_s
    first = dict.fromkeys(by_start)
    seen: list[tuple[dict[int, Start], float]] = []
    for n in range(WORLDS):
        own = Starts({}, True, frozenset(), {})
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
        self._policy = policy
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
        self, line: orders.Line, starts: Starts, only: Collection[int] | None, most_passes: int
    ) -> None:
        """Make passes, and end sessions in between, until all have started or nothing changes any more."""
        floor = self._floor
        queue = Lanes(floor.in_order(line), by_user=self._by_user, held=True)
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
                starts.found[session.id] = Start(floor.now_s, basis, ahead)
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
                queue = Lanes(left, by_user=self._by_user, held=True)
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
        lifetime_s = self._policy.of(session.request.resource_group).max_lifetime_s
        limits = session.time_limit_s, self._ledger.limit_s(session.request), lifetime_s
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
        offered = {d.device.uuid for d in left.devices if not d.device.cordoned}
        ids = []
        for session_id in self._ended_on.get(left.node.id, ()):
            session, where = self._at_first[session_id]
            # On a device that is not offered now nobody is in its place.
            shares = tuple(share for share in where.shares if share.device_uuid in offered)
            stays = placement.fitted(left, session, replace(where, shares=shares))
            if stays is None:
                ids.append(session_id)
            else:
                left = stays
        return Ahead(len(ids), sum(taken_milli(self._at_first[i][0]) for i in ids), tuple(sorted(ids)))


def _part(session_id: int, world: int) -> float:
    """Return before which part of those like it a session ends in a world: in each of them before another ninth.

    Which in which differs by its id, and equal worlds make equal forecasts.
    """
    mixed = session_id * 2654435761 % 2**32
    ninth = (world * STRIDES[mixed % len(STRIDES)] + mixed // 64) % WORLDS
    inside = (mixed // 4096 + world * 40503) % 1024 / 1024
    return (ninth + inside) / WORLDS
