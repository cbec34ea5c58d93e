"""One pass over the queue of a resource group: which sessions start, which gets a reservation, why the others wait.

`GroupScheduler.fill` makes a pass:

1. Drop the reservation of the last pass: it is decided again from what is free now.
2. Go through the queue in order, trying only the first session of each set of identical requests (`PendingQueue`).
3. A session with a promised start gets its place reserved before the first session whose priority is not higher is
   tried, so that the promise holds.
4. Try the session: its quotas, then the shapes that are known not to fit, then the free capacity.
5. If it does not fit, a strict policy starts nothing behind it. Other policies reserve a place for it if it is the
   first that does not fit, has waited too long, or has a promised start; there is one reservation at a time.
6. Behind a reservation a session starts if it ends in time, or where the reservation leaves room (EASY backfill).
7. When the session with the reservation is itself tried, the reservation ends and the queue is tried from its head
   again: sessions ahead of it may now fit.

The planner makes one pass over a snapshot. The forecast makes pass after pass on one `GroupScheduler`, ends sessions in
between, and so reaches the decisions that the planner would.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from math import inf

from fgpu_scheduler.core.free_capacity import NO_SESSIONS, FreeCapacity
from fgpu_scheduler.core.guarantees import guaranteed_first
from fgpu_scheduler.core.lifecycle import claims_shares, taken_placement
from fgpu_scheduler.core.model import Placement, Request, Session, SessionState, Snapshot, WaitReason
from fgpu_scheduler.core.orders import QueueSnapshot, aged_from_s, in_order
from fgpu_scheduler.core.pending_queue import EquivalentRequests, PendingQueue
from fgpu_scheduler.core.placement import NodeFree, claimed, place, released, without_machine
from fgpu_scheduler.core.policies import GroupPolicy
from fgpu_scheduler.core.quota import Ledger, least_limit
from fgpu_scheduler.core.reservations import (
    FREE_AT,
    NEVER_S,
    Release,
    ReleaseSchedule,
    Reservation,
    free_at_s,
    least_missing_place,
)
from fgpu_scheduler.core.shares import RequestShape, per_preferred_model


class GroupScheduler:
    """The state of the passes over one resource group: free capacity, known ends, quota usage, and the reservation.

    The free capacity itself is in `FreeCapacity`; this class decides which sessions may use it.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        capacity: FreeCapacity,
        policy: GroupPolicy,
        ledger: Ledger,
        *,
        reasons: bool = True,
    ) -> None:
        """Begin with the snapshot's sessions on the group's ``capacity``.

        ``reasons=False`` skips some wait reasons, which makes a pass faster.
        """
        self.now_s = snapshot.now_s
        self._reasons = reasons
        self.reservation: Reservation | None = None
        self._policy = policy
        #: Whether the policy backfills behind a reservation; a strict one starts nothing behind a blocked session.
        self._backfills = not policy.strict
        self._ledger = ledger
        #: Whether there are quotas: without any, the ledger is not asked.
        self._quotas = bool(snapshot.quotas)
        self._guarantees = any(quota.guaranteed_milli is not None for quota in snapshot.quotas)
        self._capacity = capacity
        self._snapshot = snapshot
        self._releases = ReleaseSchedule(self._known_ends)
        #: The queue of the last `in_order`, and the policy's rank of each of its sessions.
        self._queue: QueueSnapshot | None = None
        self._ranks: Sequence[float] = ()
        #: By session id, the time from which a request for several GPUs comes first within its priority.
        self._aged_from_s: dict[int, int] = {}
        #: The next of these times.
        self._sort_again_at_s = NEVER_S
        #: The session that has the reservation. The ledger counts its request as used.
        self._reserved_for: Session | None = None
        #: Whether a session was blocked in this pass, and whether no session behind it may start.
        self._saw_blocked = self._stopped = False
        #: The shapes that did not fit in this pass.
        self._unfit: set[RequestShape] = set()
        #: The shapes for which the reservation leaves no place, for sessions that do not end in time.
        self._kept_out: set[RequestShape] = set()

    def copy(self) -> GroupScheduler:
        """Return an independent copy."""
        other = copy(self)
        other._ledger, other._capacity = self._ledger.copy(), self._capacity.copy()
        other._releases = self._releases.copy()
        return other

    @property
    def nodes(self) -> dict[str, NodeFree]:
        """The free capacity of each node, by node id."""
        return self._capacity.placer.nodes

    def in_order(self, queue: QueueSnapshot) -> list[Session]:
        """Return the waiting sessions in the order of the policy, first to start first."""
        # A session that waits alone needs no rank; ranking reads all sessions that hold shares.
        self._queue = queue
        self._ranks = self._policy.order(queue) if len(queue.waiting) > 1 else [0]
        longest_s = self._policy.longest_wait_s if self._backfills else None
        if longest_s is not None:
            self._aged_from_s = aged_from_s(queue, longest_s)
        return self._in_order(queue)

    def resorted(self) -> list[Session] | None:
        """Return the queue sorted for the present time, with its earlier ranks; None if the order is the same."""
        if self._queue is None or self.now_s < self._sort_again_at_s:
            return None
        return self._in_order(self._queue)

    def _in_order(self, queue: QueueSnapshot) -> list[Session]:
        later = [at_s for at_s in self._aged_from_s.values() if at_s > self.now_s]
        self._sort_again_at_s = min(later, default=NEVER_S)
        aged: Sequence[int] = ()
        if len(later) < len(self._aged_from_s):
            aged = [n for n, session in enumerate(queue.waiting) if self._aged(session)]
        found = [queue.waiting[n] for n in in_order(queue, self._ranks, aged)]
        return guaranteed_first(found, self._ledger) if self._guarantees else found

    def fill(self, queue: PendingQueue) -> list[tuple[Session, Placement]]:
        """Start, in queue order, every session that the policy allows now, and note why the others wait."""
        placed: list[tuple[Session, Placement]] = []
        done: list[int] = []
        while (again := self._fill_once(queue, done, placed)) is not None:
            done.append(again)
        return placed

    def _fill_once(
        self, queue: PendingQueue, done: Collection[int], placed: list[tuple[Session, Placement]]
    ) -> int | None:
        """Go through the queue once and add what starts to ``placed``.

        If the session with the reservation is tried and may fit, stop there and return its id: the reservation is over,
        so the queue must be tried again from its head. Else return None: the pass is complete. ``done`` are the ids that
        were returned before; the promised sessions among them get no second reservation ahead of the others.
        """
        self._drop_reservation()
        self._saw_blocked = self._stopped = False
        self._unfit = set()
        sets, heads, before = queue.sets, queue.heads, len(placed)
        # When a session starts, the loop inserts the next one of its set into ``heads``, the list that it walks.
        unfit, skips = self._unfit, not self._reasons
        promised = self._next_promised(queue, done)
        for position, n in heads:
            same = sets[n]
            session = queue.sessions[position]
            if promised is not None and session.request.priority <= promised.request.priority:
                self._reserve_promised(promised)
                promised = None
            if skips and same.shape in unfit:
                continue
            has_reservation = session is self._reserved_for
            if has_reservation:
                if not self._capacity.placer.fits(session.request):
                    same.reason = WaitReason.RESOURCES
                    continue
                self._drop_reservation()
            refused = [node.node_id for node in session.refusing_nodes(self.now_s)] if session.refused else ()
            where = self._start(session, same, refused)
            if where is None and refused and same.reason is not WaitReason.QUOTA:
                same.reason = WaitReason.CLUSTER
            if where is not None:
                placed.append((session, where))
                same.first += 1
                if same.waits:
                    insort(heads, (same.positions[same.first], n))
            if has_reservation:
                queue.drop_started()
                return session.id
        if len(placed) > before:
            queue.drop_started()
        return None

    def promises(self, session_id: int, queue: PendingQueue, placed: Collection[int]) -> bool:
        """Return whether the session with the reservation may be promised its start.

        It may not while a session of higher priority waits, since that session may take the place.
        """
        highest = -inf
        for session, same in zip(queue.sessions, queue.set_of, strict=True):
            if session.id == session_id:
                return highest <= session.request.priority
            if same is not None and session.id not in placed:
                highest = max(highest, session.request.priority)
        return True

    def end(self, session: Session, where: Placement) -> None:
        """Free the shares of a session that ends now, whether it is in the snapshot or was started by a pass."""
        left = self.nodes.get(where.node_id)
        if left is not None:
            self._capacity.placer.update(released(left, session.request, where))
        self._ledger.give_back(session, where)
        self._releases.end(session.id, where.node_id)

    def _start(
        self, session: Session, same: EquivalentRequests, refused: Collection[str]
    ) -> Placement | None:
        """Start a session outside the ``refused`` nodes, or note in its set why it waits.

        A session that a node has refused gets no reservation and blocks no other session, since the engine might refuse
        the reserved place too.
        """
        request = session.request
        same.reason = WaitReason.RESOURCES
        if self._quotas and not self._ledger.allows(session):
            same.reason = WaitReason.QUOTA
            return None
        if same.shape in self._unfit:
            return None
        if not self._capacity.placer.fits(request):
            if not refused:
                self._unfit.add(same.shape)
                self._blocked(session)
            return None
        if self._stopped:
            same.reason = WaitReason.PRIORITY
            return None
        free_again_s = self._free_at_s(session, self.now_s) if self._backfills else None
        reservation = self.reservation
        in_time = reservation is None or reservation.ends_before(free_again_s)
        if not in_time and same.shape in self._kept_out:
            same.reason = WaitReason.PRIORITY
            return None
        where = self._find_placement(session, same, refused, in_time=in_time)
        if where is None:
            if not in_time and not refused and same.reason is WaitReason.PRIORITY:
                self._kept_out.add(same.shape)
            return None
        self._capacity.placer.update(claimed(self.nodes[where.node_id], request, where))
        if reservation is not None and not in_time and where.node_id == reservation.placement.node_id:
            assert reservation.remaining is not None
            self.reservation = replace(reservation, remaining=claimed(reservation.remaining, request, where))
        self._ledger.take(session, where)
        if self._backfills:
            self._releases.start(session, where, free_again_s)
        return where

    def _find_placement(
        self, session: Session, same: EquivalentRequests, refused: Collection[str], *, in_time: bool
    ) -> Placement | None:
        """Return a placement that the quotas allow, on the first GPU model of its preferences with room."""
        reason = WaitReason.PRIORITY
        for request in per_preferred_model(session.request):
            if refused:
                where = self._outside_refused(request, refused, in_time=in_time)
            else:
                where = self._capacity.placer.best(request) if in_time else self._outside_reservation(request)
            if where is not None and in_time and not refused and self._reasons:
                where = self._away_from_parked(request, where)
            if where is not None and (not self._quotas or self._ledger.allows(session, where)):
                return where
            if where is not None:
                reason = WaitReason.QUOTA
        same.reason = reason
        return None

    def _away_from_parked(self, request: Request, where: Placement) -> Placement:
        """Return a placement where no parked session would be in the way of its return, or else ``where``."""
        if not self._parked_on(where.node_id, {share.device_uuid for share in where.shares}):
            return where
        offered = []
        for node_id, left in self.nodes.items():
            for parked in self._parked_on(node_id):
                assert parked.placement is not None
                left = claimed(left, without_machine(parked.request), parked.placement)
            offered.append(left)
        return self._place_on(offered, request) or where

    def _parked_on(self, node_id: str, uuids: Collection[str] | None = None) -> list[Session]:
        """Return the parked sessions of a node, or of these GPUs, with shares that are free for others."""
        return [
            session
            for session in self._snapshot.index.on_node.get(node_id, NO_SESSIONS).values()
            if session.parked_at_s is not None
            and not claims_shares(session)
            and (uuids is None or not session.device_uuids.isdisjoint(uuids))
        ]

    def _known_ends(self, node_id: str) -> tuple[Release, ...]:
        """Return the known ends of the snapshot's sessions that hold shares on a node, the next one first."""
        known = self._capacity.ends.get(node_id)
        if known is None:
            now_s, there = self._snapshot.now_s, self._snapshot.index.on_node.get(node_id, NO_SESSIONS)
            holds = [(s, where) for s in there.values() if (where := taken_placement(s)) is not None]
            ends = ((self._free_at_s(s, now_s), s, where) for s, where in holds)
            found = [Release(at_s, s, where) for at_s, s, where in ends if at_s is not None]
            known = tuple(sorted(found, key=FREE_AT))
            # Do not cache after the clock was set back: sessions seem to start later, and their ends move with it.
            if all((s.started_at_s or s.scheduled_at_s or now_s + 1) <= now_s for s, _ in holds):
                self._capacity.ends[node_id] = known
        return known

    def _outside_reservation(self, request: Request) -> Placement | None:
        """Return a placement that leaves the reservation whole; one on the reserved node only if no other node fits."""
        reservation = self.reservation
        assert reservation is not None
        own = reservation.placement.node_id
        where = self._capacity.placer.best(request, elsewhere=own)
        return where or self._place_on((self.nodes[own],), request, within=reservation.remaining)

    def _outside_refused(
        self, request: Request, refused: Collection[str], *, in_time: bool
    ) -> Placement | None:
        """Return a placement outside the refused nodes, and outside the reserved node unless it ends in time."""
        reservation = None if in_time or self.reservation is None else self.reservation.placement.node_id
        offered = (left for node_id, left in self.nodes.items() if node_id not in (*refused, reservation))
        return self._place_on(offered, request)

    def _place_on(
        self, offered: Iterable[NodeFree], request: Request, within: NodeFree | None = None
    ) -> Placement | None:
        found = place(request, tuple(offered), score=self._capacity.score, within=within)
        return None if found is None else found[0]

    def _blocked(self, session: Session) -> None:
        """Reserve a place for a session that does not fit, if it is the first one, aged, or promised a start."""
        if not self._backfills:
            self._stopped = True
            return
        first, self._saw_blocked = not self._saw_blocked, True
        if self.reservation is None and (first or self._aged(session) or session.promised_at_s is not None):
            self._reserve(session)

    def _reserve(self, session: Session) -> None:
        reservation = self._releases.soonest(
            session, self.nodes, now_s=self.now_s, score=self._capacity.score
        )
        if reservation is None and self._aged(session):
            reservation = least_missing_place(session, self.nodes, self.now_s)
        if reservation is not None:
            self._reserve_at(session, reservation)

    def _reserve_at(self, session: Session, reservation: Reservation) -> None:
        self.reservation = reservation.delayed_to(session.promised_at_s)
        if self._aged(session):
            # Most sessions end before their time limits, so even a session that ends in time could delay this start.
            self.reservation = replace(self.reservation, from_s=self.now_s)
        # Count it as used: other sessions of its owner must not use up the quota that it needs.
        self._reserved_for = session
        self._ledger.take(session)

    def _drop_reservation(self) -> None:
        if self._reserved_for is not None:
            self._ledger.give_back(self._reserved_for)
        self.reservation = self._reserved_for = None
        self._kept_out = set()

    def _next_promised(self, queue: PendingQueue, done: Collection[int]) -> Session | None:
        """Return, of the waiting sessions with a promised start, the first by priority and promised time."""
        if not self._backfills:
            return None
        waiting = [
            s
            for s, same in queue.promised
            if same.waits and s.id not in done and not s.refusing_nodes(self.now_s)
        ]
        return min(waiting, key=lambda s: (-s.request.priority, s.promised_at_s, s.id), default=None)

    def _reserve_promised(self, session: Session) -> None:
        """Reserve a place for a promised session before others of its priority are tried, even if it fits now."""
        request = session.request
        if self.reservation is not None or (self._quotas and not self._ledger.allows(session)):
            return  # A session of higher priority has the reservation.
        where = self._capacity.placer.best(request)
        if where is None:
            self._reserve(session)
            return
        remaining = claimed(self.nodes[where.node_id], request, where)
        self._reserve_at(session, Reservation(session.id, where, self.now_s, self.now_s, remaining))

    def _aged(self, session: Session) -> bool:
        aged_from_s = self._aged_from_s.get(session.id)
        return aged_from_s is not None and aged_from_s <= self.now_s

    def _free_at_s(self, session: Session, now_s: int) -> int | None:
        unlimited = session.request.time_limit_s is None and not self._quotas
        if unlimited and session.ends_at_s is None and session.state is not SessionState.TERMINATING:
            return None  # The usual case on most clusters.
        limit_s = least_limit((session.time_limit_s, self._ledger.limit_s(session.request)))
        return free_at_s(session, now_s, limit_s=limit_s)
