"""A queue with one GPU, an engine that a test plays, and a clock that stands."""

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
    """Stands still."""

    def now_s(self) -> int:
        return NOW_S


class Standing:
    """An engine whose containers stand until the test, or the queue, removes them."""

    def __init__(self) -> None:
        self.things: dict[int, Observed] = {}

    def watch(self, changed: Callable[[], None]) -> None:
        """Nothing ends by itself."""

    async def observe(self) -> Seen:
        return Seen(tuple(self.things.values()), (NODE.id,))

    async def remove(self, observed: Observed) -> bool:
        self.things.pop(observed.session_id, None)
        return True


class Lab:
    """A queue, and what a Hub does with it. ``make`` makes the queue of another process on what the last one kept."""

    def __init__(self, make: Callable[[Standing], Queue]) -> None:
        self._make = make
        self.engine = Standing()
        self.queue = make(self.engine)

    async def start(self) -> None:
        """Begin to schedule."""
        await self.queue.start([NODE])

    async def restart(self) -> None:
        """Let another process take over."""
        await self.queue.stop()
        self.queue = self._make(self.engine)
        await self.start()

    async def run(self, session_id: int) -> Session:
        """Launch a session once it is placed."""
        queue = self.queue
        with queue.launching(session_id):
            await queue.placed(session_id)
            session = await queue.prepare(session_id)
            seen = Observed(NODE.id, session_id, session.attempt, f"c{session_id}", True)
            self.engine.things[session_id] = seen
            return await queue.running(session_id, session.attempt, seen.handle)

    async def clear(self, session_id: int) -> Session:
        """Remove what runs of a session that is to end."""
        self.engine.things.pop(session_id, None)
        return await self.queue.gone(session_id)
