"""Idle times of sessions: their GPUs by the driver; kernels, terminals and input by their own server.

A session is idle only if all of these say so. A kernel that computes without output is busy; a server that does not
answer is not idle, nor is a GPU without figures. The Hub's last activity counts only if the server does not record its
user's input, because an open JupyterLab tab sends requests without a user.
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
from fgpuspawner.hub.gpu_observers import GpuIdleTimes
from fgpuspawner.hub.session_server import NoAnswer, ask

log = logging.getLogger("fgpu.idle")

ASK_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True)
class ServerIdle:
    """Since when, in UTC seconds, a server's kernels and terminals are idle.

    With ``notes_input`` also keyboard and pointer; otherwise the server counts every request, even those of open tabs.
    """

    since_s: int
    notes_input: bool


class Servers(Protocol):
    """What idle times need of the spawner class."""

    @classmethod
    def last_activity_s(cls, session: Session) -> int | None:
        """Return when the Hub last heard of activity at the session's server; None if it does not know the server."""

    @classmethod
    async def server_idle(cls, session: Session) -> ServerIdle | None:
        """Ask the session's server since when it is idle; None if it is busy or does not answer."""


class SessionActivity:
    """The scheduler's `Activity`. ``idle_after_s`` returns how long a session may be idle."""

    def __init__(
        self,
        servers: type[Servers],
        gpus: GpuIdleTimes,
        clock: Clock,
        *,
        idle_after_s: Callable[[Session], int],
    ) -> None:
        self._servers = servers
        self._gpus = gpus
        self._clock = clock
        self._idle_after_s = idle_after_s

    async def idle_since(self, sessions: Sequence[Session]) -> Mapping[int, int | None]:
        """Return since when each session is idle, if longer than allowed; otherwise None."""
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
        # The Hub hears of activity only every few minutes, so the server decides.
        quiet = await self._servers.server_idle(session)
        heard_s = self._servers.last_activity_s(session)
        if quiet is None or heard_s is None:
            return None
        since_s = max(gpu_since_s, started_s, quiet.since_s, 0 if quiet.notes_input else heard_s)
        return None if now_s - since_s < long_enough_s else since_s


async def ask_server_idle(base_url: str, token: str) -> ServerIdle | None:
    """Return since when a Jupyter server is idle; None if it is busy or does not answer."""
    try:
        # One after the other: after a failure no half-read answer is left open.
        noted = await _ask(f"{base_url}fgpu/api/input?no_track_activity=1", token, may_be_missing=True)
        # Without no_track_activity the question itself would count as activity.
        kernels = await _ask(f"{base_url}api/kernels?no_track_activity=1", token)
        if any(kernel["execution_state"] != "idle" for kernel in kernels):
            return None
        if noted is None:
            others, input_at_s = [await _ask(f"{base_url}api/status", token)], 0
        else:
            others = await _ask(f"{base_url}api/terminals?no_track_activity=1", token)
            input_at_s = int(noted["input_at_s"])
        since_s = max(input_at_s, *(instant_s(one["last_activity"]) for one in (*others, *kernels)), 0)
        return ServerIdle(since_s, notes_input=noted is not None)
    # The server is the user's own: whatever it answers, the other sessions must still be asked.
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
    at = datetime.fromisoformat(text)
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
