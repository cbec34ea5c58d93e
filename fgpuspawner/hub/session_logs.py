"""What sessions' servers have printed: read from the engine while they live, kept in files after an end by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path

from fgpu_scheduler import LOGS_KEPT_S, EndCause, Session
from fgpuspawner.engines.base import Engine, EngineSilent
from fgpuspawner.isolation.files import write_whole
from fgpuspawner.text.logs import MOST_LINES

log = logging.getLogger("fgpu")

MOST_KEPT_BYTES = 128 << 10
MOST_KEPT = 1000
KEEP_WITHIN_S = 5.0


class SessionLogs:
    """The logs of sessions as they were printed. The service masks secrets before it shows them."""

    def __init__(self, engine: Engine, data: Path) -> None:
        self._engine = engine
        # Local processes write theirs into the same folder.
        self._folder = data / "logs"

    def _path(self, session: Session) -> Path:
        return self._folder / f"{session.id}-{session.attempt}.log"

    async def read(self, session: Session) -> bytes:
        """Return the end of a session's log; raises EngineSilent."""
        if (found := await self._engine.log(session, lines=MOST_LINES)) is not None:
            return found
        with suppress(OSError):
            return await asyncio.to_thread(self._path(session).read_bytes)
        return b""

    async def keep(self, session: Session, cause: EndCause) -> None:
        """Keep the log of a session that its owner has not ended, before the engine removes what it left."""
        if cause is EndCause.USER or not self._engine.capabilities.reads_logs or not session.attempt:
            return
        try:
            async with asyncio.timeout(KEEP_WITHIN_S):
                found = await self._engine.log(session, lines=MOST_LINES)
            if found:
                await asyncio.to_thread(self._write, self._path(session), found[-MOST_KEPT_BYTES:])
        except (EngineSilent, TimeoutError, OSError) as e:
            log.warning("The log of session %d is not kept: %s", session.id, e or "it took too long")

    def _write(self, path: Path, text: bytes) -> None:
        if path.exists():
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        kept = sorted(self._folder.glob("*.log"), key=lambda one: one.stat().st_mtime, reverse=True)
        for number, one in enumerate(kept):
            if number >= MOST_KEPT or one.stat().st_mtime < time.time() - LOGS_KEPT_S:
                one.unlink(missing_ok=True)
        write_whole(path, text, mode=0o600)
