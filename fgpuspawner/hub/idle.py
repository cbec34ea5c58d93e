"""Who works in which session: its GPUs by the driver, its kernels, terminals and input by its own server.

Idle is only who is known to be, by all of them: a kernel that computes without a word is busy, a server that does not
answer is not idle, and neither is a GPU of which the driver tells nothing. The Hub's last activity counts only where a
server does not note its user's input: an open tab of JupyterLab asks for much by itself, also where nobody is there.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from fgpu_scheduler import Clock, Session
from fgpuspawner.hub.gpu_use import GpuUse
from fgpuspawner.hub.session_server import NoAnswer, ask

log = logging.getLogger("fgpu.idle")

ASK_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Quiet:
    """Since when, in UTC seconds, a server's kernels and terminals are idle.

    ``notes_input``: and nobody has used a keyboard or a pointer. Else it counts every request, those of tabs among them.
    """

    since_s: int
    notes_input: bool


class Servers(Protocol):
    """The spawners of the sessions' servers."""

    @classmethod
    def last_activity_s(cls, session: Session) -> int | None:
        """Return when the Hub last heard of activity at the session's server; None where it has none for it."""

    @classmethod
    async def quiet(cls, session: Session) -> Quiet | None:
        """Ask the session's server since when nothing is done there; None where something is, or that is not known."""


class SessionActivity:
    """The scheduler's `Activity`. ``idle_after_s`` tells of a session how long it may be idle."""

    def __init__(
        self,
        servers: type[Servers],
        gpus: GpuUse,
        clock: Clock,
        *,
        idle_after_s: Callable[[Session], int],
    ) -> None:
        self._servers = servers
        self._gpus = gpus
        self._clock = clock
        self._idle_after_s = idle_after_s

    async def idle_since(self, sessions: Sequence[Session]) -> Mapping[int, int | None]:
        """Return since when each is idle, for those that are for as long as is allowed; None for the others."""
        now_s = self._clock.now_s()
        found = await asyncio.gather(
            *(self._since(s, self._gpus.idle_since_s(s.id), now_s) for s in sessions)
        )
        return {session.id: since for session, since in zip(sessions, found, strict=True)}

    async def _since(self, session: Session, gpu_since_s: int | None, now_s: int) -> int | None:
        long_enough_s = self._idle_after_s(session)
        started_s = session.started_at_s or now_s
        if gpu_since_s is None or now_s - max(gpu_since_s, started_s) < long_enough_s:
            return None
        # The Hub hears of activity every few minutes only: the server itself has the last word.
        quiet = await self._servers.quiet(session)
        heard_s = self._servers.last_activity_s(session)
        if quiet is None or heard_s is None:
            return None
        since_s = max(gpu_since_s, started_s, quiet.since_s, 0 if quiet.notes_input else heard_s)
        return None if now_s - since_s < long_enough_s else since_s


async def ask_quiet(base_url: str, token: str) -> Quiet | None:
    """Return since when nothing is done at a Jupyter server; None where something is, or that is not known."""
    try:
        # One after the other: what is left in the middle of an answer would not be closed.
        noted = await _ask(f"{base_url}fgpu/api/input?no_track_activity=1", token, may_be_missing=True)
        # To be asked is no activity; the server would else never be idle for longer than between two questions.
        kernels = await _ask(f"{base_url}api/kernels?no_track_activity=1", token)
        if any(kernel["execution_state"] != "idle" for kernel in kernels):
            return None
        if noted is None:
            others, input_at_s = [await _ask(f"{base_url}api/status", token)], 0
        else:
            others = await _ask(f"{base_url}api/terminals?no_track_activity=1", token)
            input_at_s = int(noted["input_at_s"])
        since_s = max(input_at_s, *(instant_s(one["last_activity"]) for one in (*others, *kernels)), 0)
        return Quiet(since_s, notes_input=noted is not None)
    # The server is the user's own: whatever it answers, the others are still asked.
    except (NoAnswer, ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as e:
        words = f"{e!r}"[:500]
        log.warning("What the kernels at %s do is not known, so they are not idle: %s", base_url, words)
        return None


async def _ask(url: str, token: str, *, may_be_missing: bool = False) -> Any:
    headers = {"Authorization": f"token {token}", "Accept": "application/json"}
    answer = await ask(url, headers=headers, within_s=ASK_WITHIN_S)
    if answer.code == 404 and may_be_missing:
        return None
    if answer.code != 200:
        raise NoAnswer(f"{url} answers with {answer.code}")
    return json.loads(answer.body)


def instant_s(text: str) -> int:
    """Return an ISO 8601 instant, of UTC unless it says otherwise, in seconds."""
    at = datetime.fromisoformat(text)
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
