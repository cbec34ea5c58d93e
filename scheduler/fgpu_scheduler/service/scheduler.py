"""The scheduler: one per installation, in the Hub's process.

`Steps` are the changes that callers request. The scheduler itself runs four loops:

1. Schedule, when woken: plan on the newest snapshot, commit, and wake the callers of the placed sessions. After a restart
   it first waits until the requests of the last run are resumed, so that they keep their order.
2. Watch, every ``reconcile_every_s`` or at a change: end what exceeds its deadline, and run a round of `Healer`.
3. Reclaim, every ``reconcile_every_s``: warn and end sessions by the rules.
4. Forecast regularly, so that each session has a forecast to compare with its start.

The store's thread runs everything that reads or writes the store, one call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fgpu_scheduler.core import resizing
from fgpu_scheduler.core.admission import Caps
from fgpu_scheduler.core.forecast import Outlook
from fgpu_scheduler.core.lifecycle import LAUNCHING
from fgpu_scheduler.core.model import EndCause, Node, NodeState, Quota, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Plan, PlanCache, Policy, committed, plan
from fgpu_scheduler.core.reclaim import AllRules
from fgpu_scheduler.core.resizing import Amount, NotResized
from fgpu_scheduler.core.units import duration
from fgpu_scheduler.errors import InvalidTransition, StaleVersion, StoreUnavailable, UnknownSession
from fgpu_scheduler.ports import Activity, Clock, Launcher, SystemClock
from fgpu_scheduler.service.forecasts import Forecasts
from fgpu_scheduler.service.healing import Healer
from fgpu_scheduler.service.reclaiming import Reclaiming
from fgpu_scheduler.service.steps import Steps
from fgpu_scheduler.service.store_thread import AGAIN_S
from fgpu_scheduler.store.sessions import amount_words, end_state
from fgpu_scheduler.store.store import Store

log = logging.getLogger("fgpu.scheduler")

S = SessionState
RETRIES = 20
"""How often a resize is decided again because another writer was faster."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts and intervals in seconds. See the settings of the same names."""

    queue_timeout_s: int = 24 * 3600
    resume_grace_s: int = 60
    abandoned_after_s: int = 900
    reconcile_every_s: float = 5.0


