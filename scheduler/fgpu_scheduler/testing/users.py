"""The users of a simulation: they ask, are told and wait, end what they have, idle, and answer warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fgpu_scheduler.core import admission, forecast, lifecycle, placement, planner
from fgpu_scheduler.core.extending import Extension, delays_a_promise, not_extended
from fgpu_scheduler.core.model import EndCause, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.shares import explicit
from fgpu_scheduler.errors import InvalidTransition, SessionExists, TooManyPending
from fgpu_scheduler.testing import drawn
from fgpu_scheduler.testing.checks import Violation
from fgpu_scheduler.testing.hub import Hub

S = SessionState


class Users(Hub):
    """Everybody who has sessions."""

    def _submit(self) -> None:
        """A user asks, may see a forecast, and is refused or queued."""
        rng, snapshot = self._rng, self._snapshot()
        if not any(node.devices for node in snapshot.nodes):
            return
        group = rng.choice(sorted({n.resource_group for n in snapshot.nodes if n.devices}))
        own = [n for n in snapshot.nodes if n.resource_group == group]
        anything = admission.amounts_that_fit(own, self._caps)
        amounts = self._amounts if self._chance(70) else (*anything, 1500, 2500, 50, 9000)
        asked = drawn.request(rng, group, amounts, [d.memory_mib for n in own for d in n.devices])
        count = rng.choice((1, 1, 1, 2, 3, 5))
        refused = self._refused(asked, count, snapshot)
        if refused:
            self._say(f"{asked.user} is refused: {refused}")
            return
        attended = self._chance(50)
        # A forecast costs more than all the rest of a submission: now and then somebody looks at it.
        told = self._told(asked, count, snapshot) if attended and self._chance(40) else None
        first = rng.randrange(12)
        requests = [replace(asked, server_name=f"s{(first + n) % 12}") for n in range(count)]
        try:
            sessions = self._store.submit(
                requests,
                now_s=self._now_s(),
                max_pending_per_user=self._caps.max_pending_per_user,
                held=not attended,
            )
        except (SessionExists, TooManyPending) as e:
            self._say(f"{asked.user} is not queued: {e}")
            return
        self._submitted += len(sessions)
        self._say(
            f"{asked.user} asks {count} x {asked.fgpu_milli} ({asked.gpu_memory_mib} MiB) in {group}: "
            f"{[s.id for s in sessions]}"
        )
        self._checks.submitted(sessions)
        self._look()
        if told is not None:
            self._keeps_word(told, sessions)
        if not attended:
            for session in sessions:
                self._later(0, 3, lambda i=session.id: self._attend(i))  # type: ignore[misc]

    def _refused(self, asked: Request, count: int, snapshot: Snapshot) -> str:
        refusals = admission.admit(asked, count, snapshot.nodes, self._caps)
        if explicit(asked):
            return "" if placement.could_ever_fit(asked, snapshot.nodes) else "it could never fit"
        return "; ".join(refusal.message for refusal in refusals)

    def _told(self, asked: Request, count: int, snapshot: Snapshot) -> forecast.RequestForecast:
        experience = self._store.experience(asked.resource_group)
        return forecast.forecast_request(asked, count, snapshot, self._policy, self._caps, experience)

    def _keeps_word(self, told: forecast.RequestForecast, sessions: Sequence[Session]) -> None:
        ids = [s.id for s in sessions]
        placed = planner.plan(self._snapshot(), self._policy).placed
        start = sum(1 for p in placed if p.session_id in ids)
        if start != told.startable_now:
            raise Violation(f"{told.startable_now} of {ids} were told to start now, and {start} do")

    def _attend(self, session_id: int) -> None:
        if self._get(session_id).state is S.PENDING:
            self._store.set_held(session_id, False, now_s=self._now_s())
            self._say(f"session {session_id} is attended")
            self._look()

    def _foretell(self) -> None:
        """Compare the queue's forecast with what the planner does."""
        snapshot = self._snapshot()
        told = forecast.forecast(snapshot, self._policy, self._store.experience("lab"))
        placed = [p.session_id for p in planner.plan(snapshot, self._policy).placed]
        if [f.session_id for f in told if f.position == 0] != placed:
            raise Violation(f"the forecast starts others than the planner: {told}, {placed}")
        if sorted(f.session_id for f in told) != [s.id for s in snapshot.sessions if s.state is S.PENDING]:
            raise Violation("the forecast does not speak of exactly those who wait")
        self._say(f"foretold {[(f.session_id, f.position, f.expected_start_at_s) for f in told]}")

    def _user_ends(self) -> None:
        sessions = self._snapshot().sessions
        # Most live sessions wait or run: the short states in between need to be aimed at.
        launching = [s for s in sessions if s.state in lifecycle.LAUNCHING]
        if launching and self._chance(40):
            self._end(self._rng.choice(launching).id, EndCause.USER)
        elif sessions:
            session = self._rng.choice(sessions)
            # Some are ended for the disk, or with their Hub: nothing is drawn for it, so that histories stay as they are.
            cause = {0: EndCause.DISK_LIMIT, 1: EndCause.HUB_STOPPED}.get(session.id % 5, EndCause.USER)
            self._end(session.id, cause if session.state is S.RUNNING else EndCause.USER)

    def _idles(self) -> None:
        """Somebody stops to work, or goes on."""
        running = [s for s in self._snapshot().sessions if s.state is S.RUNNING]
        if not running:
            return
        session = self._rng.choice(running)
        since_s = self._now_s() if session.idle_since_s is None else None
        try:
            self._store.note_idle(session.id, since_s, now_s=self._now_s())
        except InvalidTransition:
            return
        self._say(f"session {session.id} is idle since {since_s}")
        self._look()

    def _extends(self, session: Session) -> bool:
        """Extend a session where that is allowed; return whether it was."""
        snapshot, allowed = self._snapshot(), Extension(by_s=300, times=2)
        if not_extended(session, allowed) or delays_a_promise(snapshot, session, allowed.by_s, self._policy):
            return False
        longer = self._store.extend(session.id, allowed.by_s, snapshot.version, now_s=self._now_s())
        self._say(f"session {session.id} may run for {longer.time_limit_s} s")
        self._look()
        return True

    def _keeps(self) -> None:
        """Somebody who was warned for being idle asks to keep the session, or another does so for nothing."""
        running = [s for s in self._snapshot().sessions if s.state is S.RUNNING]
        warned = [s for s in running if s.ends_cause is EndCause.IDLE] or running
        if warned:
            session = self._rng.choice(warned)
            until_s = self._now_s() + self._rng.choice((60, 600))
            # Nothing is drawn for it, so that histories stay as they are.
            if session.id % 3 == 0 and self._extends(session):
                return
            self._store.keep(session.id, until_s, now_s=self._now_s())
            self._say(f"session {session.id} is kept until {until_s}")
            self._look()
