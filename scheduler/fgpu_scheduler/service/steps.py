"""The durable steps of a session's life, and the notification of callers that wait for them.

While the database does not answer, a step marked `patient` is repeated until it is committed. So a step first checks
whether an earlier try was committed and only its answer was lost. Ends are not repeated: they raise `StoreUnavailable`,
and their caller tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

from fgpu_scheduler.core.admission import Caps
from fgpu_scheduler.core.lifecycle import ENDED, LAUNCHING, UP, final_state
from fgpu_scheduler.core.model import EndCause, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.errors import InvalidTransition, UnknownSession
from fgpu_scheduler.ports import Clock
from fgpu_scheduler.queue import Queue, Requeued, SessionEnded
from fgpu_scheduler.service.store_thread import StoreThread
from fgpu_scheduler.store.sessions import end_state
from fgpu_scheduler.store.store import Store

log = logging.getLogger("fgpu.scheduler")

P = ParamSpec("P")
T = TypeVar("T")
S = SessionState

ENDING_STATES = (*ENDED, S.TERMINATING)
"""The states of a session that has ended or is ending."""


@contextlib.contextmanager
def _marked(marks: Counter[int], session_id: int) -> Iterator[None]:
    marks[session_id] += 1
    try:
        yield
    finally:
        marks[session_id] -= 1
        if not marks[session_id]:
            del marks[session_id]


class Move(TypedDict, total=False):
    """What a move may carry; `SessionStore.move` documents each."""

    attempt: int | None
    cause: EndCause | None
    message: str | None
    launched: str | None


def patient(
    step: Callable[Concatenate[Steps, P], Awaitable[T]],
) -> Callable[Concatenate[Steps, P], Coroutine[Any, Any, T]]:
    """Make a step repeat itself while the database is away."""

    async def patiently(self: Steps, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.thread.patiently(lambda: step(self, *args, **kwargs))

    return patiently


class Steps(Queue):
    """The steps of all sessions. Each committed change is logged and passed to callers that wait for it."""

    def __init__(self, store: Store, caps: Caps, clock: Clock) -> None:
        self.store = store
        self.caps = caps
        self.clock = clock
        self.thread = StoreThread(store, self.nudge)
        self.call = self.thread.call
        self.on_end: Callable[[Session], None] = lambda session: None
        self.being_launched: Counter[int] = Counter()
        """Their containers may appear later: that none is observed does not free their shares."""
        self.being_ended: Counter[int] = Counter()
        #: The callers of `placed`, by session id.
        self._waiting: dict[int, asyncio.Future[Session]] = {}
        #: Set to plan again, and to reconcile again.
        self._wake = asyncio.Event()
        self._reconcile = asyncio.Event()
        #: Replaced at each change: followers of `changes` wait for the one that they saw.
        self._changed = asyncio.Event()
        #: The loop's time since which each session waits, by session id.
        self._waiting_since: dict[int, float] = {}
        #: Sessions of the last run that no caller has resumed, and the loop's time of the last resumption.
        self._not_resumed: set[int] = set()
        self._resumed_at = 0.0
        self.place: Callable[[Snapshot], Plan] | None = None
        """Places a request that arrives at an empty queue, in the store's thread; None: not now."""

    @property
    def database_is_away(self) -> bool:
        return bool(self.thread.away)

    async def patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        return await self.thread.patiently(step)

    async def submit(
        self, requests: Sequence[Request], *, replacing: int | None = None
    ) -> tuple[Session, ...]:
        old = None if replacing is None else await self.patiently(lambda: self.session(replacing))
        after_id: int | None = None

        async def step() -> tuple[Session, ...]:
            nonlocal after_id
            if after_id is None:
                after_id = await self._newest_id()
            elif (found := await self._already_submitted(requests, after_id)) is not None:
                return found
            return await self.call(
                self.store.submit,
                requests,
                now_s=self.clock.now_s(),
                max_pending_per_user=self.caps.max_pending_per_user,
                replacing=replacing,
                place=self.place,
            )

        sessions = await self.patiently(step)
        if old is not None:
            ended = await self.patiently(lambda: self.session(old.id))
            if ended.state is not old.state:
                self._announce(old, ended)
        for session in sessions:
            self._waiting_since[session.id] = asyncio.get_running_loop().time()
            self._log_change(replace(session, state=S.PENDING), None, "submitted")
            if session.state is not S.PENDING:
                self._log_change(session, S.PENDING, None)
        self.nudge()
        if any(session.state is S.PENDING for session in sessions):
            self.wake()
        return sessions

    async def hold(self, session_id: int) -> None:
        await self.call(self.store.set_held, session_id, True, now_s=self.clock.now_s())

    async def placed(self, session_id: int) -> Session:
        future = self._waiting.get(session_id)
        if future is None or future.done():
            future = self._waiting[session_id] = asyncio.get_running_loop().create_future()
        if session_id in self._not_resumed:
            self._not_resumed.discard(session_id)
            self._resumed_at = asyncio.get_running_loop().time()
        session = self.store.known_session(session_id)
        is_tried = session is not None and not session.held and session.wait_reason is not None
        if session is None or session.held:
            session = await self.patiently(
                lambda: self.call(self.store.set_held, session_id, False, now_s=self.clock.now_s())
            )
        if session.state in ENDING_STATES:
            self._waiting.pop(session_id, None)
            raise SessionEnded(session)
        if session.state is not S.PENDING:
            self._waiting.pop(session_id, None)
            return session
        if not is_tried:
            self.wake()
        # Shielded: a cancelled spawn must not cancel the future that the next spawn may await.
        return await asyncio.shield(future)

    @patient
    async def prepare(self, session_id: int) -> Session:
        session = await self.session(session_id)
        if session.state in LAUNCHING:
            return self._announce(
                session, await self.call(self.store.new_attempt, session_id, now_s=self.clock.now_s())
            )
        try:
            return await self.move(session, S.PREPARING, expect=(S.SCHEDULED,))
        except InvalidTransition as e:
            session = await self.session(session_id)
            if session.state is S.PENDING:
                raise Requeued(f"session {session_id} is back in the queue: its machine was lost") from e
            if session.state in ENDING_STATES:
                raise SessionEnded(session) from e
            raise

    def launching(self, session_id: int) -> contextlib.AbstractContextManager[None]:
        return _marked(self.being_launched, session_id)

    def ending(self, session_id: int) -> contextlib.AbstractContextManager[None]:
        return _marked(self.being_ended, session_id)

    @patient
    async def pulling(self, session_id: int, attempt: int) -> Session:
        session = await self.session(session_id)
        if session.state is S.PULLING and session.attempt == attempt:
            return session  # Committed, and the answer was lost.
        return await self.move(session, S.PULLING, expect=(S.PREPARING,), attempt=attempt)

    @patient
    async def give_back(self, session_id: int, attempt: int, why: str) -> Session:
        session = await self.session(session_id)
        if session.attempt == attempt and session.state in (S.PENDING, S.SCHEDULED):
            return session  # Committed, and the answer was lost.
        if session.state in ENDING_STATES:
            raise SessionEnded(session)
        now_s = self.clock.now_s()
        try:
            waits = await self.call(self.store.give_back, session_id, why, attempt=attempt, now_s=now_s)
        except InvalidTransition:
            session = await self.session(session_id)
            if session.state in ENDING_STATES:
                raise SessionEnded(session) from None
            raise
        self._log_change(waits, session.state, f"the cluster did not give the place: {why}")
        self.nudge()
        self.wake()
        return waits

    @patient
    async def running(self, session_id: int, attempt: int, launched: str) -> Session:
        session = await self.session(session_id)
        if (session.attempt, session.launched) == (attempt, launched):
            # Committed, and the answer was lost. It may have ended since.
            if session.state not in UP:
                raise SessionEnded(session)
            return session
        to = S.PARKED if session.request.on_demand else S.RUNNING
        return await self.move(session, to, expect=LAUNCHING, attempt=attempt, launched=launched)

    @patient
    async def park(self, session_id: int, parked_mib: int, message: str | None = None) -> Session:
        before = await self.session(session_id)
        if before.state is S.PARKED:
            return before
        now_s = self.clock.now_s()
        session = await self.call(self.store.park, session_id, parked_mib, message, now_s=now_s)
        self.wake()
        return self._announce(before, session)

    @patient
    async def refuse_to_park(self, session_id: int, why: str) -> Session:
        session = await self.call(self.store.refuse_to_park, session_id, why, now_s=self.clock.now_s())
        self.wake()
        return session

    @patient
    async def want(self, session_id: int, wanted: bool) -> Session:
        before = await self.session(session_id)
        session = await self.call(self.store.want, session_id, wanted, now_s=self.clock.now_s())
        if session != before:
            self._log(session, "wants its GPU back" if wanted else "no longer wants its GPU back")
            self.nudge()
            self.wake()
        return session

    @patient
    async def resumed(self, session_id: int) -> Session:
        session = await self.session(session_id)
        if session.state is S.RUNNING:
            return session
        return await self.move(session, S.RUNNING, expect=(S.RESUMING,))

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        while True:
            session = await self.session(session_id)
            if session.state in ENDING_STATES:
                return session
            try:
                return await self.move(
                    session, end_state(session), expect=(session.state,), cause=cause, message=message
                )
            except InvalidTransition:
                # It has moved to another state, which may end in another way.
                continue

    async def warn(
        self, session_id: int, message: str | None, cause: EndCause = EndCause.ISOLATION_FAILED
    ) -> Session:
        try:
            session = await self.call(self.store.warn, session_id, message, cause, now_s=self.clock.now_s())
        except InvalidTransition:
            return await self.session(session_id)
        self.nudge()
        return session

    async def gone(self, session_id: int) -> Session:
        session = await self.session(session_id)
        if session.state in ENDED:
            return session
        try:
            return await self.move(session, final_state(session.end_cause), expect=(S.TERMINATING,))
        except InvalidTransition:
            # Another caller was first.
            session = await self.session(session_id)
            if session.state in ENDED:
                return session
            raise

    async def session(self, session_id: int) -> Session:
        session = await self.call(self.store.session, session_id)
        if session is None:
            raise UnknownSession(f"there is no session {session_id}")
        return session

    @patient
    async def live(self) -> tuple[Session, ...]:
        return (await self.snapshot()).sessions

    async def snapshot(self) -> Snapshot:
        return await self.call(self.store.snapshot, self.clock.now_s())

    async def serving(self, user: str, server_name: str) -> Session | None:
        return await self.call(self.store.serving, user, server_name)

    async def changes(self, *, at_least_every_s: float | Callable[[], float]) -> AsyncIterator[None]:
        while True:
            changed = self._changed
            yield
            every_s = at_least_every_s() if callable(at_least_every_s) else at_least_every_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await changed.wait()

    def wake(self) -> None:
        """Have the scheduler plan again."""
        self._wake.set()

    def reconcile_soon(self) -> None:
        """Have the scheduler reconcile now: something has changed at the launcher."""
        self._reconcile.set()

    async def _newest_id(self) -> int:
        known = self.store.newest_session_id()
        if known is None:
            await self.call(self.store.snapshot, self.clock.now_s())
            known = self.store.newest_session_id()
        return known or 0

    async def _already_submitted(
        self, requests: Sequence[Request], after_id: int
    ) -> tuple[Session, ...] | None:
        """Return the sessions of these requests if an earlier try committed them and only its answer was lost.

        Their ids are above ``after_id``; times would not do, as the clock may be set. Some may have ended since, or been
        queued again, so more rows are read than there are requests.
        """
        latest = await self.call(self.store.latest, user=requests[0].user, limit=2 * len(requests) + 20)
        found = {s.request: s for s in reversed(latest) if s.id > after_id}
        sessions = tuple(found[asked] for asked in requests if asked in found)
        return sessions if len(sessions) == len(requests) else None

    async def move(
        self,
        session: Session,
        to: SessionState,
        *,
        expect: Sequence[SessionState],
        **more: Unpack[Move],
    ) -> Session:
        """Commit that the session is in another state, if it is in one of ``expect``."""
        now_s = self.clock.now_s()
        return self._announce(
            session, await self.call(self.store.move, session.id, to, now_s=now_s, expect=expect, **more)
        )

    def _announce(self, before: Session, session: Session) -> Session:
        """Log a committed change and wake the callers that wait for it."""
        self._log_change(session, before.state, None)
        if session.state in ENDED:
            self._resolve(session)
            self.wake()
        if session.state is S.TERMINATING:
            self.on_end(session)
        self.nudge()
        return session

    def _resolve(self, session: Session) -> None:
        future = self._waiting.pop(session.id, None)
        if future is None or future.done():
            return
        if session.state in ENDING_STATES:
            future.set_exception(SessionEnded(session))
            # If the spawn was cancelled, no caller reads the exception, and asyncio would log it.
            future.exception()
        else:
            future.set_result(session)

    def nudge(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _log_change(self, session: Session, before: SessionState | None, reason: str | None) -> None:
        why = reason or session.end_cause or session.wait_reason or ""
        self._log(session, f"{before or 'new'} -> {session.state}{f' ({why})' if why else ''}")

    def _log(self, session: Session, words: str) -> None:
        asked = session.request
        log.info("Session %d (%s/%s): %s", session.id, asked.user, asked.server_name, words)
