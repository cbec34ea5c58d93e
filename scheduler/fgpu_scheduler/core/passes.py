"""One pass over the queue of a resource group: who starts now where, for whom a place is kept, why others wait.

The planner makes one pass over a snapshot. The forecast makes one after the other on the same floor, ends sessions in
between, and so decides what the planner would.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from operator import attrgetter
from typing import assert_never

from fgpu_scheduler.core.backfill import Kept, free_at_s, gather
from fgpu_scheduler.core.ground import NOBODY, Ground
from fgpu_scheduler.core.lanes import Lane, Lanes, Misfits
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import Placement, Request, Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.orders import First, Line, in_order, priority
from fgpu_scheduler.core.placement import NodeFree, claimed, place, returned
from fgpu_scheduler.core.policies import Backfill, GroupPolicy, Promises
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.releases import Release, Releases
from fgpu_scheduler.core.shares import liked


class Floor:
    """What is free of a resource group, who holds the rest, and the place that is kept for the first of its queue."""

    def __init__(
        self,
        snapshot: Snapshot,
        ground: Ground,
        policy: GroupPolicy,
        ledger: Ledger,
        *,
        reasons: bool = True,
    ) -> None:
        """Lay it out on the ground of its group. Without ``reasons`` lanes are not told why they wait: sooner."""
        self.now_s = snapshot.now_s
        self._reasons = reasons
        self.kept: Kept | None = None
        self._policy = policy
        self._reserves = policy.backfill in (Backfill.EASY, Backfill.BOUNDED)
        self._ledger = ledger
        self._quotas = bool(snapshot.quotas)
        self._ground = ground
        self._snapshot = snapshot
        self._releases = Releases(self._known_ends)
        self._line: Line | None = None
        self._ranks: Sequence[float] = ()
        self._waited_s: list[int] = []
        """How long each of the line had waited at first, in rising order."""
        self._aged_number = 0
        self._waits_for: Session | None = None
        self._looked = self._strict = False
        self._misfits = Misfits(ground.devices)
        self._freed: dict[str, None] = {}
        """The nodes on which something has ended since the last pass."""

    def copy(self, started: Iterable[tuple[Session, Placement]]) -> Floor:
        """Return one that goes on from the same state, in which these have ``started`` since the snapshot."""
        other = copy(self)
        other._ledger, other._ground = Ledger(self._snapshot), self._ground.copy()
        for session, where in started:
            other._ledger.take(session, where)
        if self._waits_for is not None:
            other._ledger.take(self._waits_for)
        other._releases, other._misfits = self._releases.copy(), self._misfits.copy()
        other._freed = dict(self._freed)
        return other

    @property
    def left(self) -> dict[str, NodeFree]:
        """What is free of each node, by id."""
        return self._ground.left

    def in_order(self, line: Line) -> list[Session]:
        """Return those of the line, next one first."""
        self._line, self._ranks, self._waited_s = line, self._ranked(line), sorted(line.waited_s)
        return self._in_order(line, self._number_aged(0))

    def _ranked(self, line: Line) -> Sequence[float]:
        # Orders look at all who hold something.
        return self._policy.order(line) if len(line.waiting) > 1 else [0]

    def in_order_now(self) -> list[Session] | None:
        """Return those of the line again, some of whom may have started; None unless others are aged since then.

        The order's ranks stay those that they were.
        """
        line = self._line
        passed_s = 0 if line is None else self.now_s - line.snapshot.now_s
        number = self._number_aged(passed_s)
        if line is None or number == self._aged_number:
            return None
        waited_s = [waited_s + passed_s for waited_s in line.waited_s]
        return self._in_order(replace(line, waited_s=waited_s), number)

    def _in_order(self, line: Line, aged_number: int) -> list[Session]:
        self._aged_number = aged_number
        first = First(
            promises=self._reserves and self._policy.promises is Promises.FIRST,
            longest_wait_s=self._policy.longest_wait_s if self._reserves else None,
            most_priority=self._policy.most_priority,
        )
        return [line.waiting[n] for n in in_order(line, lambda _: self._ranks, first)]

    def _number_aged(self, passed_s: int) -> int:
        """Return how many of the line have waited for as long as they may."""
        longest_s = self._policy.longest_wait_s
        if longest_s is None or not self._reserves:
            return 0
        return len(self._waited_s) - bisect_left(self._waited_s, longest_s - passed_s)

    def fill(self, queue: Lanes) -> list[tuple[Session, Placement]]:
        """Start every session that the policy lets start now, in the order of the queue; note why the others wait."""
        placed: list[tuple[Session, Placement]] = []
        done: list[int] = []
        while (again := self._fill_once(queue, done, placed)) is not None:
            done.append(again)
        return placed

    def _fill_once(
        self, queue: Lanes, done: Collection[int], placed: list[tuple[Session, Placement]]
    ) -> int | None:
        """Try the queue once, and add to ``placed``.

        Returns the session whose place is kept no longer, once it was tried: what was kept is there for those ahead of
        it, too. For those who are ``done`` no place is kept again.
        """
        self._release()
        self._looked = self._strict = False
        self._misfits.begin([self._ground.room(node_id) for node_id in self._freed])
        self._freed = {}
        lanes, heads, before = queue.lanes, queue.heads, len(placed)
        # Those that join behind while it is gone through are few: most wait.
        misfits, skips = self._misfits.found, not self._reasons
        promised = self._next_promised(queue, done)
        for number, n in heads:
            lane = lanes[n]
            session = queue.sessions[number]
            if promised is not None and self._priority(session) <= self._priority(promised):
                self._keep_promised(promised)
                promised = None
            if skips and lane.shape in misfits:
                continue
            is_own = session is self._waits_for
            if is_own:
                if not self._ground.placer.fits(session.request):
                    lane.reason = WaitReason.RESOURCES
                    continue
                self._release()
            refused = [node.node_id for node in session.left_out(self.now_s)] if session.refused else ()
            where = self._start(session, lane, refused)
            if where is None and refused and lane.reason is not WaitReason.QUOTA:
                lane.reason = WaitReason.CLUSTER
            if where is not None:
                placed.append((session, where))
                lane.at += 1
                if lane.left:
                    insort(heads, (lane.numbers[lane.at], n))
            if is_own:
                queue.drop_started()
                return session.id
        if len(placed) > before:
            queue.drop_started()
        return None

    def promises(self, session_id: int, queue: Lanes, placed: Collection[int]) -> bool:
        """Return whether the start of the session for whom a place is kept is promised, where its instant is known."""
        return self._policy.promises is not Promises.NONE and not self._outranked(session_id, queue, placed)

    def _outranked(self, session_id: int, queue: Lanes, placed: Collection[int]) -> bool:
        """Return whether somebody of higher priority than this one is left waiting, and may take its place.

        No place is kept for those who have not waited for long, or who wait for an end that is not known.
        """
        ranks: dict[int, None] = {}
        for session, lane in zip(queue.sessions, queue.lane_of, strict=True):
            if session.id == session_id:
                own = self._priority(session)
                return any(rank > own for rank in ranks)
            if lane is not None and session.id not in placed:
                ranks[self._priority(session)] = None
        return False

    def end(self, session: Session, where: Placement) -> None:
        """Take back what a session held that ends now: one of the snapshot, or one that was started here."""
        left = self.left.get(where.node_id)
        if left is not None:
            left = returned(left, session.request, where)
            self._ground.put(left)
            self._ground.placer.update(left)
            self._freed[where.node_id] = None
        self._ledger.give_back(session, where)
        self._releases.end(session.id, where.node_id)

    def _start(self, session: Session, lane: Lane, refused: Collection[str]) -> Placement | None:
        """Start a session on none of the ``refused`` nodes, or say in its lane why it waits.

        While it is refused any it blocks nobody, and no place is kept for it: it might not be given that either.
        """
        asked = session.request
        lane.reason = WaitReason.RESOURCES
        if self._quotas and not self._ledger.allows(session):
            lane.reason = WaitReason.QUOTA
            return None
        shape = lane.shape
        if shape in self._misfits.found:
            return None
        ruled_out = self._misfits.rule_out(shape)
        if ruled_out or not self._ground.has_room(asked) or not self._ground.placer.fits(asked):
            if not refused:
                # Who was refused says nothing for others of this shape: the first of them blocks.
                self._misfits.add(shape, ruled_out=ruled_out)
                self._blocked(session)
            return None
        if self._strict:
            lane.reason = WaitReason.PRIORITY
            return None
        free_again_s = self._free_at_s(session, self.now_s) if self._reserves else None
        kept = self.kept
        in_time = kept is None or kept.ends_before(free_again_s)
        where = self._proposed(session, lane, refused, in_time=in_time)
        if where is None:
            return None
        self._ground.put(claimed(self.left[where.node_id], asked, where))
        if refused or (kept is not None and not in_time):
            self._ground.placer.update(self.left[where.node_id])
        if kept is not None and not in_time and where.node_id == kept.placement.node_id:
            self.kept = replace(kept, beside=claimed(kept.beside, asked, where))
        self._ledger.take(session, where)
        if self._reserves:
            self._releases.start(session, where, free_again_s)
        return where

    def _proposed(
        self, session: Session, lane: Lane, refused: Collection[str], *, in_time: bool
    ) -> Placement | None:
        """Propose a placement that the quotas allow, on the GPU model that is liked most of those that are left."""
        reason = WaitReason.PRIORITY
        for asked in liked(session.request):
            if refused:
                where = self._elsewhere(asked, refused, in_time=in_time)
            else:
                where = self._ground.placer.place(asked) if in_time else self._beside(asked)
            if where is not None and (not self._quotas or self._ledger.allows(session, where)):
                return where
            if where is not None:
                # It is worth more on these devices than it could have been.
                self._ground.placer.update(self.left[where.node_id])
                reason = WaitReason.QUOTA
        lane.reason = reason
        return None

    def _known_ends(self, node_id: str) -> tuple[Release, ...]:
        """Return the known ends of those who hold something on a node of the snapshot."""
        known = self._ground.ends.get(node_id)
        if known is None:
            there, now_s = self._snapshot.groups.on_node.get(node_id, NOBODY).values(), self._snapshot.now_s
            holds = [(s, s.placement) for s in there if s.state in HOLDING and s.placement is not None]
            ends = ((self._free_at_s(s, now_s), s, where) for s, where in holds)
            known = tuple(Release(at_s, s, where) for at_s, s, where in ends if at_s is not None)
            # After the clock was set back the ends of those who seem to start later move with it.
            if all((s.started_at_s or s.scheduled_at_s or now_s + 1) <= now_s for s, _ in holds):
                self._ground.ends[node_id] = known
        return known

    def _beside(self, asked: Request) -> Placement | None:
        """Propose a placement that the kept place does not need, on its own node only if there is no other."""
        kept = self.kept
        assert kept is not None
        own = kept.placement.node_id
        where = self._ground.placer.place_elsewhere(asked, own)
        if where is None:
            found = place(asked, (self.left[own],), score=self._ground.score, beside=kept.beside)
            where = None if found is None else found[0]
        return where

    def _elsewhere(self, asked: Request, refused: Collection[str], *, in_time: bool) -> Placement | None:
        """Propose a placement on none of the refused nodes, nor where a place is kept unless it is free in time."""
        kept = None if in_time or self.kept is None else self.kept.placement.node_id
        offered = (left for node_id, left in self.left.items() if node_id not in (*refused, kept))
        found = place(asked, tuple(offered), score=self._ground.score)
        return None if found is None else found[0]

    def _blocked(self, session: Session) -> None:
        """Keep a place for a session that does not fit, if it is the first and the policy does so."""
        match self._policy.backfill:
            case Backfill.STRICT:
                self._strict = True
            case Backfill.SKIP:
                pass
            case Backfill.EASY | Backfill.BOUNDED:
                looks = not self._looked and self._policy.backfill is Backfill.EASY
                self._looked = True
                if self.kept is None:
                    aged = self._aged(session)
                    if aged or looks or self._is_promised(session):
                        self._keep(session, aged=aged)
            case _:
                assert_never(self._policy.backfill)

    def _keep(self, session: Session, *, aged: bool) -> None:
        kept = self._releases.soonest(session, self.left, now_s=self.now_s, score=self._ground.score) or (
            gather(session, self.left) if aged else None
        )
        if kept is not None:
            self._keep_at(session, kept)

    def _keep_at(self, session: Session, kept: Kept) -> None:
        if self._policy.promises is Promises.LATEST:
            kept = kept.until(session.promised_at_s)
        self.kept = kept
        # What its owner starts meanwhile must not use up the quota that it needs.
        self._waits_for = session
        self._ledger.take(session)

    def _release(self) -> None:
        """Keep no place any more."""
        if self._waits_for is not None:
            self._ledger.give_back(self._waits_for)
        self.kept = self._waits_for = None

    def _is_promised(self, session: Session) -> bool:
        return session.promised_at_s is not None and self._policy.promises is not Promises.NONE

    def _next_promised(self, queue: Lanes, done: Collection[int]) -> Session | None:
        """Return the first to whom a start was promised that others may go ahead of; None: there is none."""
        if not self._reserves or self._policy.promises is not Promises.LATEST:
            return None
        waiting = [
            s for s, lane in queue.promised if lane.left and s.id not in done and not s.left_out(self.now_s)
        ]
        return min(waiting, key=lambda s: (-self._priority(s), s.promised_at_s, s.id), default=None)

    def _keep_promised(self, session: Session) -> None:
        """Keep a place for it before others of its priority are tried, also where it could start now."""
        asked = session.request
        if self.kept is not None or (self._quotas and not self._ledger.allows(session)):
            return  # Somebody of higher priority has the place that is kept.
        where = self._ground.placer.place(asked) if self._ground.has_room(asked) else None
        if where is None:
            self._keep(session, aged=self._aged(session))
            return
        before = self.left[where.node_id]
        self._ground.placer.update(before)  # It is not there yet.
        self._keep_at(session, Kept(session.id, where, self.now_s, claimed(before, asked, where)))

    def _priority(self, session: Session) -> int:
        return priority(session, self._policy.most_priority)

    def _aged(self, session: Session) -> bool:
        longest_s, line = self._policy.longest_wait_s, self._line
        if longest_s is None or line is None or not self._aged_number:
            return False
        number = bisect_left(line.waiting, session.place, key=attrgetter("place"))
        return line.waited_s[number] + self.now_s - line.snapshot.now_s >= longest_s

    def _free_at_s(self, session: Session, now_s: int) -> int | None:
        unlimited = session.request.time_limit_s is None and not self._quotas
        if unlimited and session.ends_at_s is None and session.state is not SessionState.TERMINATING:
            return None  # On most clusters that is almost everybody.
        limits = session.time_limit_s, self._ledger.limit_s(session.request) if self._quotas else None
        found = [limit for limit in limits if limit is not None]
        return free_at_s(session, now_s, limit_s=min(found, default=None))
