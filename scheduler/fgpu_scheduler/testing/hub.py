"""The Hub of a simulation: what `service` and the spawner do, one durable step at a time.

Between any two steps anything else may happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fgpu_scheduler.core import lifecycle, planner, reclaim, reconcile
from fgpu_scheduler.core.model import EndCause, Groups, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.reclaim import Reclaim
from fgpu_scheduler.core.reconcile import Ended, Finish, Healing, Observed, Remove, Stop
from fgpu_scheduler.errors import InvalidTransition, StaleVersion
from fgpu_scheduler.testing.checks import Standing, Violation
from fgpu_scheduler.testing.lab import Lab, node_of
from fgpu_scheduler.testing.order_checks import less_liked, refused_again

S = SessionState


class Hub(Lab):
    """Plans, launches, ends, takes back and reconciles; and dies."""

    _warnings: reclaim.Warnings | None = None
    _memory: planner.Memory | None = None

    # --- Planning ---

    def _cycle(self) -> None:
        snapshot = self._snapshot()
        decided = self._planned(snapshot)
        complaints = [*refused_again(snapshot, decided), *less_liked(snapshot, decided)]
        if complaints:
            raise Violation("; ".join(complaints))
        if self._chance(self._faults.late_commit):
            self._later(0, 4, lambda: self._commit(decided))
        else:
            self._commit(decided)

    def _planned(self, snapshot: Snapshot) -> Plan:
        """Plan with what earlier plans have left, and check that it is the plan from nothing."""
        if self._memory is None:
            self._memory = planner.Memory()
        decided = planner.plan(snapshot, self._policy, self._memory)
        if decided != planner.plan(replace(snapshot, known=None), self._policy):
            raise Violation("what earlier plans have left changes the plan")
        if snapshot.groups != Groups.of(snapshot.sessions):
            raise Violation("the groups that were carried are not those of the sessions")
        return decided

    def _commit(self, decided: Plan) -> None:
        version = self._store.version()
        try:
            placed = self._store.commit(decided, now_s=self._now_s())
        except StaleVersion as e:
            self._stale += 1
            self._say("stale")  # Of which version a store counts by itself.
            if version == decided.version:
                raise Violation(f"a plan of this very version was refused: {e}") from e
            self._later(0, 1, self._cycle)
            return
        if version != decided.version:
            raise Violation(f"a plan of version {decided.version} was committed at version {version}")
        for session in placed:
            self._say(f"session {session.id} -> SCHEDULED {session.placement}")
            self._later(0, 3, lambda i=session.id: self._launch(i))  # type: ignore[misc]
        self._look(planned=True)
        if placed and self._chance(self._faults.inventory):
            self._inventory_changes()

    # --- Launching ---

    def _launch(self, session_id: int) -> None:
        session = self._move(session_id, S.PREPARING, (S.SCHEDULED,))
        if session is not None:
            self._fetch(session)

    def _fetch(self, session: Session) -> None:
        """Pull the image where it is missing, then create the container."""
        if (node_of(session), session.request.image) in self._images:
            self._later(0, 2, lambda: self._create(session))
        else:
            self._later(0, 2, lambda: self._pull(session))

    def _pull(self, session: Session) -> None:
        if self._move(session.id, S.PULLING, (S.PREPARING,), attempt=session.attempt) is None:
            return
        if self._chance(self._faults.failed_pull):
            self._later(1, 60, lambda: self._fails(session, EndCause.PULL_FAILED))
        elif self._chance(self._faults.late_pull):
            self._later(600, 4000, lambda: self._pulled(session))
        else:
            self._later(3, 120, lambda: self._pulled(session))

    def _pulled(self, session: Session) -> None:
        self._images[node_of(session), session.request.image] = None
        self._create(session)

    def _create(self, session: Session) -> None:
        """Ask the engine. Once asked, it happens, even if the Hub dies or the user leaves meanwhile."""
        current = self._get(session.id)
        if current.state not in lifecycle.LAUNCHING or current.attempt != session.attempt:
            return
        if self._chance(self._faults.not_bound) or not self._has_devices(session):
            self._later(1, 40, lambda: self._not_bound(session))
            return
        hub = self._hub
        self._creating[session.id] = session.attempt
        slowest_s = 120 if self._chance(self._faults.late_create) else 15
        self._elsewhere(1, slowest_s, lambda: self._created(session, hub))

    def _has_devices(self, session: Session) -> bool:
        """Return whether the devices of a session's shares are there still."""
        node = self._offered.get(node_of(session))
        there = {device.uuid for device in node.devices} if node is not None else set()
        assert session.placement is not None
        return there.issuperset(share.device_uuid for share in session.placement.shares)

    def _not_bound(self, session: Session) -> None:
        """The engine has not given the place, and removed again what it had made."""
        try:
            waits = self._store.give_back(session.id, "no room", attempt=session.attempt, now_s=self._now_s())
        except InvalidTransition:
            return
        self._say(f"session {session.id} waits again, refused {waits.refused}")
        self._look()

    def _created(self, session: Session, hub: int) -> None:
        made = node_of(session) not in self._unreachable and not self._chance(self._faults.failed_create)
        if made:
            handle = f"c{session.id}-{session.attempt}"
            orphan = hub != self._hub
            self._orphans += orphan
            self._containers[handle] = Standing(
                handle, node_of(session), session.id, session.attempt, True, orphan
            )
            self._say(f"{handle} is up{' as an orphan' if orphan else ''}")
            self._look()
        if hub == self._hub:
            self._later(0, 2, lambda: self._answered(session, made))

    def _answered(self, session: Session, made: bool) -> None:
        self._creating.pop(session.id, None)
        if not made:
            self._fails(session, EndCause.LAUNCH_FAILED)
            return
        if self._chance(50):
            try:
                self._store.note_launched(session.id, f"c{session.id}", attempt=session.attempt)
            except InvalidTransition:
                return
            self._look()
        self._later(1, 40, lambda: self._ready(session))

    def _ready(self, session: Session) -> None:
        handle = f"c{session.id}-{session.attempt}"
        container = self._containers.get(handle)
        if container is None or not container.alive:
            self._fails(session, EndCause.LAUNCH_FAILED)
        elif self._chance(self._faults.failed_start):
            self._fails(session, EndCause.ISOLATION_FAILED)
        elif self._move(session.id, S.RUNNING, lifecycle.LAUNCHING, attempt=session.attempt, launched=handle):
            self._ran += 1

    def _fails(self, session: Session, cause: EndCause) -> None:
        moved = self._move(
            session.id, S.TERMINATING, lifecycle.LAUNCHING, attempt=session.attempt, cause=cause
        )
        if moved is not None:
            self._later(0, 2, lambda: self._clear(session.id))

    # --- Ending ---

    def _end(self, session_id: int, cause: EndCause) -> None:
        session = self._get(session_id)
        if session.state in lifecycle.ENDED or session.state is S.TERMINATING:
            return
        early = session.state in (S.PENDING, S.SCHEDULED)
        to = S.CANCELLED if early else S.TERMINATING
        moved = self._move(session_id, to, (session.state,), cause=cause)
        if moved is not None and not early:
            self._later(0, 3, lambda: self._clear(session_id))

    def _clear(self, session_id: int) -> None:
        """Stop what was launched, and free the share once the engine says that it is gone."""
        session = self._get(session_id)
        if session.state is not S.TERMINATING:
            return
        if session_id in self._creating:
            self._later(1, 3, lambda: self._clear(session_id))
            return
        if node_of(session) in self._unreachable or self._chance(self._faults.failed_stop):
            self._say(f"session {session_id} cannot be stopped; reconcile will")
            return
        hub = self._hub
        self._elsewhere(1, 8, lambda: self._cleared(session, hub))

    def _cleared(self, session: Session, hub: int) -> None:
        if node_of(session) in self._unreachable:
            return
        for handle in [c.handle for c in self._standing() if c.session_id == session.id]:
            self._drop(handle)
        if hub == self._hub:
            self._later(0, 2, lambda: self._gone(session.id))

    def _gone(self, session_id: int) -> None:
        cause = self._get(session_id).end_cause
        self._move(session_id, lifecycle.final_state(cause), (S.TERMINATING,))

    def _drop(self, handle: str) -> None:
        """Remove a container if its node answers."""
        container = self._containers.get(handle)
        if container is not None and container.node_id not in self._unreachable:
            del self._containers[handle]
            self._say(f"{handle} is removed")
            self._look()

    # --- Taking back ---

    def _watch(self) -> None:
        """Warn, spare and end, as the rules have it."""
        snapshot = self._snapshot()
        if self._warnings is None:
            self._warnings = reclaim.Warnings()
        stood_s = self._warnings.stood_s(snapshot.sessions, self._time_s)
        decided = self._planned(snapshot)
        found = reclaim.reclaims(snapshot, decided, self._rules, stood_s=stood_s)
        if found and self._chance(self._faults.late_commit):
            self._later(0, 4, lambda: self._reclaim(found, snapshot))
        elif found:
            self._reclaim(found, snapshot)

    def _reclaim(self, found: Sequence[Reclaim], snapshot: Snapshot) -> None:
        version = self._store.version()
        try:
            changed = self._store.reclaim(found, snapshot.version, now_s=self._now_s())
        except StaleVersion as e:
            self._stale += 1
            self._say("stale")
            # Only a clock that was set back in between is a reason to refuse what is of this very version.
            if version == snapshot.version and self._now_s() >= snapshot.now_s:
                raise Violation(f"what was decided on this very version was refused: {e}") from e
            return
        if version != snapshot.version:
            raise Violation(f"a decision of version {snapshot.version} was committed at version {version}")
        for session in changed:
            self._say(
                f"session {session.id} is {session.state}, ends {session.ends_cause} at {session.ends_at_s}"
            )
            if session.state is S.TERMINATING:
                self._later(0, 3, lambda i=session.id: self._clear(i))  # type: ignore[misc]
            elif session.replaces is not None:
                self._later(0, 10, lambda i=session.id: self._resume(i))  # type: ignore[misc]
        self._look()
        ends_s = [one.ends_at_s - self._now_s() for one in found if isinstance(one, reclaim.Warn)]
        if ends_s:
            # Once to see that the warning stands, once when its grace is over.
            soonest_s = max(min(ends_s), 1)
            self._later(1, 10, self._watch)
            self._later(soonest_s, soonest_s + 20, self._watch)

    # --- Restarting ---

    def _hub_restarts(self) -> None:
        """The Hub dies: what it was about to do is void. Waiting requests are resumed one by one, or never."""
        self._hub += 1
        self._restarts += 1
        self._creating.clear()
        self._warnings = self._memory = None
        self._store.hold_waiting(now_s=self._now_s())
        self._say("the Hub restarts")
        self._look()
        after_s = 0
        for session in self._store.held_sessions():
            after_s += self._rng.randrange(6)
            if self._chance(self._faults.never_resumed):
                self._later(900, 900, lambda i=session.id: self._abandon(i))  # type: ignore[misc]
            else:
                self._later(after_s, after_s, lambda i=session.id: self._resume(i))  # type: ignore[misc]

    def _abandon(self, session_id: int) -> None:
        if self._get(session_id).held:
            self._end(session_id, EndCause.QUEUE_TIMEOUT)

    def _resume(self, session_id: int) -> None:
        session = self._get(session_id)
        if session.state not in (S.PENDING, S.SCHEDULED, *lifecycle.LAUNCHING) or not session.held:
            return
        self._store.set_held(session_id, False, now_s=self._now_s())
        self._say(f"session {session_id} is resumed")
        self._look()
        if session.state is S.SCHEDULED:
            self._launch(session_id)
        elif session.state in lifecycle.LAUNCHING:
            anew = self._store.new_attempt(session_id, now_s=self._now_s())
            self._say(f"session {session_id} is at attempt {anew.attempt}")
            self._look()
            hub = self._hub
            self._elsewhere(1, 4, lambda: self._made_room(anew, hub))

    def _made_room(self, session: Session, hub: int) -> None:
        """What the last life of the Hub had launched goes before the next attempt comes."""
        answers = node_of(session) not in self._unreachable
        for container in self._standing():
            if answers and container.session_id == session.id and container.attempt < session.attempt:
                self._drop(container.handle)
        if hub != self._hub:
            return
        if answers:
            self._later(0, 1, lambda: self._fetch(session))
        else:
            self._later(0, 1, lambda: self._fails(session, EndCause.NODE_LOST))

    # --- Reconciling ---

    def _observe(self) -> None:
        before = self._snapshot()
        launching = list(self._creating) if self._faults.tells_launches else []
        self._later(0, 3, lambda: self._engines_answer(before, launching))

    def _engines_answer(self, before: Snapshot, launching: Sequence[int]) -> None:
        reachable = [n.id for n in before.nodes if n.id not in self._unreachable]
        observed = [
            Observed(
                c.node_id,
                c.session_id,
                c.attempt,
                c.handle,
                c.alive,
                self._causes.get(c.handle, EndCause.EXITED),
            )
            for c in self._standing()
            if c.node_id in reachable
        ]
        self._rng.shuffle(observed)
        self._later(0, 3, lambda: self._heal(before, observed, reachable, launching))

    def _heal(
        self,
        before: Snapshot,
        observed: Sequence[Observed],
        reachable: Sequence[str],
        launching: Sequence[int],
    ) -> None:
        after = self._snapshot()
        healings = reconcile.reconcile(before, after, observed, reachable=reachable, launching=launching)
        for healing in healings:
            self._later(0, 2, lambda h=healing: self._apply(h))  # type: ignore[misc]

    def _apply(self, healing: Healing) -> None:
        self._say(f"heal {healing}")
        match healing:
            case Remove(thing, _) | Stop(_, thing):
                if not self._chance(self._faults.failed_stop):
                    self._elsewhere(0, 4, lambda: self._drop(thing.handle))
            case Ended(session_id, attempt, cause, message):
                self._move(
                    session_id, S.TERMINATING, (S.RUNNING,), attempt=attempt, cause=cause, message=message
                )
            case Finish(session_id):
                self._gone(session_id)
