"""The logs of sessions that their owners have not ended are kept, private to the Hub's user."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fgpu_scheduler import LOGS_KEPT_S, EndCause, Request, Session, SessionState
from fgpuspawner.engines.base import Capabilities, EngineSilent
from fgpuspawner.hub.session_logs import SessionLogs


class OneLog:
    """An engine with the log of one session."""

    capabilities = Capabilities("things", reads_logs=True)

    def __init__(self) -> None:
        self.text: bytes | None = b"up\nno luck\n"
        self.silent = False

    async def log(self, session: Session, *, lines: int) -> bytes | None:
        if self.silent:
            raise EngineSilent("it does not answer")
        return self.text


def session(number: int = 7) -> Session:
    asked = Request("ann", "", "python", "default", 500, 1000, 1024)
    return Session(number, asked, SessionState.TERMINATING, 0, attempt=2)


async def test_log_outlives_a_failed_session_but_not_one_that_its_owner_ended(tmp_path: Path) -> None:
    engine = OneLog()
    logs = SessionLogs(engine, tmp_path)  # type: ignore[arg-type]
    await logs.keep(session(7), EndCause.LAUNCH_FAILED)
    await logs.keep(session(8), EndCause.USER)
    engine.text = None
    assert await logs.read(session(7)) == b"up\nno luck\n"
    assert await logs.read(session(8)) == b""
    (file,) = (tmp_path / "logs").iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == ("7-2.log", 0o600)


async def test_silent_engine_does_not_keep_a_session_from_ending(tmp_path: Path) -> None:
    engine = OneLog()
    engine.silent = True
    await SessionLogs(engine, tmp_path).keep(session(), EndCause.OOM)  # type: ignore[arg-type]
    assert not (tmp_path / "logs").exists()


async def test_old_logs_make_room(tmp_path: Path) -> None:
    logs = SessionLogs(OneLog(), tmp_path)  # type: ignore[arg-type]
    await logs.keep(session(1), EndCause.OOM)
    old_s = time.time() - LOGS_KEPT_S - 60
    os.utime(tmp_path / "logs" / "1-2.log", (old_s, old_s))
    await logs.keep(session(2), EndCause.OOM)
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["2-2.log"]
