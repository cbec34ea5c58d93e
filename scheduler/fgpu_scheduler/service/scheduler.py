"""The loop: snapshot, plan, commit, dispatch. One per installation, in the process that launches.

The store is used from one worker thread, so that a slow database never stops the event loop, and writes are
in the order in which they were asked for. What happens to a session comes back through `prepare`, `pulling`,
`running`, `end` and `gone`; each is one durable step.

While the database does not answer, a spawn waits and goes on where it was: its steps are tried again until
they are committed. An end is not waited for here (`StoreUnavailable`): whoever asks for it tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar, assert_never

from fgpu_scheduler.core.admission import Caps
from fgpu_scheduler.core.forecast import Forecast, Outlook, outlook
from fgpu_scheduler.core.lifecycle import ENDED, LAUNCHING, final_state
from fgpu_scheduler.core.model import (
    EndCause,
    Node,
    NodeState,
    Quota,
    Request,
    Session,
    SessionState,
    Snapshot,
)
from fgpu_scheduler.core.planner import Memory, Policy, plan
from fgpu_scheduler.core.reclaim import AllRules
from fgpu_scheduler.core.reconcile import (
    Ended,
    Finish,
    Healing,
    Observed,
    Remove,
    Stop,
    ghostly,
    reconcile,
)
from fgpu_scheduler.core.units import duration
from fgpu_scheduler.errors import (
    BadSettings,
    InvalidTransition,
    StaleVersion,
    StoreUnavailable,
    UnknownSession,
)
from fgpu_scheduler.ports import Activity, Clock, Launcher, Seen, SystemClock
from fgpu_scheduler.queue import Queue, Requeued, SessionEnded
from fgpu_scheduler.service.node_health import node_changes
from fgpu_scheduler.service.outage import Away
from fgpu_scheduler.service.reclaiming import Reclaiming
from fgpu_scheduler.store.foretold import Foretold
from fgpu_scheduler.store.store import Store

log = logging.getLogger("fgpu.scheduler")

P = ParamSpec("P")
T = TypeVar("T")
S = SessionState


@contextlib.contextmanager
def _marked(marks: Counter[int], session_id: int) -> Iterator[None]:
    marks[session_id] += 1
    try:
        yield
    finally:
        marks[session_id] -= 1
        if not marks[session_id]:
            del marks[session_id]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long things may take, in seconds. See the settings of the same names."""

    queue_timeout_s: int = 24 * 3600
    resume_grace_s: int = 60
    abandoned_after_s: int = 900
    reconcile_every_s: float = 5.0


FORECAST_FOR_S = 30
"""How long a forecast may be shown while nothing changes; expected ends move with the clock."""
QUICK_FORECAST_S = 0.25
FORETELL_EVERY_S = 60.0
"""So often who waits is told something, though nobody asks."""
SWITCH_S = 0.0005
"""So long one thread of this process computes while others want to: a small write waits a few times for a forecast."""
FORECAST_REST = 2
"""A forecast that took longer than that is shown for so many times as long, whatever changes: one of ten thousand takes
seconds, something always changes there, and everything else in this process runs beside it."""
SLOW_AFTER_S = 2.5
"""When something has waited for the store for longer than this, the database is asked for a sign of life."""
SILENT_AFTER_S = 2.5
"""A database that takes longer than this for that sign is away, as far as those who wait are told."""
AGAIN_S = 1.0
"""So often a step is tried again while the database is away."""
SWEEPERS = 4
"""Ghosts that are removed at a time: few, so that a thousand of them delay no launch."""