class Scheduler(Steps):
    """The queue in the Hub, which frees shares when the containers are gone. `Queue` documents the methods."""

    def __init__(
        self,
        store: Store,
        *,
        policy: Policy,
        caps: Caps,
        launcher: Launcher,
        deadlines: Deadlines | None = None,
        clock: Clock | None = None,
        rules: AllRules | None = None,
        activity: Activity | None = None,
    ) -> None:
        super().__init__(store, caps, clock or SystemClock())
        self.policy = policy
        self.healer = Healer(self, launcher)
        self.on_pass: Callable[[float], None] = lambda took_s: None
        self.on_forecast: Callable[[float], None] = lambda took_s: None
        self._forecasts = Forecasts(
            store, self.thread, policy, self.clock, lambda took_s: self.on_forecast(took_s)
        )
        self._reclaiming = Reclaiming(store, policy, rules or AllRules())
        self._activity = activity
        self._launcher = launcher
        self._deadlines = deadlines or Deadlines()
        #: The planner's cache, used in the store's thread.
        self._memory = PlanCache()
        #: The four loops.
        self._tasks: list[asyncio.Task[None]] = []
        #: The loop's time at the start, and the pending sessions of the last run that are not resumed yet.
        self._started = 0.0
        self._left_waiting: set[int] = set()

    async def outlook(self) -> Outlook:
        return await self._forecasts.now()

    def forecasts_behind_s(self) -> int:
        return self._forecasts.behind_s()

    async def start(self, nodes: Sequence[Node], quotas: Sequence[Quota] = ()) -> tuple[Session, ...]:
        now_s = self.clock.now_s()
        await self.call(self.store.set_nodes, nodes, now_s=now_s)
        await self.call(self.store.set_quotas, quotas, now_s=now_s)
        held = await self.call(self.store.hold_waiting, now_s=now_s)
        if held:
            log.info("%d requests of the last run wait to be resumed", held)
        left = await self.call(self.store.held_sessions)
        self._left_waiting = {s.id for s in left if s.state is S.PENDING}
        self._not_resumed = {s.id for s in left}
        # Measure waits by the loop's monotonic time, because the clock may be set.
        self._started = self._resumed_at = asyncio.get_running_loop().time()
        live = (await self.call(self.store.snapshot, now_s)).sessions
        for session in live:
            self._waiting_since[session.id] = self._started - max(0, now_s - session.waits_since_s)
        self._launcher.watch(self.reconcile_soon)
        loops = (self._schedule(), self._watch(), self._reclaim(), self._forecasts.forecast_regularly())
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        return live

    async def change_nodes(self, nodes: Sequence[Node]) -> None:
        now_s = self.clock.now_s()
        unseen = [replace(node, state=NodeState.LOST) for node in nodes]
        version = await self.call(self.store.version)
        await self.call(self.store.set_nodes, unseen, now_s=now_s, keep_states=True)
        if await self.call(self.store.version) != version:
            self.nudge()
            self.reconcile_soon()

    async def stop(self) -> None:
        tasks = [*self._tasks, *self.healer.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        self._forecasts.stop()
        await self.thread.stop()

    async def _schedule(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                if await self._resuming():
                    continue
                began = asyncio.get_running_loop().time()
                placed = await self.call(self._cycle)
                self.on_pass(asyncio.get_running_loop().time() - began)
            except Exception as e:
                # The loop must survive an outage of the database.
                self.thread.failed("Scheduling", e)
                asyncio.get_running_loop().call_later(AGAIN_S, self.wake)
                continue
            self.thread.away.answered("Scheduling")
            for session in placed:
                self._log_change(session, S.PARKED if session.state is S.RESUMING else S.PENDING, None)
                self._resolve(session)
            if placed:
                self.nudge()

    def _cycle(self) -> tuple[Session, ...]:
        """Plan and commit in the store's thread, retrying after writes of others.

        Raises:
            StaleVersion: two plans on the same version were refused.
        """
        read, refused = self.store.newest, -1
        while True:
            now_s = self.clock.now_s()
            snapshot = read(now_s)
            decided = plan(snapshot, self.policy, self._memory)
            try:
                # A plan without changes needs no write.
                changes = decided.placed or decided.returns or committed(decided, snapshot, now_s=now_s)
                if not changes and self.store.version() == decided.version:
                    return ()
                return self.store.commit(decided, now_s=now_s)
            except StaleVersion:
                # Retrying without end would block the store's thread.
                if decided.version == refused:
                    raise
                read, refused, self._memory = self.store.snapshot, decided.version, PlanCache()

    async def resizable(self, session_id: int, amount: Amount) -> Session | NotResized:
        found, _ = await self.call(self._resized, session_id, amount)
        return found

    async def resize(self, session_id: int, amount: Amount) -> Session | NotResized:
        before = await self.session(session_id)
        found = await self.call(self._resize, session_id, amount)
        if isinstance(found, Session) and found != before:
            self._log(found, f"resized, {amount_words(before)} -> {amount_words(found)}")
            self.nudge()
            # A pending session may use what it gave up.
            self.wake()
        return found

    def _resized(self, session_id: int, amount: Amount) -> tuple[Session | NotResized, int]:
        """Return the resized session or the reason against it, and the version; for the store's thread."""
        world = self.store.snapshot(self.clock.now_s())
        session = world.session(session_id)
        if session is None:
            known = self.store.session(session_id)
            if known is None:
                raise UnknownSession(f"there is no session {session_id}")
            return NotResized.NOT_RUNNING, world.version
        found = resizing.resized(world, session, amount)
        if isinstance(found, Session) and found.placement != session.placement:
            assert session.placement is not None
            assert found.placement is not None
            grown = resizing.grows(session.placement.shares[0], found.placement.shares[0])
            if grown and resizing.harms_pending(world, found, self.policy):
                return NotResized.PROMISED, world.version
        return found, world.version

    def _resize(self, session_id: int, amount: Amount) -> Session | NotResized:
        for _ in range(RETRIES):
            found, version = self._resized(session_id, amount)
            if isinstance(found, NotResized):
                return found
            with contextlib.suppress(StaleVersion):  # Another writer was faster.
                return self.store.resize(session_id, amount, version, now_s=self.clock.now_s())
        raise StoreUnavailable("the scheduler's database changes too fast; try again in a moment")

    async def _resuming(self) -> bool:
        """Return whether placing must wait until the requests of the last run are resumed."""
        running_for_s = asyncio.get_running_loop().time() - self._started
        if self._left_waiting and running_for_s < self._deadlines.resume_grace_s:
            held = {s.id for s in (await self.snapshot()).sessions if s.held}
            self._left_waiting &= held
            return bool(self._left_waiting)
        self._left_waiting = set()
        self.place = self._place
        return False

    def _place(self, snapshot: Snapshot) -> Plan:
        return plan(snapshot, self.policy, self._memory)

    async def _watch(self) -> None:
        while True:
            with self.thread.surviving("Reconciling"):
                await self._deadlines_passed()
                await self.healer.round()
            self.wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadlines.reconcile_every_s):
                    await self._reconcile.wait()
            self._reconcile.clear()

    async def _reclaim(self) -> None:
        while True:
            with self.thread.surviving("Reclaiming"):
                await self.reclaim()
            await asyncio.sleep(self._deadlines.reconcile_every_s)

    async def reclaim(self) -> None:
        """Record idle sessions; warn running sessions, withdraw warnings and end sessions by the rules."""
        watched = await self.call(self._reclaiming.watched_for_idleness, self.clock.now_s())
        if watched and self._activity is not None:
            since_s = await self._activity.idle_since(watched)
            await self.call(self._reclaiming.note_idle, watched, since_s, self.clock.now_s())
        steady_s = asyncio.get_running_loop().time()
        changed = await self.call(self._reclaiming.round, self.clock.now_s(), steady_s)
        for session in changed:
            if session.state is S.TERMINATING:
                was = S.RUNNING if session.parked_at_s is None else S.PARKED
                self._log_change(session, was, None)
                self.on_end(session)
            elif session.state is S.PENDING:
                self._waiting_since[session.id] = asyncio.get_running_loop().time()
                self._log_change(session, None, f"queued again for session {session.replaces}")
            elif session.ends_cause is None:
                self._log(session, "its warning is taken back")
            else:
                self._log(session, f"warned, it ends for {session.ends_cause}")
        if changed:
            self.nudge()
            self.reconcile_soon()

    async def _deadlines_passed(self) -> None:
        snapshot = await self.call(self.store.snapshot, self.clock.now_s())
        await self._resolve_waiting(snapshot)
        live = {s.id for s in snapshot.sessions}
        newest = max(live, default=0)
        self._waiting_since = {i: at for i, at in self._waiting_since.items() if i in live or i > newest}
        limits, now = self._deadlines, asyncio.get_running_loop().time()
        # Resuming ten thousand sessions takes an hour: abandon none while others are still being resumed.
        long_held = now - self._resumed_at >= limits.abandoned_after_s
        for session in snapshot.sessions:
            waited_s = now - self._waiting_since.setdefault(session.id, now)
            if session.state is S.PENDING and waited_s >= limits.queue_timeout_s:
                limit = limits.queue_timeout_s
                message = f"nothing became free within the queue's limit of {duration(limit)}"
            elif (
                session.held
                and long_held
                and waited_s >= limits.abandoned_after_s
                and session.state in (S.PENDING, S.SCHEDULED, *LAUNCHING)
            ):
                # Reconciliation removes what it launched, and then frees its share.
                limit = limits.abandoned_after_s
                message = f"the Hub has restarted, and did not resume this request within {duration(limit)}"
            else:
                continue
            # Only from the observed state: a session that was placed or resumed since is not late.
            with contextlib.suppress(InvalidTransition):
                await self.move(
                    session,
                    end_state(session),
                    expect=(session.state,),
                    attempt=session.attempt,
                    cause=EndCause.QUEUE_TIMEOUT,
                    message=message,
                )

    async def _resolve_waiting(self, snapshot: Snapshot) -> None:
        """Wake callers of sessions that were placed or ended by a commit with a lost answer."""
        live = {s.id: s for s in snapshot.sessions}
        for session_id in tuple(self._waiting):
            session = live.get(session_id) or await self.session(session_id)
            if session.state is not S.PENDING:
                self._resolve(session)
