"""Runs the administrator's notice program for each event that an owner should hear of.

Notices come from the event log, so a restarted Hub continues where it stopped. A failed notice is logged and not
repeated: later it could be outdated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from fgpu_scheduler import Clock, EndCause, Event, FGPUError, Session, SessionState, Store
from fgpuspawner.concurrency.background import Background, Failures
from fgpuspawner.isolation.files import HubFile
from fgpuspawner.text.sessions import amount_words, end_words, session_name, warning_words
from fgpuspawner.text.times import hours_minutes, instant

log = logging.getLogger("fgpu.notices")

EVERY_S = 5.0
PAGE = 500
WAITED_S = 60
"""After a shorter wait the owner is probably still on the page."""
SOON_S = 600
"""An end that is nearer is stated to the second."""
OLD_S = 3600
"""Older events, for example from before a restart, are not reported."""
PROGRAM_TIMEOUT_S = 30
TOLD = HubFile("notices.json", dict[str, int])
"""The id of the last event that was looked at, as ``told``."""
KEPT = ("PATH", "HOME", "LANG", "TZ")
"""The only variables that the program gets of the Hub's environment, which has secrets."""

NoticeFields = Mapping[str, str | int | None]


class ProgramFailed(FGPUError):
    """The program failed; the message is one line."""

    code = "notice_failed"


def notice_of(event: Event, session: Session, *, site_name: str) -> NoticeFields | None:
    """Return the notice of an event for a session's owner; None if there is none.

    The values are text, numbers or None: docs/operations.md describes them.
    """
    cause, ends_at_s = None, None
    name = session_name(session.request)
    match event.kind, event.to_state:
        case "moved", SessionState.RUNNING if event.from_state is not SessionState.RESUMING:
            waited_s = _waited_s(session)
            if waited_s < WAITED_S or session.state is not SessionState.RUNNING:
                return None
            what, subject = "started", f"Your session ({name}) has started"
            text = f"It has {amount_words(session.request)}, and waited for {hours_minutes(waited_s)} (hours:minutes)."
        case "moved", SessionState.TERMINATED | SessionState.ERROR | SessionState.CANCELLED:
            cause = session.end_cause
            if cause is None or cause is EndCause.USER:
                return None
            what, subject = "ended", f"Your session ({name}) has ended"
            text = f"Why: {session.message or end_words(cause, None)}."
        case "ends", _:
            cause, ends_at_s, why = session.ends_cause, session.ends_at_s, warning_words(session)
            if event.reason is None or ends_at_s is None or why is None:
                return None
            soon = ends_at_s - event.at_s < SOON_S
            what, subject = "ends_soon", f"Your session ({name}) will end soon"
            text = f"{why[:1].upper()}{why[1:]}. It ends at {instant(ends_at_s, seconds=soon)}."
        case _:
            return None
    return {
        "event": what,
        "at": instant(event.at_s),
        "user": session.request.user,
        "session": session.id,
        "server": session.request.server_name,
        "image": session.request.image,
        "amount": amount_words(session.request),
        "resource_group": session.request.resource_group,
        "cause": cause,
        "ends_at": None if ends_at_s is None else instant(ends_at_s),
        "message": session.message,
        "subject": f"{site_name}: {subject}",
        "text": f"{subject}. {text}",
    }


def _waited_s(session: Session) -> int:
    since_s = session.submitted_at_s if session.queued_at_s is None else session.queued_at_s
    return 0 if session.scheduled_at_s is None else session.scheduled_at_s - since_s


class Notices:
    """Sends notices, beginning with the first start that has a program configured. One for the Hub."""

    def __init__(
        self, store: Store, command: Sequence[str], clock: Clock, *, data: Path, site_name: str
    ) -> None:
        self._store = store
        self._command = tuple(command)
        self._clock = clock
        self._data = data
        self._site_name = site_name
        self._last_id: int | None = None
        self._failures = Failures(log, "An owner was not told", foreseen=(FGPUError, OSError))

    def begin(self, background: Background) -> None:
        if self._command:
            background.every(
                EVERY_S, self.look, failed="Owners are not told now", foreseen=(FGPUError, OSError)
            )

    async def look(self) -> None:
        """Send the notices of the events since the last round."""
        if self._last_id is None:
            self._last_id = await asyncio.to_thread(self._last_told)
            await asyncio.to_thread(TOLD.write, self._data, {"told": self._last_id})
        while found := await asyncio.to_thread(self._store.events, after_id=self._last_id, limit=PAGE):
            for event in found:
                await self._send(event)
                self._last_id = event.id
            await asyncio.to_thread(TOLD.write, self._data, {"told": self._last_id})

    async def _send(self, event: Event) -> None:
        if event.session_id is None or event.at_s < self._clock.now_s() - OLD_S:
            return
        session = await asyncio.to_thread(self._store.session, event.session_id)
        notice = None if session is None else notice_of(event, session, site_name=self._site_name)
        if notice is None:
            return
        try:
            await run_program(self._command, notice)
        except (ProgramFailed, OSError) as e:
            self._failures.failed(e)
        else:
            self._failures.worked()

    def _last_told(self) -> int:
        newest = self._store.last_event_id()
        # A restored database may be older than the file.
        return min(newest, TOLD.read(self._data).get("told", newest))


async def run_program(command: Sequence[str], notice: NoticeFields) -> None:
    """Run the program with a notice as one JSON object on its standard input.

    Raises:
        ProgramFailed: its status was not 0, or it took too long and was killed with its children.
        OSError: it could not be started.
    """
    program = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={name: os.environ[name] for name in KEPT if name in os.environ},
        cwd="/",
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            _, said = await program.communicate(json.dumps(notice).encode())
    except BaseException as e:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        await program.wait()
        if isinstance(e, TimeoutError):
            raise ProgramFailed(f"{command[0]} did not end within {PROGRAM_TIMEOUT_S} s") from None
        raise
    if program.returncode:
        last = said.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise ProgramFailed(f"{command[0]} ended with status {program.returncode}: {last or 'no message'}")
