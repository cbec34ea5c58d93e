"""The queue is a seam: what the Hub's side asks of it, and what another process reads of it.

`fgpu_scheduler.service.scheduler.Scheduler` is the queue that lives in the Hub, and
`fgpu_scheduler.service.reader.StoreReader` reads its database. Whatever else gives sessions their shares (another
scheduler, another cluster) is a class for each of these two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from fgpu_scheduler.core.forecast import Outlook
from fgpu_scheduler.core.model import EndCause, Node, Quota, Request, Session, Snapshot
from fgpu_scheduler.core.records import Event, Past, Spent
from fgpu_scheduler.core.request_forecast import RequestForecast
from fgpu_scheduler.core.resizing import Amount, NotResized
from fgpu_scheduler.errors import FGPUError

T = TypeVar("T")


class Requeued(FGPUError):
    """The session that was to be launched is back in its place in the queue: its node was lost, or not given to it."""

    code = "requeued"


class SessionEnded(FGPUError):
    """The session that was waited for has ended instead; ``session`` says why."""

    code = "session_ended"

    def __init__(self, session: Session) -> None:
        super().__init__(session.message or f"the session was ended ({session.end_cause})")
        self.session = session


class Queue(Protocol):
    """What gives sessions their shares, in order, as the process that launches them uses it: in its event loop.

    What is told to it is durable when the call returns: another process that takes over goes on from there. A call
    raises StoreUnavailable, and has changed nothing, where that cannot be had now; `submit`, `placed`, `prepare`,
    `pulling`, `give_back`, `running` and `live` wait for it instead.
    """

    on_end: Callable[[Session], None]
    """Called, in the event loop, with every session that is TERMINATING from then on."""
    on_pass: Callable[[float], None]
    """Called, in the event loop, with the seconds that planning took, and writing the plan."""
    on_forecast: Callable[[float], None]
    """Called, in the event loop, with the seconds that a forecast for all who wait took."""

    @property
    def database_is_away(self) -> bool:
        """Whether somebody waits for what keeps the queue, in vain; `changes` tells when that turns."""

    # -- its life -------------------------------------------------------------------------------------

    async def start(self, nodes: Sequence[Node], quotas: Sequence[Quota] = ()) -> tuple[Session, ...]:
        """Take up the nodes, the quotas and what the last run left, begin to schedule, and return the live sessions.

        What waited keeps its place, and is held until somebody waits for it in `placed`.
        """

    async def change_nodes(self, nodes: Sequence[Node]) -> None:
        """Make these the nodes: some may be new, have something else, be closed, or be gone.

        Whether one answers is found out by looking. One that is gone stays, and takes nothing, while a session holds
        anything of it: call this again. What runs on a node that has less now runs on; nothing starts there that does
        not fit.

        Raises:
            BadSettings: a device is on two of them.
        """

    async def stop(self) -> None:
        """Stop scheduling. Nothing is released: what waits keeps its place, what runs keeps running."""

    # -- requests -------------------------------------------------------------------------------------

    async def submit(
        self, requests: Sequence[Request], *, replacing: int | None = None
    ) -> tuple[Session, ...]:
        """Queue these, all or none, in this order. They may be placed before anybody waits for them.

        ``replacing`` is a session that ends for them, as its owner's wish, in the same step: where they are refused it
        stays as it is, in its place. One that may have been launched is then TERMINATING, until `gone`.

        Raises:
            SessionExists: one of the servers has a live session.
            TooManyPending: over the user's limit of waiting requests, or over a quota.
        """

    async def hold(self, session_id: int) -> None:
        """Keep a request's place, and do not place it until somebody waits for it."""

    async def placed(self, session_id: int) -> Session:
        """Wait until the session has its shares and return it, SCHEDULED or already launching.

        Cancelling this releases nothing: the request keeps its place.

        Raises:
            SessionEnded: it was cancelled, or its time in the queue ran out.
        """

    # -- a launch -------------------------------------------------------------------------------------

    def launching(self, session_id: int) -> AbstractContextManager[None]:
        """Mark that a launch of this session is under way: what is not seen of it may still come.

        Around everything from `prepare` to `running`, by whoever launches.
        """

    async def prepare(self, session_id: int) -> Session:
        """Commit that a launch begins, before its first effect; the session's ``attempt`` is the new one.

        Raises:
            Requeued: it has lost its place since it was placed; wait in `placed` again.
            SessionEnded: it was ended since.
        """

    async def pulling(self, session_id: int, attempt: int) -> Session:
        """Commit that the engine fetches the image."""

    async def give_back(self, session_id: int, attempt: int, why: str) -> Session:
        """Commit that the engine did not give this attempt its place, and that nothing of it is left.

        It waits again, at its old place; ``why``, in the engine's words, is what its owner reads. That node is not
        offered to it for a while.

        Raises:
            SessionEnded: it was ended since.
        """

    async def running(self, session_id: int, attempt: int, launched: str) -> Session:
        """Commit that the server answers; ``launched`` is the launcher's note, given back by `serving`."""

    async def warn(
        self, session_id: int, message: str | None, cause: EndCause = EndCause.ISOLATION_FAILED
    ) -> Session:
        """Commit what the owner of a running session is warned of, and what it may be ended for; None: of nothing.

        One that is not RUNNING any more is left as it is.
        """

    async def resizable(self, session_id: int, amount: Amount) -> Session | NotResized:
        """Return a running session as it would be with another amount of its GPU, or what is against it now.

        Raises:
            UnknownSession: there is none with this id.
        """

    async def resize(self, session_id: int, amount: Amount) -> Session | NotResized:
        """Commit that a running session holds another amount of its GPU from now on; or return what is against it.

        What it gives back is free at once. It takes nothing that is kept for somebody who waits.

        Raises:
            UnknownSession: there is none with this id.
        """

    # -- an end ---------------------------------------------------------------------------------------

    def ending(self, session_id: int) -> AbstractContextManager[None]:
        """Mark that somebody takes this session down, from `end` to `gone`: the queue need not."""

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        """Commit that the session is to end: CANCELLED before any effect, else TERMINATING. Idempotent.

        A TERMINATING session keeps its shares until `gone`.
        """

    async def gone(self, session_id: int) -> Session:
        """Commit that nothing of a TERMINATING session is left: its shares are free. Idempotent."""

    # -- what is to be told ---------------------------------------------------------------------------

    async def session(self, session_id: int) -> Session:
        """Return the session, live or ended.

        Raises:
            UnknownSession: there is none with this id.
        """

    async def serving(self, user: str, server_name: str) -> Session | None:
        """Return this server's current session, or None."""

    async def live(self) -> tuple[Session, ...]:
        """Return every live session, in order of their ids."""

    async def snapshot(self) -> Snapshot:
        """Return the live sessions, and the nodes."""

    async def outlook(self) -> Outlook:
        """Return the snapshot with the forecast of every waiting session, and what would start the first of each queue.

        It is not older than the question, but for the clock; and for some seconds where it takes seconds to find out.
        """

    def forecasts_behind_s(self) -> int:
        """Return how old the forecasts are that were returned last; 0 where nothing had changed since they were made."""

    def changes(self, *, at_least_every_s: float | Callable[[], float]) -> AsyncIterator[None]:
        """Yield at once, and then whenever anything changed, or that much time has passed."""

    def nudge(self) -> None:
        """Have those who follow `changes` look again: something beside the queue has changed for them."""

    async def patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await a step until what keeps the queue has answered it. It is begun again each time: it must bear that."""


class QueueReader(Protocol):
    """What another process reads of a queue. Every call blocks, and raises StoreUnavailable; for several threads."""

    def connect(self) -> None:
        """Connect, and be able to read from then on."""

    def close(self) -> None:
        """Close every connection. Idempotent."""

    # -- now ------------------------------------------------------------------------------------------

    def version(self) -> int:
        """Return what is another number after every change."""

    def snapshot(self, now_s: int) -> Snapshot:
        """Return nodes, live sessions, usage and quotas as they are at one instant."""

    def outlook(self, snapshot: Snapshot) -> Outlook:
        """Return a snapshot with the forecast of every waiting session. Of a long queue it takes seconds."""

    def forecast(
        self, request: Request, count: int, snapshot: Snapshot, others: Sequence[Request]
    ) -> RequestForecast:
        """Return what would become of ``count`` sessions if they were submitted now.

        ``others`` are the amounts of fGPU to offer in place of it, smallest first, with their own CPU and memory.
        """

    def largest_now(self, others: Sequence[Request], group: str, snapshot: Snapshot) -> Request | None:
        """Return the largest of these requests of a resource group that would start at once, or None."""

    def delays_a_promise(self, session: Session, by_s: int, snapshot: Snapshot) -> bool:
        """Return whether somebody would start later than promised if the session's time limit were longer."""

    # -- sessions -------------------------------------------------------------------------------------

    def session(self, session_id: int) -> Session | None:
        """Return the session with this id, live or ended."""

    def held_sessions(self) -> tuple[Session, ...]:
        """Return what is held, in the order to resume it: what has its share first, then the queue."""

    def ended(self, *, user: str | None, limit: int) -> tuple[Session, ...]:
        """Return the sessions that ended last, of one user or of all, newest first."""

    # -- history --------------------------------------------------------------------------------------

    def last_event_id(self) -> int:
        """Return the newest event's id, 0 where there is none."""

    def events(self, *, after_id: int = 0, limit: int = 200) -> tuple[Event, ...]:
        """Return the oldest events after an id, in the order in which they were committed."""

    def past(self, session_id: int) -> Past | None:
        """Return one session, live or ended, with what was measured of it."""

    def history(self, *, user: str | None, before_id: int | None, limit: int) -> tuple[Past, ...]:
        """Return the newest sessions that have ended, of one user or of all, with ids below ``before_id``."""

    def measured_runs(self, user: str, *, limit: int) -> tuple[Past, ...]:
        """Return a user's newest sessions that have ended and of which something was measured."""

    def spent(self, from_s: int, to_s: int) -> Iterator[Spent]:
        """Yield every session that held shares at any time from one instant until before another, by id."""