class Scheduler(Queue):
    """The queue that lives in the Hub. It takes shares back when the containers are gone. `Queue` has the promises."""

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
        self.store = store
        self.policy = policy
        self.caps = caps
        self._reclaiming = Reclaiming(store, policy, rules or AllRules())
        self._activity = activity
        self._launcher = launcher
        self._deadlines = deadlines or Deadlines()
        self._clock: Clock = clock or SystemClock()
        self._memory = Memory()
        """Of the plans, in the store's thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fgpu-store")
        self._waiting: dict[int, asyncio.Future[Session]] = {}
        self._launching: Counter[int] = Counter()
        self._ending: Counter[int] = Counter()
        self._wake = asyncio.Event()
        self._look = asyncio.Event()
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self.on_end: Callable[[Session], None] = lambda session: None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._started = 0.0
        self._left_waiting: set[int] = set()
        self._not_resumed: set[int] = set()
        self._resumed_at = 0.0
        self._outlook: Outlook | None = None
        self._is_behind = False
        self._looking_ahead: asyncio.Future[Outlook] | None = None
        self._look_ahead_again_at = 0.0
        self._foretold = Foretold(store)
        self._told: set[int] = set()
        """Those who wait of whom it is kept what they were told first."""
        self._foretold_version = -1
        # Its own: who submits, starts or ends does not wait for a forecast. A process would be given the snapshot by
        # pickle, and that takes as long as the forecast itself.
        sys.setswitchinterval(SWITCH_S)
        self._forecaster = ThreadPoolExecutor(1, thread_name_prefix="fgpu-forecast")
        self._away = Away(self._announce)
        # Its own thread and connection: nothing that is slow in the others is taken for an outage.
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="fgpu-alive")
        self._asked: asyncio.Future[int] | None = None
        self._doubts: set[asyncio.Task[None]] = set()
        self._since: dict[int, float] = {}
        self._ghosts: dict[str, Observed] = {}
        self._sweeping: set[str] = set()
        self._sweepers: set[asyncio.Task[None]] = set()

    @property
    def database_is_away(self) -> bool:
        return bool(self._away)

    # -- life of the loop -----------------------------------------------------------------------------

    async def start(self, nodes: Sequence[Node], quotas: Sequence[Quota] = ()) -> tuple[Session, ...]:
        now_s = self._clock.now_s()
        await self._call(self.store.set_nodes, nodes, now_s=now_s)
        await self._call(self.store.set_quotas, quotas, now_s=now_s)
        held = await self._call(self.store.hold_waiting, now_s=now_s)
        if held:
            log.info("%d requests of the last run wait to be resumed", held)
        left = await self._call(self.store.held_sessions)
        self._left_waiting = {s.id for s in left if s.state is S.PENDING}
        self._not_resumed = {s.id for s in left}
        # Instants are of the clock, which may be set; how long something takes is not.
        self._started = self._resumed_at = asyncio.get_running_loop().time()
        live = (await self._call(self.store.snapshot, now_s)).sessions
        for session in live:
            self._since[session.id] = self._started - max(0, now_s - session.waits_since_s)
        self._launcher.watch(self.look)
        loops = (self._schedule(), self._watch(), self._reclaim(), self._foretell())
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        return live

    async def change_nodes(self, nodes: Sequence[Node]) -> None:
        now_s = self._clock.now_s()
        unseen = [replace(node, state=NodeState.LOST) for node in nodes]
        version = await self._call(self.store.version)
        await self._call(self.store.set_nodes, unseen, now_s=now_s, keep_states=True)
        if await self._call(self.store.version) != version:
            self._announce()
            self.look()

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._sweepers, *self._stopping.values(), *self._doubts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        for thread in (self._forecaster, self._thread):
            thread.shutdown(wait=True)
        self._asker.shutdown(wait=False)

    # -- requests -------------------------------------------------------------------------------------

    async def submit(
        self, requests: Sequence[Request], *, replacing: int | None = None
    ) -> tuple[Session, ...]:
        old = None if replacing is None else await self.patiently(lambda: self._get(replacing))
        tried_at_s = None

        async def step() -> tuple[Session, ...]:
            nonlocal tried_at_s
            if tried_at_s is None:
                tried_at_s = self._clock.now_s()
            elif (found := await self._submitted(requests, tried_at_s)) is not None:
                return found
            return await self._call(
                self.store.submit,
                requests,
                now_s=self._clock.now_s(),
                max_pending_per_user=self.caps.max_pending_per_user,
                replacing=replacing,
            )

        sessions = await self.patiently(step)
        if old is not None:
            ended = await self.patiently(lambda: self._get(old.id))
            if ended.state is not old.state:
                self._done(old, ended)
        for session in sessions:
            self._since[session.id] = asyncio.get_running_loop().time()
            self._say(session, None, "submitted")
        self._announce()
        self.wake()
        return sessions

    async def hold(self, session_id: int) -> None:
        await self._call(self.store.set_held, session_id, True, now_s=self._clock.now_s())

    async def placed(self, session_id: int) -> Session:
        future = self._waiting.get(session_id)
        if future is None or future.done():
            future = self._waiting[session_id] = asyncio.get_running_loop().create_future()
        if session_id in self._not_resumed:
            self._not_resumed.discard(session_id)
            self._resumed_at = asyncio.get_running_loop().time()
        session = await self.patiently(
            lambda: self._call(self.store.set_held, session_id, False, now_s=self._clock.now_s())
        )
        if session.state in ENDED or session.state is S.TERMINATING:
            self._waiting.pop(session_id, None)
            raise SessionEnded(session)
        if session.state is not S.PENDING:
            self._waiting.pop(session_id, None)
            return session
        self.wake()
        # Shielded: a cancelled spawn must not cancel the future that a next one may wait for.
        return await asyncio.shield(future)

    async def prepare(self, session_id: int) -> Session:
        return await self.patiently(lambda: self._prepare(session_id))

    async def _prepare(self, session_id: int) -> Session:
        session = await self._get(session_id)
        if session.state in LAUNCHING:
            return self._done(
                session, await self._call(self.store.new_attempt, session_id, now_s=self._clock.now_s())
            )
        try:
            return await self._move(session, S.PREPARING, expect=(S.SCHEDULED,))
        except InvalidTransition as e:
            session = await self._get(session_id)
            if session.state is S.PENDING:
                raise Requeued(f"session {session_id} is back in the queue: its machine was lost") from e
            if session.state in ENDED or session.state is S.TERMINATING:
                raise SessionEnded(session) from e
            raise

    def launching(self, session_id: int) -> contextlib.AbstractContextManager[None]:
        """Mark that a launch of this session is under way: what is not seen of it may still come.

        Around everything from `prepare` to `running`, by whoever launches. Meanwhile `reconcile` takes the
        absence of a container for no sign that its shares are free.
        """
        return _marked(self._launching, session_id)

    def ending(self, session_id: int) -> contextlib.AbstractContextManager[None]:
        return _marked(self._ending, session_id)

    async def pulling(self, session_id: int, attempt: int) -> Session:
        return await self.patiently(lambda: self._pulling(session_id, attempt))

    async def _pulling(self, session_id: int, attempt: int) -> Session:
        session = await self._get(session_id)
        if session.state is S.PULLING and session.attempt == attempt:
            return session  # Committed, and the answer was lost.
        return await self._move(session, S.PULLING, expect=(S.PREPARING,), attempt=attempt)

    async def give_back(self, session_id: int, attempt: int, why: str) -> Session:
        return await self.patiently(lambda: self._give_back(session_id, attempt, why))

    async def _give_back(self, session_id: int, attempt: int, why: str) -> Session:
        session = await self._get(session_id)
        if session.attempt == attempt and session.state in (S.PENDING, S.SCHEDULED):
            return session  # Committed, and the answer was lost.
        if session.state in ENDED or session.state is S.TERMINATING:
            raise SessionEnded(session)
        now_s = self._clock.now_s()
        try:
            waits = await self._call(self.store.give_back, session_id, why, attempt=attempt, now_s=now_s)
        except InvalidTransition:
            ended = await self._get(session_id)
            if ended.state in ENDED or ended.state is S.TERMINATING:
                raise SessionEnded(ended) from None
            raise
        self._say(waits, session.state, f"the cluster did not give the place: {why}")
        self._announce()
        self.wake()
        return waits

    async def settle(
        self, session_id: int, attempt: int, device_uuids: Sequence[str], *, known: Collection[int]
    ) -> Session:
        return await self.patiently(lambda: self._settle(session_id, attempt, device_uuids, known))

    async def _settle(
        self, session_id: int, attempt: int, device_uuids: Sequence[str], known: Collection[int]
    ) -> Session:
        try:
            settled = await self._call(
                self.store.settle,
                session_id,
                device_uuids,
                attempt=attempt,
                known=known,
                now_s=self._clock.now_s(),
            )
        except InvalidTransition:
            ended = await self._get(session_id)
            if ended.state in ENDED or ended.state is S.TERMINATING:
                raise SessionEnded(ended) from None
            raise
        self._announce()
        return settled

    async def running(self, session_id: int, attempt: int, launched: str) -> Session:
        return await self.patiently(lambda: self._running(session_id, attempt, launched))

    async def _running(self, session_id: int, attempt: int, launched: str) -> Session:
        session = await self._get(session_id)
        if (session.attempt, session.launched) == (attempt, launched):
            # Committed, and the answer was lost. It may even have ended since.
            if session.state is not S.RUNNING:
                raise SessionEnded(session)
            return session
        return await self._move(session, S.RUNNING, expect=LAUNCHING, attempt=attempt, launched=launched)

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        while True:
            session = await self._get(session_id)
            if session.state in ENDED or session.state is S.TERMINATING:
                return session
            to = S.CANCELLED if session.state in (S.PENDING, S.SCHEDULED) else S.TERMINATING
            try:
                return await self._move(session, to, expect=(session.state,), cause=cause, message=message)
            except InvalidTransition:
                # It moved on meanwhile, to a state with another way out.
                continue

    async def warn(
        self, session_id: int, message: str | None, cause: EndCause = EndCause.ISOLATION_FAILED
    ) -> Session:
        try:
            session = await self._call(self.store.warn, session_id, message, cause, now_s=self._clock.now_s())
        except InvalidTransition:
            return await self._get(session_id)
        self._announce()
        return session

    async def gone(self, session_id: int) -> Session:
        session = await self._get(session_id)
        if session.state in ENDED:
            return session
        try:
            return await self._move(session, final_state(session.end_cause), expect=(S.TERMINATING,))
        except InvalidTransition:
            # Somebody else was first to see that it is gone.
            session = await self._get(session_id)
            if session.state in ENDED:
                return session
            raise

    async def session(self, session_id: int) -> Session:
        return await self._get(session_id)

    async def live(self) -> tuple[Session, ...]:
        return (await self.patiently(self.snapshot)).sessions

    async def snapshot(self) -> Snapshot:
        return await self._call(self.store.snapshot, self._clock.now_s())

    async def serving(self, user: str, server_name: str) -> Session | None:
        return await self._call(self.store.serving, user, server_name)

    # -- what is to be told ---------------------------------------------------------------------------

    async def forecasts(self) -> Mapping[int, Forecast]:
        """Return the forecast of every waiting session: one computation for all who ask at a time.

        It is not older than the question, in versions of the store; in seconds at most `FORECAST_FOR_S`. Where it takes
        long, see `FORECAST_REST`.
        """
        version = await self._call(self.store.version)
        while self._outlook is None or self._is_older(self._outlook.snapshot, version):
            task = self._looking_ahead
            if task is None:
                task = self._looking_ahead = asyncio.ensure_future(self._look_ahead())
                task.add_done_callback(self._looked_ahead)
            self._outlook = await asyncio.shield(task)
        self._is_behind = self._outlook.snapshot.version < version
        return self._outlook.forecasts

    def forecasts_behind_s(self) -> int:
        if self._outlook is None or not self._is_behind:
            return 0
        return max(0, self._clock.now_s() - self._outlook.snapshot.now_s)

    def _is_older(self, snapshot: Snapshot, version: int) -> bool:
        if asyncio.get_running_loop().time() < self._look_ahead_again_at:
            return False
        return snapshot.version < version or not 0 <= self._clock.now_s() - snapshot.now_s < FORECAST_FOR_S

    async def _look_ahead(self) -> Outlook:
        snapshot = await self.snapshot()
        known = {group: await self._call(self.store.experience, group) for group in snapshot.resource_groups}
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await loop.run_in_executor(
            self._forecaster, outlook, snapshot, self.policy, known.__getitem__
        )
        took_s = loop.time() - began
        if took_s > QUICK_FORECAST_S:
            self._look_ahead_again_at = loop.time() + FORECAST_REST * took_s
        await self._note_told(found)
        return found

    async def _note_told(self, ahead: Outlook) -> None:
        """Keep what each who waits is told first, to hold it against the start."""
        waiting = {f.session_id for f in ahead.forecasts.values() if f.position}
        new = [ahead.forecasts[i] for i in sorted(waiting - self._told)]
        self._told &= waiting
        try:
            await self._call(self._foretold.note, new, now_s=ahead.snapshot.now_s)
        except StoreUnavailable as e:
            # What is told is worth more than how good it was.
            log.debug("What was told of %d starts is not kept: %s", len(new), e)
        else:
            self._told |= {f.session_id for f in new if f.told is not None}

    async def _foretell(self) -> None:
        """Have a start told to each who waits, though nobody asks: what is told is held against it."""
        while True:
            await asyncio.sleep(FORETELL_EVERY_S)
            try:
                if (await self.snapshot()).version != self._foretold_version:
                    await self.forecasts()
                    self._foretold_version = self._outlook.snapshot.version if self._outlook else 0
            except StoreUnavailable as e:
                log.debug("No forecast now: %s", e)

    def _looked_ahead(self, task: asyncio.Future[Outlook]) -> None:
        # Whoever waited may have left: one that failed then is nothing to those who ask next.
        self._looking_ahead = None
        if not task.cancelled():
            task.exception()

    async def changes(self, *, at_least_every_s: float | Callable[[], float]) -> AsyncIterator[None]:
        while True:
            changed = self._changed
            yield
            every_s = at_least_every_s() if callable(at_least_every_s) else at_least_every_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await changed.wait()

    def nudge(self) -> None:
        self._announce()

    def wake(self) -> None:
        """Plan again soon."""
        self._wake.set()

    def look(self) -> None:
        """Look at once what the launcher sees: something has changed there."""
        self._look.set()

    async def patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        who = object()
        try:
            while True:
                try:
                    return await step()
                except StoreUnavailable as e:
                    log.debug("Trying on: %s", e)
                    self._away.lacks(who)
                    await asyncio.sleep(AGAIN_S)
        finally:
            self._away.has(who)

    # -- the loop -------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                if await self._resuming():
                    continue
                placed = await self._call(self._cycle)
            except Exception as e:
                # The loop must outlive a database that is away for a while.
                self._failed("Scheduling", e)
                asyncio.get_running_loop().call_later(AGAIN_S, self.wake)
                continue
            self._away.has("Scheduling")
            for session in placed:
                self._say(session, S.PENDING, None)
                self._resolve(session)
            if placed:
                self._announce()

    def _cycle(self) -> tuple[Session, ...]:
        """Plan and commit once, in the store's thread; again while another write came in between."""
        read = self.store.newest
        while True:
            now_s = self._clock.now_s()
            decided = plan(read(now_s), self.policy, self._memory)
            try:
                return self.store.commit(decided, now_s=now_s)
            except StaleVersion:
                read = self.store.snapshot

    def _running_for_s(self) -> float:
        return asyncio.get_running_loop().time() - self._started

    async def _resuming(self) -> bool:
        """Return whether placing has to wait until the requests of the last run are back in their order."""
        if self._left_waiting and self._running_for_s() < self._deadlines.resume_grace_s:
            held = {s.id for s in (await self.snapshot()).sessions if s.held}
            self._left_waiting &= held
            return bool(self._left_waiting)
        self._left_waiting = set()
        return False

    async def _watch(self) -> None:
        while True:
            try:
                await self._deadlines_passed()
                await self.reconcile()
            except Exception as e:
                self._failed("Reconciling", e)
            else:
                self._away.has("Reconciling")
            self.wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadlines.reconcile_every_s):
                    await self._look.wait()
            self._look.clear()

    async def _reclaim(self) -> None:
        while True:
            try:
                await self.reclaim()
            except Exception as e:
                self._failed("Reclaiming", e)
            else:
                self._away.has("Reclaiming")
            await asyncio.sleep(self._deadlines.reconcile_every_s)

    async def reclaim(self) -> None:
        """Note who is idle; warn, spare and end running sessions as the rules say."""
        watched = await self._call(self._reclaiming.watched_for_idleness, self._clock.now_s())
        if watched and self._activity is not None:
            since_s = await self._activity.idle_since(watched)
            await self._call(self._reclaiming.note_idle, watched, since_s, self._clock.now_s())
        steady_s = asyncio.get_running_loop().time()
        changed = await self._call(self._reclaiming.round, self._clock.now_s(), steady_s)
        for session in changed:
            if session.state is S.TERMINATING:
                self._say(session, S.RUNNING, None)
                self.on_end(session)
            elif session.state is S.PENDING:
                self._since[session.id] = asyncio.get_running_loop().time()
                self._say(session, None, f"queued again for session {session.replaces}")
            else:
                self._say_warned(session)
        if changed:
            self._announce()
            self.look()

    def _say_warned(self, session: Session) -> None:
        asked, cause = session.request, session.ends_cause
        log.info(
            "Session %d (%s/%s): %s",
            session.id,
            asked.user,
            asked.server_name,
            "its warning is taken back" if cause is None else f"warned, it ends for {cause}",
        )

    def _failed(self, what: str, error: Exception) -> None:
        """Log why a round of one of the loops failed. Of an outage of the database the first time only."""
        if not isinstance(error, StoreUnavailable):
            log.error("%s failed; trying again", what, exc_info=error)
            return
        log.log(logging.DEBUG if self._away else logging.WARNING, "%s waits: %s", what, error)
        self._away.lacks(what)

    def _waited_s(self, session: Session) -> float:
        """Return how long a session has been waited for. A clock that is set meanwhile makes it no longer."""
        now = asyncio.get_running_loop().time()
        return now - self._since.setdefault(session.id, now)

    async def _deadlines_passed(self) -> None:
        snapshot = await self._call(self.store.snapshot, self._clock.now_s())
        await self._tell_those_who_wait(snapshot)
        live = {s.id for s in snapshot.sessions}
        newest = max(live, default=0)
        self._since = {i: at for i, at in self._since.items() if i in live or i > newest}
        limits = self._deadlines
        # Ten thousand take an hour to come back: nobody is given up while others still do.
        long_held = asyncio.get_running_loop().time() - self._resumed_at >= limits.abandoned_after_s
        for session in snapshot.sessions:
            waited_s = self._waited_s(session)
            if session.state is S.PENDING and waited_s >= limits.queue_timeout_s:
                message = (
                    f"nothing became free within the queue's limit of {duration(limits.queue_timeout_s)}"
                )
            elif (
                session.held
                and long_held
                and waited_s >= limits.abandoned_after_s
                and session.state in (S.PENDING, S.SCHEDULED, *LAUNCHING)
            ):
                # What it may have launched is removed by `reconcile`, which then frees its share.
                limit = limits.abandoned_after_s
                message = f"the Hub has restarted, and did not resume this request within {duration(limit)}"
            else:
                continue
            to = S.CANCELLED if session.state in (S.PENDING, S.SCHEDULED) else S.TERMINATING
            # Only as it was seen: one that has been placed or resumed since is not late any more.
            with contextlib.suppress(InvalidTransition):
                await self._move(
                    session,
                    to,
                    expect=(session.state,),
                    attempt=session.attempt,
                    cause=EndCause.QUEUE_TIMEOUT,
                    message=message,
                )

    async def _tell_those_who_wait(self, snapshot: Snapshot) -> None:
        """Resolve what was committed without its answer reaching us: a connection that broke, say."""
        live = {s.id: s for s in snapshot.sessions}
        for session_id in tuple(self._waiting):
            session = live.get(session_id) or await self._get(session_id)
            if session.state is not S.PENDING:
                self._resolve(session)

    async def reconcile(self) -> None:
        """Compare the store with what the launcher sees, and heal what differs."""
        launching, ending = tuple(self._launching), tuple(self._ending)
        before = await self._call(self.store.snapshot, self._clock.now_s())
        seen = await self._launcher.observe()
        after = await self._call(self.store.snapshot, self._clock.now_s())
        await self._note_nodes(after, seen)
        healings = reconcile(
            before, after, seen.things, reachable=seen.nodes, launching=(*launching, *ending)
        )
        # Side by side: one that hangs delays the next round, but not the others of this one.
        results = await asyncio.gather(
            *(self._heal(healing, ending) for healing in healings), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, InvalidTransition):
                raise result

    async def _heal(self, healing: Healing, ending: Sequence[int]) -> None:
        match healing:
            case Remove(thing, _):
                self._sweep_away(thing)
            case Ended(session_id, attempt, cause, message):
                session = await self._get(session_id)
                if session.attempt == attempt:
                    await self._move(
                        session, S.TERMINATING, expect=(S.RUNNING,), cause=cause, message=message
                    )
                    log.warning("Session %d has no server any more: %s", session_id, message)
                    self.look()
            case Stop(session_id, thing):
                if session_id not in ending and thing.handle not in self._stopping:
                    log.info("Stopping %s of session %d", thing.handle, session_id)
                    self._stopping[thing.handle] = asyncio.create_task(self._stop(thing))
            case Finish(session_id):
                await self.gone(session_id)
            case _:
                assert_never(healing)

    async def _stop(self, thing: Observed) -> None:
        """Stop something, beside all else: it may take its time, and nobody else's end waits for that."""
        try:
            if await self._launcher.remove(thing):
                self.look()
        except Exception as e:
            # The next round finds it again.
            self._failed("Stopping a session", e)
        finally:
            del self._stopping[thing.handle]

    async def _set_node_state(self, node_id: str, state: NodeState, *, only: NodeState) -> bool:
        """Set it, unless an administrator has changed it: what was seen then says nothing of that. Whether it is set."""
        now_s = self._clock.now_s()
        try:
            was = await self._call(self.store.set_node_state, node_id, state, now_s=now_s, only=only)
        except BadSettings:
            return False  # It is gone since it was looked at.
        return was is only

    async def _note_nodes(self, snapshot: Snapshot, seen: Seen) -> None:
        """Take nodes that do not answer out of use, and those that answer again back into it."""
        live = {s.id: s for s in snapshot.sessions}
        ghosts = [o for o in seen.things if o.alive and ghostly(o, live.get(o.session_id)) is not None]
        haunted = {ghost.node_id for ghost in ghosts}
        changes = node_changes(snapshot, seen.nodes, tuple(self._launching), haunted, seen.late)
        for node_id in changes.lost:
            if await self._set_node_state(node_id, NodeState.LOST, only=NodeState.READY):
                words = "Node %s does not answer; what it runs keeps its shares, and it takes nothing more"
                log.error(words, node_id)
        for node_id in changes.back:
            log.warning("Node %s answers again", node_id)
            await self._set_node_state(node_id, NodeState.READY, only=NodeState.LOST)
        for session_id in changes.requeued:
            with contextlib.suppress(InvalidTransition):
                await self._move(await self._get(session_id), S.PENDING, expect=(S.SCHEDULED,))
        for session_id in changes.ended:
            message = "the machine that this session ran on was lost, and it with it"
            await self.end(session_id, EndCause.NODE_LOST, message)
            await self.gone(session_id)
        for node_id in changes.gone:
            # As last step: should this process end before, all of it is done again.
            log.warning("Node %s is gone, an administrator says; its sessions are ended", node_id)
            await self._set_node_state(node_id, NodeState.LOST, only=NodeState.GONE)
        if changes.lost or changes.back or changes.requeued or changes.gone:
            self._announce()
            self.wake()

    def _sweep_away(self, ghost: Observed) -> None:
        """Have a ghost removed, a few at a time: neither a round nor a launch waits for a thousand of them."""
        if ghost.handle in self._sweeping:
            return
        self._ghosts.setdefault(ghost.handle, ghost)
        # One that is being removed may hang: whoever does that is no help to those that wait.
        if len(self._sweepers) < min(SWEEPERS, len(self._ghosts) + len(self._sweeping)):
            task = asyncio.create_task(self._sweep())
            self._sweepers.add(task)
            task.add_done_callback(self._sweepers.discard)

    async def _sweep(self) -> None:
        while self._ghosts:
            ghost = self._ghosts.pop(next(iter(self._ghosts)))
            self._sweeping.add(ghost.handle)
            try:
                # It was seen a while ago.
                why = ghostly(ghost, await self._call(self.store.session, ghost.session_id))
                if why is not None:
                    log.warning(
                        "Removing the ghost %s of session %d: %s", ghost.handle, ghost.session_id, why
                    )
                    await self._launcher.remove(ghost)
            except Exception as e:
                # The next round finds it again.
                if not isinstance(e, StoreUnavailable):
                    log.warning("The ghost %s could not be removed: %s", ghost.handle, e)
            finally:
                self._sweeping.discard(ghost.handle)

    # -- parts ----------------------------------------------------------------------------------------

    async def _submitted(self, requests: Sequence[Request], since_s: int) -> tuple[Session, ...] | None:
        """Return the sessions of these requests, if they were committed and only the answer was lost.

        Some may have ended since then, or been queued again.
        """
        latest = await self._call(self.store.latest, user=requests[0].user, limit=2 * len(requests) + 20)
        found = {s.request: s for s in reversed(latest) if s.submitted_at_s >= since_s}
        sessions = tuple(found[asked] for asked in requests if asked in found)
        return sessions if len(sessions) == len(requests) else None

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the store in its thread. Once begun it is finished, cancelled or not."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        slow = loop.call_later(SLOW_AFTER_S, self._doubt, future)

        def answered(done: asyncio.Future[T]) -> None:
            slow.cancel()
            # Whoever asked may have left: an outage then is nothing that Python need complain of.
            _ = done.cancelled() or done.exception()

        future.add_done_callback(answered)
        return await asyncio.shield(future)

    def _doubt(self, call: asyncio.Future[T]) -> None:
        """Find out, while a call goes on, whether the database is away: it may just as well be long, or behind others."""
        task = asyncio.create_task(self._away_unless_it_answers(call))
        self._doubts.add(task)
        task.add_done_callback(self._doubts.discard)

    async def _away_unless_it_answers(self, call: asyncio.Future[T]) -> None:
        try:
            while not call.done():
                if self._asked is None or self._asked.done():
                    # Once at a time, for all who doubt.
                    loop = asyncio.get_running_loop()
                    self._asked = loop.run_in_executor(self._asker, self.store.version)
                    self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
                sign = self._asked
                await asyncio.wait((sign, call), timeout=SILENT_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
                answers = sign.done() and sign.exception() is None
                if not call.done():
                    (self._away.has if answers else self._away.lacks)(call)
                    await asyncio.wait((call,), timeout=SLOW_AFTER_S)
        finally:
            self._away.has(call)

    async def _get(self, session_id: int) -> Session:
        session = await self._call(self.store.session, session_id)
        if session is None:
            raise UnknownSession(f"there is no session {session_id}")
        return session

    async def _move(
        self,
        session: Session,
        to: SessionState,
        *,
        expect: Sequence[SessionState],
        attempt: int | None = None,
        cause: EndCause | None = None,
        message: str | None = None,
        launched: str | None = None,
    ) -> Session:
        moved = await self._call(
            self.store.move,
            session.id,
            to,
            now_s=self._clock.now_s(),
            cause=cause,
            message=message,
            launched=launched,
            expect=expect,
            attempt=attempt,
        )
        return self._done(session, moved)

    def _done(self, before: Session, session: Session) -> Session:
        """Say what has been committed, and let those who wait for it know."""
        self._say(session, before.state, None)
        if session.state in ENDED:
            self._resolve(session)
            self.wake()
        if session.state is S.TERMINATING:
            self.on_end(session)
        self._announce()
        return session

    def _resolve(self, session: Session) -> None:
        future = self._waiting.pop(session.id, None)
        if future is None or future.done():
            return
        if session.state in ENDED or session.state is S.TERMINATING:
            future.set_exception(SessionEnded(session))
            # Its spawn may have been cancelled; then nobody asks for the exception.
            future.exception()
        else:
            future.set_result(session)

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _say(self, session: Session, before: SessionState | None, reason: str | None) -> None:
        why = reason or session.end_cause or session.wait_reason or ""
        asked = session.request
        log.info(
            "Session %d (%s/%s): %s -> %s%s",
            session.id,
            asked.user,
            asked.server_name,
            before or "new",
            session.state,
            f" ({why})" if why else "",
        )
