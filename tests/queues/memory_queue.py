"""A minimal queue for the contract tests: first come, first served on one GPU, with its state in a dict."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from fgpu_scheduler.core.forecast import Forecast, Outlook
from fgpu_scheduler.core.lifecycle import (
    ENDED,
    HOLDING,
    LAUNCHING,
    LIVE,
    SERVING,
    final_state,
    moved,
    returned_to_queue,
)
from fgpu_scheduler.core.model import (
    EndCause,
    Node,
    Placement,
    Quota,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.resizing import Amount, NotResized, resized
from fgpu_scheduler.errors import SessionExists, TooManyPending, UnknownSession
from fgpu_scheduler.queue import Queue, Requeued, SessionEnded

S = SessionState
T = TypeVar("T")


class MemoryQueue(Queue):
    """``kept`` are the sessions by id, which outlive the queue."""

    def __init__(self, kept: dict[int, Session], most_waiting: int, now_s: Callable[[], int]) -> None:
        self.on_end = lambda session: None
        self.on_pass = self.on_forecast = lambda took_s: None
        self._kept = kept
        self._most_waiting = most_waiting
        self._now_s = now_s
        self._nodes: Sequence[Node] = ()
        self._changed = asyncio.Event()

    @property
    def database_is_away(self) -> bool:
        return False

    async def start(self, nodes: Sequence[Node], quotas: Sequence[Quota] = ()) -> tuple[Session, ...]:
        self._nodes = nodes
        for session in await self.live():
            if session.state is not S.RUNNING and session.state is not S.TERMINATING:
                self._kept[session.id] = replace(session, held=True)
        return await self.live()

    async def change_nodes(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes

    async def stop(self) -> None:
        self._nodes = ()

    async def submit(
        self, requests: Sequence[Request], *, replacing: int | None = None
    ) -> tuple[Session, ...]:
        others = [s for s in await self.live() if s.id != replacing and s.state in SERVING]
        for asked in requests:
            mine = [s for s in others if s.request.user == asked.user]
            if any(s.request.server_name == asked.server_name for s in mine):
                raise SessionExists("the server has a session")
            more = sum(other.user == asked.user for other in requests)
            if sum(s.state is S.PENDING for s in mine) + more > self._most_waiting:
                raise TooManyPending("too many wait")
        if replacing is not None:
            await self.end(replacing, EndCause.USER, "replaced")
        first = len(self._kept) + 1
        new = [Session(first + n, asked, S.PENDING, self._now_s()) for n, asked in enumerate(requests)]
        self._kept |= {session.id: session for session in new}
        self._fill()
        return tuple(new)

    async def hold(self, session_id: int) -> None:
        self._kept[session_id] = replace(await self.session(session_id), held=True)

    async def placed(self, session_id: int) -> Session:
        self._put(replace(await self.session(session_id), held=False))
        while (session := await self.session(session_id)).state is S.PENDING:
            await self._changed.wait()
        if session.state not in (S.SCHEDULED, *LAUNCHING, S.RUNNING):
            raise SessionEnded(session)
        return session

    async def resizable(self, session_id: int, amount: Amount) -> Session | NotResized:
        session = await self.session(session_id)
        return resized(await self.snapshot(), session, amount)

    async def resize(self, session_id: int, amount: Amount) -> Session | NotResized:
        found = await self.resizable(session_id, amount)
        if isinstance(found, Session):
            self._put(found)
            self._fill()
        return found

    @contextlib.contextmanager
    def launching(self, session_id: int) -> Iterator[None]:
        yield

    ending = launching

    async def prepare(self, session_id: int) -> Session:
        session = await self.session(session_id)
        if session.state is S.PENDING:
            raise Requeued("it waits again")
        if session.state not in (S.SCHEDULED, *LAUNCHING):
            raise SessionEnded(session)
        return self._put(replace(session, state=S.PREPARING, attempt=session.attempt + 1))

    async def pulling(self, session_id: int, attempt: int) -> Session:
        return self._move(await self.session(session_id), S.PULLING)

    async def give_back(self, session_id: int, attempt: int, why: str) -> Session:
        session = await self.session(session_id)
        if session.state in ENDED or session.state is S.TERMINATING:
            raise SessionEnded(session)
        return self._put(returned_to_queue(session, why, now_s=self._now_s()))

    async def running(self, session_id: int, attempt: int, launched: str) -> Session:
        return self._put(replace(self._move(await self.session(session_id), S.RUNNING), launched=launched))

    async def warn(self, session_id: int, message: str | None) -> Session:
        session = await self.session(session_id)
        return self._put(replace(session, message=message)) if session.state is S.RUNNING else session

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        session = await self.session(session_id)
        if session.state in ENDED or session.state is S.TERMINATING:
            return session
        to = S.CANCELLED if session.state in (S.PENDING, S.SCHEDULED) else S.TERMINATING
        session = self._put(moved(session, to, now_s=self._now_s(), cause=cause, message=message))
        if session.state is S.TERMINATING:
            self.on_end(session)
        return session

    async def gone(self, session_id: int) -> Session:
        session = await self.session(session_id)
        return session if session.state in ENDED else self._move(session, final_state(session.end_cause))

    async def session(self, session_id: int) -> Session:
        if session_id not in self._kept:
            raise UnknownSession(f"there is no session {session_id}")
        return self._kept[session_id]

    async def serving(self, user: str, server_name: str) -> Session | None:
        found = (s for s in await self.live() if s.state in SERVING)
        return next(
            (s for s in found if (s.request.user, s.request.server_name) == (user, server_name)), None
        )

    async def live(self) -> tuple[Session, ...]:
        return tuple(session for session in self._kept.values() if session.state in LIVE)

    async def snapshot(self) -> Snapshot:
        return Snapshot(self._now_s(), len(self._kept), tuple(self._nodes), await self.live())

    async def outlook(self) -> Outlook:
        waiting = [s for s in await self.live() if s.state is S.PENDING]
        why, basis = "the GPU is taken", "unknown"
        found = (
            Forecast(s.id, place, s.wait_reason or WaitReason.HELD, why, None, basis)
            for place, s in enumerate(waiting, 1)
        )
        return Outlook(await self.snapshot(), {one.session_id: one for one in found})

    def forecasts_behind_s(self) -> int:
        return 0

    async def changes(self, *, at_least_every_s: float | Callable[[], float]) -> AsyncIterator[None]:
        while True:
            changed = self._changed
            yield
            every_s = at_least_every_s() if callable(at_least_every_s) else at_least_every_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await changed.wait()

    def nudge(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        return await step()

    def _put(self, session: Session) -> Session:
        self._kept[session.id] = session
        self._fill()
        return session

    def _move(self, session: Session, to: SessionState) -> Session:
        return self._put(moved(session, to, now_s=self._now_s()))

    def _fill(self) -> None:
        """Give a free GPU to the head of the queue, and report a change."""
        for session in self._kept.values():
            if session.state is not S.PENDING:
                continue
            if any(s.state in HOLDING for s in self._kept.values()):
                self._kept[session.id] = replace(session, wait_reason=WaitReason.RESOURCES)
            elif not session.held and not session.left_out(self._now_s()):
                (node,) = self._nodes
                where = Placement(node.id, (Share(node.devices[0].uuid, session.request.fgpu_milli, 1, 1),))
                self._kept[session.id] = replace(
                    session, state=S.SCHEDULED, placement=where, wait_reason=None
                )
        self.nudge()
