"""Measures what running sessions take of the disk: warns the owner of a session above its limit, then ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from fgpu_scheduler import (
    EndCause,
    FGPUError,
    NodeAction,
    Session,
    SessionState,
    Store,
    SystemClock,
    act_on_gpu,
    duration,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.meter.disk import (
    DISK,
    MIB,
    DiskHistory,
    DiskLimits,
    DiskState,
    DiskUse,
    above_words,
    amounts,
    judged,
)
from fgpuspawner.meter.file_system import LEAST, counted, used_bytes

log = logging.getLogger("fgpu.disk")

FIRST_COUNT_S = 600
"""The first count reads all folders, which may take minutes: not right after the start."""
REMOVED = "taken by removed files that are still open"


class Sessions(Protocol):
    async def live(self) -> tuple[Session, ...]: ...

    async def warn(self, session_id: int, message: str | None, cause: EndCause = ...) -> Session: ...

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session: ...


class Measuring(Protocol):
    async def disk_use(self, session: Session) -> DiskUse: ...


def close_machine(store: Store, isolation: Isolation, reason: str | None) -> None:
    """Cordon this machine's GPUs with the disk watch's reason; with None uncordon those that it cordoned. Blocks.

    Raises:
        FGPUError: the database could not be written.
    """
    now_s = SystemClock().now_s()
    action = NodeAction.UNCORDON if reason is None else NodeAction.CORDON
    for node in store.snapshot(now_s).nodes:
        for device in () if isolation.is_elsewhere(node.id) else node.devices:
            if REMOVED in (device.cordon_reason or "") if reason is None else not device.cordoned:
                act_on_gpu(
                    store, node.id, device.uuid, action, reason=reason or "", by="the disk watch", now_s=now_s
                )


class SessionDisks:
    """Checks the disk use of sessions. ``close(reason)`` stops starts on this machine, ``close(None)`` allows them."""

    def __init__(
        self,
        engine: Measuring,
        sessions: Sessions,
        limits: DiskLimits,
        *,
        data: Path,
        every_s: int,
        close: Callable[[str | None], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._limits = limits
        self._data = data
        self._every_s = every_s
        self._histories: dict[int, DiskHistory] = {}
        self._warned: dict[int, str] = {}
        self._close = close
        #: Bytes used of each file system that sessions write to, when its files were last counted; -1: never.
        self._used = dict.fromkeys(filter(os.path.ismount, LEAST.read(data)), -1)
        #: Bytes in removed files, by file system with too many; None: not counted yet.
        self._closed_for: dict[str, int] | None = None

    def begin(self, background: Background) -> None:
        """Check periodically; a long check delays the next one."""
        background.every(
            self._every_s,
            self.look,
            failed="What sessions take of the disk is not known",
            foreseen=(OSError,),
        )
        failed = "What removed files take of the disk is not known"
        background.every(
            self._every_s,
            self.compare,
            failed=failed,
            first_after_s=FIRST_COUNT_S,
            foreseen=(OSError, FGPUError),
        )

    async def look(self) -> None:
        """Check every running session, one after another: reading folders keeps a disk busy."""
        running = [s for s in await self._sessions.live() if s.state is SessionState.RUNNING]
        ids = {s.id for s in running}
        self._histories = {i: history for i, history in self._histories.items() if i in ids}
        self._warned = {i: words for i, words in self._warned.items() if i in ids}
        told: dict[int, str] = {}
        for session in running:
            try:
                use = await self._engine.disk_use(session)
            except EngineSilent as e:
                log.debug("Session %d: %s", session.id, e)
                continue
            except Exception:
                # A failure for this session alone: the others are still checked.
                log.exception("What session %d takes of the disk is not known", session.id)
                continue
            for mount in use.mounts:
                self._used.setdefault(mount, -1)
            if use != DiskUse():
                told[session.id] = amounts(use, self._limits)
                try:
                    await self._judge(session, use)
                except FGPUError as e:
                    log.error("Session %d takes too much of the disk, and cannot be told: %s", session.id, e)
        await asyncio.to_thread(DISK.write, self._data, DiskState(told))

    async def compare(self) -> None:
        """Close this machine while removed files that are still open take more of a file system than a session may.

        Counting reads all its files, so it is done only when the used bytes have changed by half of that.
        """
        most = self._limits.session.mib * MIB
        found = dict(self._closed_for or {})
        for top in tuple(self._used) if most else ():
            used = used_bytes(top)
            if self._used[top] >= 0 and top not in found and abs(used - self._used[top]) <= most / 2:
                continue
            amount = await self._nameless(top)
            # Files come and go during a count, so the lower of two counts is used.
            amount = amount if amount <= most else min(amount, await self._nameless(top))
            self._used[top] = used
            found.pop(top, None)
            if amount > most:
                found[top] = amount
        if self._closed_for is None or found.keys() != self._closed_for.keys():
            words = " and ".join(f"{amount / 2**30:.1f} GiB of {top}" for top, amount in found.items())
            if found:
                log.error("%s are %s: no session starts on this machine", words, REMOVED)
            await self._close(f"{words} are {REMOVED}" if found else None)
        self._closed_for = found

    async def _nameless(self, top: str) -> int:
        """Return what files without a name take, beyond the lowest amount ever seen.

        Raises:
            OSError: they cannot be counted.
        """
        found, at_most = await in_a_thread_of_its_own(counted, top, self._data)
        least = LEAST.read(self._data)
        if at_most < least.setdefault(top, at_most + 1):
            LEAST.write(self._data, {**least, top: at_most})
        return max(0, found - least[top])

    async def _judge(self, session: Session, use: DiskUse) -> None:
        history, ends = judged(self._histories.get(session.id), use, self._limits, time.monotonic())
        words = above_words(use, self._limits)
        if ends:
            log.error("Session %d: %s: it is ended", session.id, words)
            message = f"your session was ended: {words}, also after a warning. Make room in your next session"
            await self._sessions.end(session.id, EndCause.DISK_LIMIT, message)
        elif history.above_since_s is not None and session.id not in self._warned:
            log.warning("Session %d: %s: its owner is warned", session.id, words)
            warning = f"{words}. Remove files that you do not need{self._or_else()}"
            await self._sessions.warn(session.id, warning, EndCause.DISK_LIMIT)
            self._warned[session.id] = warning
        elif history.above_since_s is None and (said := self._warned.get(session.id)) is not None:
            log.info("Session %d is within its limit of the disk again", session.id)
            if session.message == said:
                await self._sessions.warn(session.id, None)
            del self._warned[session.id]
        self._histories[session.id] = history

    def _or_else(self) -> str:
        grace_s = self._limits.grace_s
        if grace_s is None:
            return ""
        return f" within {duration(grace_s)}, or the session is ended; sooner if it takes much more"
