"""Looks at what running sessions take of the disk: warns the owner of one above its limit, then ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from fgpu_scheduler import EndCause, FGPUError, Session, SessionState, duration
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.meter.disk import (
    DISK,
    DiskTold,
    DiskUse,
    Limits,
    Story,
    above_words,
    amounts,
    judged,
)

log = logging.getLogger("fgpu.disk")


class Sessions(Protocol):
    """The scheduler, as far as it is needed here."""

    async def live(self) -> tuple[Session, ...]: ...

    async def warn(self, session_id: int, message: str | None, cause: EndCause = ...) -> Session: ...

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session: ...


class Measuring(Protocol):
    """The engine, as far as it is needed here."""

    async def disk_use(self, session: Session) -> DiskUse: ...


class SessionDisks:
    """One for the Hub's life."""

    def __init__(
        self, engine: Measuring, sessions: Sessions, limits: Limits, *, data: Path, every_s: int
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._limits = limits
        self._data = data
        self._every_s = every_s
        self._stories: dict[int, Story] = {}
        self._warned: dict[int, str] = {}

    def begin(self, background: Background) -> None:
        """Look again and again. A look that takes long makes the next one later."""
        background.every(
            self._every_s,
            self.look,
            failed="What sessions take of the disk is not known",
            foreseen=(OSError,),
        )

    async def look(self) -> None:
        """Look once at every running session, one after another: reading folders keeps a disk busy."""
        running = [s for s in await self._sessions.live() if s.state is SessionState.RUNNING]
        ids = {s.id for s in running}
        self._stories = {i: story for i, story in self._stories.items() if i in ids}
        self._warned = {i: words for i, words in self._warned.items() if i in ids}
        told: dict[int, str] = {}
        for session in running:
            try:
                use = await self._engine.disk_use(session)
            except EngineSilent as e:
                log.debug("Session %d: %s", session.id, e)
                continue
            except Exception:
                # Whatever it was, it is of this session alone: the others are still looked at.
                log.exception("What session %d takes of the disk is not known", session.id)
                continue
            if use != DiskUse():
                told[session.id] = amounts(use, self._limits)
                try:
                    await self._judge(session, use)
                except FGPUError as e:
                    log.error("Session %d takes too much of the disk, and cannot be told: %s", session.id, e)
        await asyncio.to_thread(DISK.write, self._data, DiskTold(told))

    async def _judge(self, session: Session, use: DiskUse) -> None:
        story, ends = judged(self._stories.get(session.id), use, self._limits, time.monotonic())
        words = above_words(use, self._limits)
        if ends:
            log.error("Session %d: %s: it is ended", session.id, words)
            message = f"your session was ended: {words}, also after a warning. Make room in your next session"
            await self._sessions.end(session.id, EndCause.DISK_LIMIT, message)
        elif story.above_since_s is not None and session.id not in self._warned:
            log.warning("Session %d: %s: its owner is warned", session.id, words)
            warning = f"{words}. Remove files that you do not need{self._or_else()}"
            await self._sessions.warn(session.id, warning, EndCause.DISK_LIMIT)
            self._warned[session.id] = warning
        elif story.above_since_s is None and (said := self._warned.get(session.id)) is not None:
            log.info("Session %d is within its limit of the disk again", session.id)
            if session.message == said:
                await self._sessions.warn(session.id, None)
            del self._warned[session.id]
        self._stories[session.id] = story

    def _or_else(self) -> str:
        grace_s = self._limits.grace_s
        if grace_s is None:
            return ""
        return f" within {duration(grace_s)}, or the session is ended; sooner if it takes much more"
