"""Changes the slices of running sessions. Decision 0058 has the order and its reasons.

1. An owner's request is a row in the database until it is done or refused.
2. Growing: the record first (`_grow`), then the limits file, then the proof from inside the session. Without a proof
   the old slice comes back.
3. Shrinking: the limits file first (`_shrink`), then a check that all allocations are below the new limit, then the
   record.

So after a crash at any point a session's limits file never allows more than its record, and every step can run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from fgpu_scheduler import (
    MIB,
    UP,
    Amount,
    Clock,
    FGPUError,
    NotResized,
    Queue,
    Resize,
    Resizes,
    ResizeState,
    Session,
    SessionState,
    Share,
    Store,
    UnknownSession,
    grows,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent, LaunchFailed
from fgpuspawner.hub.session_probes import ProveLimits
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.limits import BadLimits, Limits
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.report import BadReport
from fgpuspawner.text.resizing import in_use_words, not_resized_words

log = logging.getLogger("fgpu.isolation")

LOOK_EVERY_S = 0.5
AGAIN_AFTER_S = 5.0
SETTLES_WITHIN_S = 3.0
"""How long allocations granted by the old limit may take to be taken back, unless the machine is very busy."""
ASK_AGAIN_S = 0.2

HeldBytes = Callable[[Session], Awaitable[int]]
"""Returns what a session holds of its GPU, with its kernels' code, in bytes. Raises FGPUError if that is unknown."""


class ResizeRefused(FGPUError):
    """A request that is refused; the message is for the owner."""

    code = "not_resized"


