"""The interface of a queue for the Hub, which launches.

`fgpu_scheduler.service.scheduler.Scheduler` implements it; `fgpu_scheduler.service.reader.QueueReader` reads its database
in other processes. Another scheduler replaces both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from fgpu_scheduler.core.forecast import Outlook
from fgpu_scheduler.core.model import EndCause, Node, Quota, Request, Session, Snapshot
from fgpu_scheduler.core.resizing import Amount, NotResized
from fgpu_scheduler.errors import FGPUError

T = TypeVar("T")


class Requeued(FGPUError, code="requeued"):
    """The session to launch is pending again, at its place in the queue: its node was lost or not granted."""


class SessionEnded(FGPUError, code="session_ended"):
    """The awaited session has ended; ``session`` says why."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.message or f"the session was ended ({session.end_cause})")
        self.session = session


class Queue(Protocol):
    """Gives sessions their shares, in order. The process that launches them uses it in its event loop.

    A change is durable when the call returns, so another process can take over. If the database does not answer, a call
    raises StoreUnavailable and has changed nothing; `submit`, `placed`, `prepare`, `pulling`, `give_back`, `running`,
    `park`, `refuse_to_park`, `want`, `resumed` and `live` wait for the database instead.
    """

    on_end: Callable[[Session], None]
    """Called in the event loop with each session that becomes TERMINATING."""
    on_pass: Callable[[float], None]
    """Called in the event loop with the seconds that planning and committing the plan took."""
    on_forecast: Callable[[float], None]
    """Called in the event loop with the seconds that a forecast of all pending sessions took."""

    @property
    def database_is_away(self) -> bool:
        """Whether a call waits for a database that does not answer; `changes` yields when this turns."""

    # -- its life -------------------------------------------------------------------------------------

    async def start(self, nodes: Sequence[Node], quotas: Sequence[Quota] = ()) -> tuple[Session, ...]:
        """Take over the nodes, the quotas and what the last run left, start to schedule, and return the live sessions.

        A pending request keeps its place and is held until a caller waits for it in `placed`.
        """

    async def change_nodes(self, nodes: Sequence[Node]) -> None:
        """Make these the nodes: some may be new, changed, closed or gone.

        Whether a node answers is observed. A removed node stays, and takes nothing, while a session holds a share of it;
        call this again later. Sessions keep running on a node that became smaller; new ones start only if they fit.

        Raises:
            BadSettings: two nodes have the same device.
        """

    async def stop(self) -> None:
        """Stop scheduling and release nothing: pending requests keep their place, sessions keep running."""

    # -- requests -------------------------------------------------------------------------------------

    async def submit(
        self, requests: Sequence[Request], *, replacing: int | None = None
    ) -> tuple[Session, ...]:
        """Queue these, all or none, in this order. They may be placed before a caller waits for them.

        ``replacing`` is a session that ends in the same step, by its owner's wish; if the requests are refused, it keeps
        its place. If it may have been launched, it is TERMINATING until `gone`.

        Raises:
            SessionExists: one of the servers has a live session.
            TooManyPending: over the user's limit of waiting requests, or over a quota.
        """

    async def hold(self, session_id: int) -> None:
        """Keep a request's place, and do not place it until a caller waits for it."""

    async def placed(self, session_id: int) -> Session:
        """Wait until the session has its shares and return it, SCHEDULED or already launching.

        Cancelling this releases nothing: the request keeps its place.

        Raises:
            SessionEnded: it was cancelled, or its time in the queue ran out.
        """

    # -- a launch -------------------------------------------------------------------------------------

    def launching(self, session_id: int) -> AbstractContextManager[None]:
        """Mark a launch in progress, from `prepare` to `running`: its container may exist without being observed."""

    async def prepare(self, session_id: int) -> Session:
        """Commit that a launch begins, before its first effect; the session's ``attempt`` is the new one.

        Raises:
            Requeued: it lost its shares after it was placed; wait in `placed` again.
            SessionEnded: it has ended since.
        """

    async def pulling(self, session_id: int, attempt: int) -> Session:
        """Commit that the engine pulls the image."""

    async def give_back(self, session_id: int, attempt: int, why: str) -> Session:
        """Commit that the engine did not grant this attempt its node, and that nothing of the attempt is left.

        The session is pending again at its old place, and its owner reads ``why``, the engine's reason. It is not placed
        on that node for a while.

        Raises:
            SessionEnded: it has ended since.
        """

    async def running(self, session_id: int, attempt: int, launched: str) -> Session:
        """Commit that the server answers; ``launched`` is the launcher's note, which `serving` returns.

        A session on demand is PARKED then, any other one RUNNING.
        """

    # -- parking --------------------------------------------------------------------------------------

    async def park(self, session_id: int, parked_mib: int, message: str | None = None) -> Session:
        """Commit that a running or resuming session holds nothing of its GPU any longer. Idempotent.

        Its shares are free at once. ``parked_mib`` is the host memory that has the contents of its GPU memory, and
        ``message`` replaces its owner's message. It does not want its shares back until `want` says so.

        Raises:
            InvalidTransition: its server does not run.
        """

    async def refuse_to_park(self, session_id: int, why: str) -> Session:
        """Commit why a running session is not parked, for the person who asked. Idempotent."""

    async def want(self, session_id: int, wanted: bool) -> Session:
        """Commit whether a PARKED session wants its shares back. Idempotent; in other states it changes nothing.

        Nothing new starts in its place then. It becomes RESUMING as soon as its shares are free: `changes` yields.
        """

    async def resumed(self, session_id: int) -> Session:
        """Commit that the GPU memory of a RESUMING session is back, so that it is RUNNING. Idempotent.

        Raises:
            InvalidTransition: it is neither RESUMING nor RUNNING.
        """

    async def warn(
        self, session_id: int, message: str | None, cause: EndCause = EndCause.ISOLATION_FAILED
    ) -> Session:
        """Commit a warning to the owner of a running session, and the cause that may end it; None withdraws it.

        A session that is no longer RUNNING is left unchanged.
        """

    async def resizable(self, session_id: int, amount: Amount) -> Session | NotResized:
        """Return a running session as it would be with another amount of its GPU, or the reason against it.

        Raises:
            UnknownSession: there is none with this id.
        """

    async def resize(self, session_id: int, amount: Amount) -> Session | NotResized:
        """Commit another amount of its GPU for a running session, or return the reason against it.

        What it gives up is free at once. It cannot take capacity that is reserved for a pending session.

        Raises:
            UnknownSession: there is none with this id.
        """

    # -- an end ---------------------------------------------------------------------------------------

    def ending(self, session_id: int) -> AbstractContextManager[None]:
        """Mark that the caller stops this session, from `end` to `gone`, so that the queue does not."""

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        """Commit that the session ends: CANCELLED before any effect, else TERMINATING. Idempotent.

        A TERMINATING session keeps its shares until `gone`.
        """

    async def gone(self, session_id: int) -> Session:
        """Commit that nothing of a TERMINATING session is left, and free its shares. Idempotent."""

    # -- reading --------------------------------------------------------------------------------------

    async def session(self, session_id: int) -> Session:
        """Return the session, live or ended.

        Raises:
            UnknownSession: there is none with this id.
        """

    async def serving(self, user: str, server_name: str) -> Session | None:
        """Return this server's current session, or None."""

    async def live(self) -> tuple[Session, ...]:
        """Return every live session, by id."""

    async def snapshot(self) -> Snapshot:
        """Return the live sessions and the nodes."""

    async def outlook(self) -> Outlook:
        """Return a snapshot, the forecast of every pending session, and what would start the head of each queue.

        It has every change committed before the call, unless forecasting takes seconds: then it may be seconds old.
        """

    def forecasts_behind_s(self) -> int:
        """Return the age in seconds of the last returned forecasts; 0 if nothing has changed since they were made."""

    def changes(self, *, at_least_every_s: float | Callable[[], float]) -> AsyncIterator[None]:
        """Yield at once, on every change, and at least at this interval."""

    def nudge(self) -> None:
        """Wake the followers of `changes`: something outside the queue has changed for them."""

    async def patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await a step, and repeat it while the database does not answer: it must be safe to repeat."""
