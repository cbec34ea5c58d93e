"""A queue with one GPU, an engine that a test controls, and a fixed clock."""

from __future__ import annotations

from collections.abc import Callable

from fgpu_scheduler.core.model import Device, Node, Session
from fgpu_scheduler.core.reconcile import Observed
from fgpu_scheduler.ports import Seen
from fgpu_scheduler.queue import Queue

NODE = Node("n1", "default", 8000, 16384, (Device("GPU-1", "n1", 0, "Test GPU", 8192, 1000),))
NOW_S = 1_800_000_000
MOST_WAITING = 2


class Clock:
    """A clock that does not move."""

    def now_s(self) -> int:
        return NOW_S


class FakeEngine:
    """An engine with containers that stay until the test or the queue removes them."""

    def __init__(self) -> None:
        self.things: dict[int, Observed] = {}

    def watch(self, changed: Callable[[], None]) -> None:
        """Never call ``changed``: containers do not end on their own."""

    async def observe(self) -> Seen:
        return Seen(tuple(self.things.values()), (NODE.id,))

    async def remove(self, observed: Observed) -> bool:
        self.things.pop(observed.session_id, None)
        return True


class Lab:
    """A queue and a Hub's actions on it. ``make`` makes another process's queue with the state that the last one left."""

    def __init__(self, make: Callable[[FakeEngine], Queue]) -> None:
        self._make = make
        self.engine = FakeEngine()
        self.queue = make(self.engine)

    async def start(self) -> None:
        await self.queue.start([NODE])

    async def restart(self) -> None:
        """Stop the queue and start one of another process."""
        await self.queue.stop()
        self.queue = self._make(self.engine)
        await self.start()

    async def run(self, session_id: int) -> Session:
        """Wait until the session is placed, and launch it."""
        queue = self.queue
        with queue.launching(session_id):
            await queue.placed(session_id)
            session = await queue.prepare(session_id)
            seen = Observed(NODE.id, session_id, session.attempt, f"c{session_id}", True)
            self.engine.things[session_id] = seen
            return await queue.running(session_id, session.attempt, seen.handle)

    async def clear(self, session_id: int) -> Session:
        """Remove the containers of an ending session."""
        self.engine.things.pop(session_id, None)
        return await self.queue.gone(session_id)
