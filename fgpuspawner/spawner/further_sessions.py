"""Requests for several sessions: each but the first is a named server more, with a place in the queue from the start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import ClassVar

from fgpu_scheduler import FGPUError, Refusal, Session
from fgpuspawner.form.offer import LaunchRequest, RequestRefused
from fgpuspawner.spawner.launch_form import LaunchFormSpawner

PAUSE_S = 0.05
"""The pause between two further servers of all submissions: for each the Hub makes a dozen writes in the event loop,
and delays its other requests by them."""


class FurtherSessions:
    """The sessions of one submission except for the first, which is its spawner's own."""

    _one_at_a_time: ClassVar[asyncio.Semaphore] = asyncio.Semaphore(1)

    def __init__(self, spawner: LaunchFormSpawner) -> None:
        self._spawner = spawner
        self._user = spawner.user
        self._queue = spawner.runtime.queue

    async def names(self, count: int) -> list[str]:
        """Return server names for ``count`` further sessions: the lowest numbers that are free.

        Raises:
            Refused: the user may not have this number of named servers.
        """
        if count < 1:
            return []
        if not self._user.settings.get("allow_named_servers"):
            message = "count: only 1 session at a time, because named servers are not enabled"
            raise RequestRefused([Refusal("count", "no_named_servers", message, "1", "1")])
        free = self._spawner.further_names()
        names: list[str] = []
        while len(names) < count:
            name = next(free)
            if not await self._queue.serving(self._user.name, name):
                names.append(name)
        limit = self._spawner.named_server_limit()
        named = {n for n in self._user.orm_spawners if n} | set(names)
        if limit and len(named) > limit:
            message = (
                f"count: {count + 1} sessions need {len(named)} named servers; the limit is {limit} per user"
            )
            raise RequestRefused([Refusal("count", "too_many_servers", message, str(limit))])
        return names

    def spawn_all(self, wanted: LaunchRequest, sessions: Sequence[Session]) -> None:
        """Start the servers of these sessions in the background, as the request for the first one would.

        Their positions in the queue are committed. If this process ends first, they are resumed like other requests.
        """
        options = {**wanted.as_options(), "count": 1}
        # A later start of the first server that reuses its options must not request all of them again.
        self._spawner.orm_spawner.user_options = options
        self._user.db.commit()
        handler = self._spawner.handler

        async def spawn(session: Session) -> None:
            name = session.request.server_name
            try:
                async with self._one_at_a_time:
                    current = await self._queue.serving(self._user.name, name)
                    if current is None or current.id != session.id:
                        return  # It was ended: no new request is made in its place.
                    self._user.get_or_create_spawner(name, name, replace_failed=True)
                    starting = asyncio.ensure_future(
                        handler.spawn_single_user(self._user, name, name, options=options)
                    )
                    # The Hub's writes are done by then; the start itself may wait in the queue for hours.
                    await asyncio.wait([starting], timeout=PAUSE_S)
                await starting
            except Exception as e:
                # A held session keeps its position, and the service asks the Hub for its server again.
                self._spawner.log.warning("Could not start %s:%s yet: %s", self._user.name, name, e)
                await self._hold(session)

        for session in sessions:
            failed = f"Session {session.id} could not be started or held"
            self._spawner.runtime.background.run(spawn(session), failed=failed)

    async def hold_all(self, submitting: asyncio.Future[tuple[Session, ...]]) -> None:
        """Hold the further sessions of a cancelled start: they keep their positions, and the service resumes them."""
        with contextlib.suppress(FGPUError):
            for session in (await submitting)[1:]:
                await self._hold(session)

    async def _hold(self, session: Session) -> None:
        await self._queue.patiently(lambda: self._queue.hold(session.id))
