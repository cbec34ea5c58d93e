"""After a restart of the Hub: ask it to spawn the waiting requests again, in queue order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fgpu_scheduler import FGPUError, Session
from fgpuspawner.concurrency.background import Background
from fgpuspawner.form.offer import LaunchRequest
from fgpuspawner.service.hub import Hub, HubAnswer, HubUnreachable
from fgpuspawner.service.reader import Reader

log = logging.getLogger(__name__)

EVERY_S = 1.0
ANSWER_WAIT_S = 0.05
"""Seconds to wait for the Hub's answer to a start. By then it has received the request, in order; and places in the
queue are in the store, so that a different order here does no harm."""
MOST_IN_FLIGHT = 40
"""Most unanswered starts at a time. For each, the Hub writes a dozen times in its event loop, which delays all other
requests. It answers within `slow_spawn_timeout`, 2 s: one start every 50 ms, which an idle Hub manages too."""
LONGEST_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often a session's resume was tried, the time of the next try, and the last reason logged."""

    count: int = 0
    next_at: float = 0.0
    said: str = ""


class Resumer:
    """Resumes held sessions through the Hub until its spawner attends to each. Idempotent."""

    def __init__(self, reader: Reader, hub: Hub, token: str) -> None:
        self._reader = reader
        self._hub = hub
        self._token = token
        self._attempts: Mapping[int, Attempts] = {}
        self._in_flight: dict[int, tuple[Session, asyncio.Task[HubAnswer]]] = {}

    def begin(self, background: Background) -> None:
        """Look for held sessions repeatedly."""
        background.every(
            EVERY_S,
            self._round,
            failed="Waiting requests are not resumed yet",
            foreseen=(FGPUError, HubUnreachable),
        )

    async def close(self) -> None:
        tasks = [task for _, task in self._in_flight.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self) -> None:
        held = await self._reader.read_queue(lambda queue: queue.held_sessions())
        # Includes sessions that the Hub took up before it answered: they are no longer held.
        for session, task in tuple(self._in_flight.values()):
            self._take(session, task)
        # The record of an ended session is kept until its last answer arrives.
        ids = {*(session.id for session in held), *self._in_flight}
        self._attempts = {i: a for i, a in self._attempts.items() if i in ids}
        now = asyncio.get_running_loop().time()
        for session in held:
            if len(self._in_flight) >= MOST_IN_FLIGHT:
                break
            if session.id not in self._in_flight and self._of(session).next_at <= now:
                await self._try(session)

    async def _try(self, session: Session) -> None:
        asked = session.request
        # From the store, not from the Hub, which may have been killed before it recorded them.
        wanted = LaunchRequest.of(session.own_request)
        task = asyncio.create_task(
            self._hub.start_server(
                asked.user, asked.server_name, options=wanted.as_options(), token=self._token
            )
        )
        self._in_flight[session.id] = session, task
        await asyncio.wait([task], timeout=ANSWER_WAIT_S)
        # Otherwise a busy Hub would process all its pending starts in one go, and answer no other request.
        await self._hub.has_time()
        self._take(session, task)

    def _take(self, session: Session, task: asyncio.Task[HubAnswer]) -> None:
        """Record the answer if there is one; raises `HubUnreachable` if there will be none."""
        if task.done():
            del self._in_flight[session.id]
            self._note(session, task.result())

    def _of(self, session: Session) -> Attempts:
        return self._attempts.get(session.id, Attempts())

    def _note(self, session: Session, answer: HubAnswer) -> None:
        last = self._of(session)
        delay_s = min(LONGEST_DELAY_S, 2.0**last.count)
        next_at = asyncio.get_running_loop().time() + delay_s
        attempts = replace(last, count=last.count + 1, next_at=next_at)
        name = f"{session.request.user}/{session.request.server_name}"
        if answer.status in (201, 202):
            if last.said != "asked":
                log.info("session %d (%s): the Hub spawns it again", session.id, name)
            attempts = replace(attempts, said="asked")
        elif answer.status == 400 and "pending check" in answer.message:
            # The Hub still compares its sessions with the engine after its restart: try again soon, without back-off.
            attempts = last
        elif not last.said.startswith("failed"):
            log.warning(
                "session %d (%s): the Hub does not spawn it again: %d %s; trying on",
                session.id,
                name,
                answer.status,
                answer.message,
            )
            attempts = replace(attempts, said="failed")
        self._attempts = {**self._attempts, session.id: attempts}
