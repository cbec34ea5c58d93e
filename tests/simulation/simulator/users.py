"""The users of a simulation: they submit, wait, end, resize and extend sessions, idle, and answer warnings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from fgpu_scheduler.core import admission, forecast, lifecycle, placement, planner, request_forecast
from fgpu_scheduler.core.extending import Extension, delays_promised_start, not_extended
from fgpu_scheduler.core.model import EndCause, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.resizing import Amount
from fgpu_scheduler.core.shares import is_explicit
from fgpu_scheduler.errors import (
    InvalidTransition,
    SessionExists,
    StaleVersion,
    StoreUnavailable,
    TooManyPending,
)
from simulator import drawn
from simulator.checks import Violation
from simulator.hub import Hub

S = SessionState


class Users(Hub):
    """The actions of users."""

    def _submit(self) -> None:
        """Submit requests of a user, sometimes after a forecast; they are refused or queued."""
        rng, snapshot = self._rng, self._snapshot()
        if not self._ready or not any(node.devices for node in snapshot.nodes):
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
        first = rng.randrange(12)
        requests = [replace(asked, server_name=f"s{(first + n) % 12}") for n in range(count)]
        # Only sometimes: a forecast takes longer than the rest of a submission.
        if self._chance(15):
            self._is_told(requests, snapshot)
        mine = [
            s.id for s in snapshot.sessions if s.request.user == asked.user and s.state in lifecycle.SERVING
        ]
        replacing = rng.choice(mine) if mine and self._chance(15) else None
        self._spawn(self._asks(requests, replacing))

    async def _asks(self, requests: Sequence[Request], replacing: int | None) -> None:
        asked = requests[0]
        try:
            sessions = await self._queue.submit(requests, replacing=replacing)
        except (SessionExists, TooManyPending) as e:
            self._say(f"{asked.user} is not queued: {e}")
            if any(one is asked for one in self._accepted):
                raise Violation(f"{asked.user} is refused ({e}), and was queued") from e
            return
        self._submitted += len(sessions)
        self._say(
            f"{asked.user} asks {len(requests)} x {asked.fgpu_milli} ({asked.gpu_memory_mib} MiB) "
            f"in {asked.resource_group}: {[s.id for s in sessions]}"
        )
        for session in sessions:
            await asyncio.sleep(self._rng.choice((0, 0, 3)))
            self._serve(session.id)

    def _refused(self, asked: Request, count: int, snapshot: Snapshot) -> str:
        refusals = admission.admit(asked, count, snapshot.nodes, self._caps)
        if is_explicit(asked):
            return "" if placement.could_ever_fit(asked, snapshot.nodes) else "it could never fit"
        return "; ".join(refusal.message for refusal in refusals)

    def _is_told(self, requests: Sequence[Request], snapshot: Snapshot) -> None:
        """Check that the request forecast starts as many sessions now as the planner would."""
        asked = requests[0]
        with self._store.faultless():
            experience = self._store.experience(asked.resource_group)
        told = request_forecast.forecast_request(
            asked, len(requests), snapshot, self._policy, experience
        ).startable_now
        newest = max((s.id for s in snapshot.sessions), default=0)
        new = [Session(newest + n, one, S.PENDING, snapshot.now_s) for n, one in enumerate(requests, start=1)]
        placed = planner.plan(snapshot.with_sessions((*snapshot.sessions, *new)), self._policy).placed
        start = sum(1 for p in placed if p.session_id > newest)
        if start != told:
            raise Violation(f"{told} of {requests} were told to start now, and {start} would")

    def _foretell(self) -> None:
        """Compare the queue's forecast with the plan, and let the Hub store it."""
        snapshot = self._snapshot()
        with self._store.faultless():
            told = forecast.forecast(snapshot, self._policy, self._store.experience("lab"))
        placed = [p.session_id for p in planner.plan(snapshot, self._policy).placed]
        if [f.session_id for f in told if f.position == 0] != placed:
            raise Violation(f"the forecast starts others than the planner: {told}, {placed}")
        if sorted(f.session_id for f in told) != [s.id for s in snapshot.sessions if s.state is S.PENDING]:
            raise Violation("the forecast does not speak of exactly those who wait")
        self._say(f"foretold {[(f.session_id, f.position, f.expected_start_at_s) for f in told]}")
        if self._ready:
            self._spawn(self._queue.outlook())

    def _user_ends(self) -> None:
        sessions = self._snapshot().sessions
        # Most live sessions are pending or running: choose the short states in between on purpose.
        launching = [s for s in sessions if s.state in lifecycle.LAUNCHING]
        if launching and self._chance(40):
            self._end(self._rng.choice(launching), EndCause.USER)
        elif sessions:
            session = self._rng.choice(sessions)
            cause = {0: EndCause.DISK_LIMIT, 1: EndCause.HUB_STOPPED}.get(session.id % 5, EndCause.USER)
            self._end(session, cause if session.state is S.RUNNING else EndCause.USER)

    def _end(self, session: Session, cause: EndCause) -> None:
        """End a session, sometimes after cancelling its spawn."""
        if not self._ready:
            return
        serving = self._serving.get(session.id)
        if serving is not None and self._chance(50):
            serving.cancel()
        self._spawn(self._stop(session.id, cause))

    def _idles(self) -> None:
        """Make a session idle, or busy again."""
        running = [s for s in self._snapshot().sessions if s.state is S.RUNNING]
        if running:
            session = self._rng.choice(running)
            if self._idle.pop(session.id, None) is None:
                self._idle[session.id] = self.now_s()
            self._say(f"session {session.id} is idle since {self._idle.get(session.id)}")

    def _wants(self) -> None:
        """A cell of a parked session waits for the GPU, or is stopped."""
        parked = [s for s in self._snapshot().sessions if s.state is S.PARKED]
        if parked and self._ready:
            session, wants = self._rng.choice(parked), self._chance(80)
            self._idle.pop(session.id, None)
            self._say(f"session {session.id} {'wants' if wants else 'does not want'} its GPU")
            self._spawn(self._queue.want(session.id, wants))

    def _asks_to_park(self) -> None:
        running = [s for s in self._snapshot().sessions if s.state is S.RUNNING]
        if running:
            session = self._rng.choice(running)
            self._beside.ask_to_park(session.id, now_s=self.now_s())
            self._say(f"session {session.id} is to be parked")

    def _keeps(self) -> None:
        """Keep a session that was warned for being idle, or needlessly another one."""
        snapshot = self._snapshot()
        running = [s for s in snapshot.sessions if s.state is S.RUNNING]
        warned = [s for s in running if s.ends_cause is EndCause.IDLE] or running
        if not warned:
            return
        session = self._rng.choice(warned)
        try:
            if self._chance(33) and self._extends(session, snapshot):
                return
            self._beside.keep(session.id, self.now_s() + self._rng.choice((60, 600)), now_s=self.now_s())
        except (InvalidTransition, StaleVersion):
            return
        self._say(f"session {session.id} is kept")

    def _resizes(self) -> None:
        """Resize a session."""
        running = [s for s in self._snapshot().sessions if s.state is S.RUNNING]
        if running and self._ready:
            session = self._rng.choice(running)
            asked = session.request
            # Near the current amount: most other amounts are impossible.
            part = self._rng.choice((25, 50, 75, 125, 150, 200))
            if is_explicit(asked):
                memory_mib = (asked.gpu_memory_mib or 0) * part // 100 // 128 * 128
                percent = (
                    None if asked.compute_percent is None else max(5, asked.compute_percent * part // 500 * 5)
                )
                amount = Amount(0, memory_mib, percent)
            else:
                amount = Amount(self._rng.choice((asked.fgpu_milli * part // 100, *self._amounts)))
            self._spawn(self._resize(session.id, amount))

    async def _resize(self, session_id: int, amount: Amount) -> None:
        with contextlib.suppress(StoreUnavailable):
            found = await self._queue.resize(session_id, amount)
            self._say(f"session {session_id} is to have {amount}: {found}")

    def _extends(self, session: Session, snapshot: Snapshot) -> bool:
        """Extend a session if that is allowed; return whether it was."""
        allowed = Extension(by_s=300, times=2)
        if not_extended(session, allowed) or delays_promised_start(
            snapshot, session, allowed.by_s, self._policy
        ):
            return False
        longer = self._beside.extend(session.id, allowed.by_s, snapshot.version, now_s=self.now_s())
        self._say(f"session {session.id} may run for {longer.time_limit_s} s")
        return True
