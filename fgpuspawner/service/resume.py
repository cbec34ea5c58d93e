"""After a restart of the Hub: ask it to spawn the waiting requests again, in queue order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fgpu_scheduler import FGPUError, Session
from fgpuspawner.concurrency.background import Background
from fgpuspawner.form.offer import LaunchRequest
from fgpuspawner.service.hub import Answer, Hub, HubUnreachable
from fgpuspawner.service.reader import Reader

log = logging.getLogger(__name__)

EVERY_S = 1.0
ANSWER_WAIT_S = 0.05
"""The Hub answers a start that waits only after a while. It has seen the request by then, in order; and the
place in the queue is in the store, so that an order that is not kept here is kept there."""
MOST_IN_FLIGHT = 40
"""So many starts the Hub has not answered yet. For each it writes a dozen times in its event loop, in which everybody
else waits. It answers within `slow_spawn_timeout`, 2 s: with one every 50 ms that is what a quick Hub has, too."""
LONGEST_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often a session's resume was tried, when it is tried next, and the last reason logged."""

    count: int = 0
    next_at: float = 0.0
    said: str = ""


class Resumer:
    """Resumes held sessions through the Hub until its spawner attends each. Idempotent."""

    def __init__(self, reader: Reader, hub: Hub, token: str) -> None:
        self._reader = reader
        self._hub = hub
        self._token = token
        self._attempts: Mapping[int, Attempts] = {}
        self._in_flight: dict[int, tuple[Session, asyncio.Task[Answer]]] = {}

    def begin(self, background: Background) -> None:
        """Look for held sessions, again and again."""
        background.every(
            EVERY_S,
            self._round,
            failed="Waiting requests are not resumed yet",
            foreseen=(FGPUError, HubUnreachable),
        )

    async def close(self) -> None:
        """Give up on what the Hub has not answered."""
        tasks = [task for _, task in self._in_flight.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self) -> None:
        held = await self._reader.ask(lambda queue: queue.held_sessions())
        # Those that the Hub attended while it had not answered yet are not held any more, but are answered.
        for session, task in tuple(self._in_flight.values()):
            self._take(session, task)
        # What is known of one that has ended is kept until its last answer is there.
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
        # From the store and not from the Hub, which may have been killed before it had noted them.
        wanted = LaunchRequest.of(session.own_request)
        task = asyncio.create_task(
            self._hub.start_server(
                asked.user, asked.server_name, options=wanted.as_options(), token=self._token
            )
        )
        self._in_flight[session.id] = session, task
        await asyncio.wait([task], timeout=ANSWER_WAIT_S)
        # A busy Hub would take up all that it was asked for meanwhile in one go, and answer nobody else.
        await self._hub.has_time()
        self._take(session, task)

    def _take(self, session: Session, task: asyncio.Task[Answer]) -> None:
        """Note the answer if there is one; raises `HubUnreachable` if there will be none."""
        if task.done():
            del self._in_flight[session.id]
            self._note(session, task.result())

    def _of(self, session: Session) -> Attempts:
        return self._attempts.get(session.id, Attempts())

    def _note(self, session: Session, answer: Answer) -> None:
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
            # The Hub is still looking at what it had before it restarted: that takes a moment, not a back-off.
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
