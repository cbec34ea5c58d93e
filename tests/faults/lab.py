"""A real scheduler with its store on a clock that the test sets, and the spawner's and the engine's part played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fgpu_scheduler import (
    Caps,
    Deadlines,
    Device,
    EndCause,
    Forecast,
    Node,
    Observed,
    Policy,
    Request,
    Scheduler,
    Seen,
    Session,
    SessionState,
    Store,
)

HOUR_S = 3600
BEGAN_S = 1_800_000_000
QUICK = Deadlines(
    queue_timeout_s=24 * HOUR_S, resume_grace_s=1, abandoned_after_s=900, reconcile_every_s=0.02
)
NODE = Node(
    id="a",
    resource_group="default",
    cpu_milli=8000,
    memory_mib=16384,
    devices=(Device(uuid="GPU-a", node_id="a", index=0, model="sim", memory_mib=8192, capacity_milli=2000),),
)


class SetClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.at_s = BEGAN_S

    def now_s(self) -> int:
        return self.at_s


class Standing:
    """A launcher with containers that exist until they are removed."""

    def __init__(self) -> None:
        self.things: list[Observed] = []
        self.looked = asyncio.Condition()

    def watch(self, changed: Callable[[], None]) -> None:
        return None

    async def observe(self) -> Seen:
        async with self.looked:
            self.looked.notify_all()
        return Seen(tuple(self.things), ("a",))

    async def remove(self, observed: Observed) -> bool:
        self.things = [o for o in self.things if o.handle != observed.handle]
        return True


class Lab:
    """A real scheduler with its store, and the spawner's part played by the test."""

    def __init__(self, store: Store, deadlines: Deadlines = QUICK) -> None:
        self.clock, self.launcher = SetClock(), Standing()
        self.store = store
        self.deadlines = deadlines
        self.scheduler = self._made()
        self.waiting: dict[int, asyncio.Task[Session]] = {}

    def _made(self) -> Scheduler:
        return Scheduler(
            self.store,
            policy=Policy(),
            caps=Caps(fgpu_step_milli=100, max_count=5, max_pending_per_user=9),
            launcher=self.launcher,
            deadlines=self.deadlines,
            clock=self.clock,
        )

    async def ask(self, user: str, *, time_limit_s: int | None = None) -> int:
        """Ask for all of the GPU."""
        asked = Request(user, "", "python", "default", 2000, 100, 256, time_limit_s=time_limit_s)
        (session,) = await self.scheduler.submit([asked])
        self.waiting[session.id] = asyncio.ensure_future(self.scheduler.placed(session.id))
        return session.id

    async def run(self, session_id: int) -> None:
        """Launch a session as soon as it is placed."""
        await asyncio.wait_for(self.waiting[session_id], 60)
        session = await self.scheduler.prepare(session_id)
        self.launcher.things.append(Observed("a", session_id, session.attempt, f"c{session_id}", True))
        await self.scheduler.running(session_id, session.attempt, "{}")

    async def end(self, session_id: int) -> None:
        """End a running session."""
        await self.scheduler.end(session_id, EndCause.USER)
        self.launcher.things = [o for o in self.launcher.things if o.session_id != session_id]
        await self.scheduler.gone(session_id)

    async def rounds(self, count: int = 4) -> None:
        """Let the scheduler look at everything a few times."""
        async with asyncio.timeout(60):
            for _ in range(count):
                async with self.launcher.looked:
                    await self.launcher.looked.wait()

    async def state(self, session_id: int) -> SessionState:
        return (await self.scheduler.session(session_id)).state

    async def forecast(self, session_id: int) -> Forecast:
        return (await self.scheduler.outlook()).forecasts[session_id]

    async def restart(self) -> None:
        """Let another scheduler take over, as a restarted Hub does."""
        await self.scheduler.stop()
        self.scheduler = self._made()
        await self.scheduler.start([NODE])