class Resizer:
    def __init__(
        self,
        store: Store,
        queue: Queue,
        isolation: Isolation,
        clock: Clock,
        *,
        held: HeldBytes,
        problems: ProveLimits,
        step_milli: int,
        on_outcome: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._requests = Resizes(store)
        self._queue = queue
        self._isolation = isolation
        self._clock = clock
        self._held = held
        self._problems = problems
        self._step_milli = step_milli
        self._on_outcome = on_outcome
        self._busy: dict[int, asyncio.Task[None]] = {}

    def begin(self, background: Background) -> None:
        background.every(LOOK_EVERY_S, self.look, failed="Sessions are not resized now")

    async def look(self) -> None:
        for request in await asyncio.to_thread(self._requests.asked):
            if request.session_id not in self._busy:
                task = asyncio.create_task(self._guarded(request))
                self._busy[request.session_id] = task

    async def done(self) -> None:
        while self._busy:
            await asyncio.wait(tuple(self._busy.values()))

    async def heal(self, sessions: tuple[Session, ...]) -> None:
        """Bring the limits of running sessions in line with their records, after a crash of the Hub."""
        for session in sessions:
            if session.state is SessionState.RUNNING and self._isolation.resizes(session) is None:
                try:
                    await self._as_recorded(session)
                except (FGPUError, OSError) as e:
                    log.error(
                        "Session %d: its limits could not be compared with its record: %s", session.id, e
                    )

    async def act(self, request: Resize) -> None:
        """Carry out a request and store the outcome. After any other exception it can run again."""
        state, message = ResizeState.DONE, None
        try:
            await self._resize(request)
        except ResizeRefused as e:
            state, message = ResizeState.REFUSED, str(e)
        answer = self._requests.answer
        await asyncio.to_thread(answer, request.session_id, state, message, now_s=self._clock.now_s())
        self._queue.nudge()
        self._on_outcome(state.value.lower())
        why = f": {message}" if message else ""
        log.info("Session %d: its resize request is %s%s", request.session_id, state, why)

    async def _guarded(self, request: Resize) -> None:
        """Carry out a request; after an unexpected failure it is tried again."""
        try:
            await self.act(request)
        except Exception as e:
            foreseen = isinstance(e, FGPUError | OSError)
            log.warning(
                "Session %d is not resized yet, trying on: %s",
                request.session_id,
                e,
                exc_info=None if foreseen else e,
            )
            await asyncio.sleep(AGAIN_AFTER_S)
        finally:
            del self._busy[request.session_id]

    async def _resize(self, request: Resize) -> None:
        """Resize, or raise why not. In either case the limits file allows at most what the record has."""
        try:
            session = await self._queue.session(request.session_id)
        except UnknownSession:
            raise ResizeRefused("The session has ended.") from None
        if session.state in UP and session.state is not SessionState.RUNNING:
            raise ResizeRefused("The session is parked. Resize it when it has its GPU again.")
        if session.state is not SessionState.RUNNING:
            raise ResizeRefused("The session has ended.")
        fixed = self._isolation.resizes(session)
        if fixed is not None:
            raise ResizeRefused(f"This session can't be resized: {fixed}.")
        # Repair what a crashed Hub left first.
        await self._as_recorded(session)
        would = await self._queue.resizable(session.id, request.amount)
        if isinstance(would, NotResized):
            raise await self._refused(would, session, request.amount)
        had, share = _share(session), _share(would)
        if share == had:
            before = Amount.before(session)
            # The record may have it already, without a proof.
            await self._prove(session, before if before is not None else request.amount)
        elif grows(had, share):
            await self._grow(session, request.amount)
        else:
            await self._shrink(session, would, request.amount)

    async def _grow(self, session: Session, amount: Amount) -> None:
        found = await self._queue.resize(session.id, amount)
        if isinstance(found, NotResized):
            raise await self._refused(found, session, amount)
        await self._prove(found, Amount.of(session))

    async def _prove(self, session: Session, before: Amount) -> None:
        """Put a session's record in force, or restore its old slice."""
        try:
            held_to = await asyncio.to_thread(self._isolation.resize, session)
            problems = await self._asked(session, held_to)
        except (BadLimits, OSError) as e:
            problems = [str(e)]
        if not problems:
            return
        log.error("Session %d was resized, and that is not in force: %s", session.id, "; ".join(problems))
        would = await self._queue.resizable(session.id, before)
        if not isinstance(would, NotResized) and _share(would) != _share(session):
            await self._shrink(session, would, before, proves=False)
        raise ResizeRefused(
            f"The new slice could not be put in force ({problems[0][:200]}). The session keeps what it had."
        )

    async def _shrink(self, session: Session, would: Session, amount: Amount, *, proves: bool = True) -> None:
        """Lower the limit, check that all allocations are below it, and release the rest."""
        most_mib = _share(would).memory_mib
        used_mib = await self._held_mib(session)
        if used_mib > most_mib:
            raise await self._in_use(session, used_mib)
        problems: Sequence[str] = ()
        try:
            held_to = await asyncio.to_thread(self._isolation.resize, would)
            used_mib = await self._settled_mib(session, most_mib)
            if used_mib <= most_mib:
                # Without `proves` too: where the driver limits memory, this sets its limit.
                found_problems = await self._asked(would, held_to)
                problems = found_problems if proves else ()
            if used_mib > most_mib:
                raise await self._in_use(session, used_mib)
            if problems:
                raise ResizeRefused(
                    f"The smaller slice could not be put in force ({problems[0][:200]}). The session keeps what it had."
                )
            found = await self._queue.resize(session.id, amount)
            if isinstance(found, NotResized):
                raise await self._refused(found, session, amount)
        except ResizeRefused:
            await self._restore(session)
            raise

    async def _settled_mib(self, session: Session, most_mib: int) -> int:
        """Return what a session holds, in MiB, once it is at most ``most_mib`` or the wait is over."""
        end_s = asyncio.get_running_loop().time() + SETTLES_WITHIN_S
        while True:
            used_mib = await self._held_mib(session)
            if used_mib <= most_mib or asyncio.get_running_loop().time() > end_s:
                return used_mib
            await asyncio.sleep(ASK_AGAIN_S)

    async def _held_mib(self, session: Session) -> int:
        try:
            return -(-await self._held(session) // MIB)
        except (BadReport, LaunchFailed, EngineSilent) as e:
            raise ResizeRefused(
                f"It can't be told what the session holds of its GPU ({e}). It keeps what it had."
            ) from e

    async def _asked(self, session: Session, held_to: Limits) -> Sequence[str]:
        try:
            return await self._problems(session, held_to)
        except (LaunchFailed, EngineSilent) as e:
            return [str(e)]

    async def _in_use(self, session: Session, used_mib: int) -> ResizeRefused:
        world = await self._queue.snapshot()
        return ResizeRefused(in_use_words(session, world, used_mib, step_milli=self._step_milli))

    async def _refused(self, why: NotResized, session: Session, amount: Amount) -> ResizeRefused:
        world = await self._queue.snapshot()
        return ResizeRefused(not_resized_words(why, session, amount, world, step_milli=self._step_milli))

    async def _as_recorded(self, session: Session) -> None:
        found = await asyncio.to_thread(limits.read, self._isolation.folder(session.id))
        if len(found.devices) == 1 and limits.resized(found, session, ()) != found:
            log.warning("Session %d: its limits are not those of its record; they are now", session.id)
            await self._restore(session)

    async def _restore(self, session: Session) -> None:
        """Put a session's record in force again: in its limits, and where its driver limits memory, there too."""
        held_to = await asyncio.to_thread(self._isolation.resize, session)
        for problem in await self._asked(session, held_to):
            log.error("Session %d has its slice again, and that is not in force: %s", session.id, problem)


def _share(session: Session) -> Share:
    assert session.placement is not None
    return session.placement.shares[0]
