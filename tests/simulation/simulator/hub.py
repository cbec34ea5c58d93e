"""The Hub of a simulation: the real `Scheduler`, with simulated spawners, engines and clock.

It runs on a virtual event loop, step by step, and can die between any two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.model import EndCause, Session, SessionState
from fgpu_scheduler.core.parking import plan_parking
from fgpu_scheduler.core.reconcile import Observed
from fgpu_scheduler.errors import FGPUError, InvalidTransition, StoreUnavailable
from fgpu_scheduler.ports import Seen
from fgpu_scheduler.queue import Requeued, SessionEnded
from fgpu_scheduler.service.healing import filled_from_store
from fgpu_scheduler.service.scheduler import Deadlines, Scheduler
from simulator.checks import HOST_MIB, Container, Violation
from simulator.lab import Lab, node_of
from simulator.virtual import VirtualLoop

S = SessionState
T = TypeVar("T")

LOOK_S = 60
"""How often the Hub looks up the nodes."""
AGAIN_S = 5
"""How soon the Hub retries an end that failed because the database was away."""


PROBE_S = 5
"""How long an engine may take to move the GPU memory of a session."""


class LaunchFails(FGPUError):
    """A launch has failed."""

    def __init__(self, cause: EndCause) -> None:
        super().__init__("the launch failed")
        self.cause = cause


class EngineFails(FGPUError):
    """An engine answers with an error."""


class Hub(Lab):
    """Launches, ends and resumes sessions as spawners do, and dies. `Scheduler` decides everything else."""

    _queue: Scheduler
    _ready = False

    # --- Start and death ---

    def _boot(self) -> None:
        """Start a Hub with the state that the last one left."""
        self._hub += 1
        self._ready = False
        self._changed: Callable[[], None] = lambda: None
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._launches: dict[int, asyncio.Task[None]] = {}
        self._up: dict[int, None] = {}
        self._leaving: dict[int, None] = {}
        self._loop = VirtualLoop(self._at_s, self._takes_s)  # type: ignore[abstract]
        self._queue = Scheduler(
            self._store,
            policy=self._policy,
            caps=self._caps,
            launcher=self,
            deadlines=Deadlines(queue_timeout_s=self._queue_timeout_s, reconcile_every_s=10),
            clock=self,
            rules=self._rules,
            activity=self,
        )
        self._queue.on_end = self._on_end
        self._spawn(self._starts())

    def _hub_restarts(self) -> None:
        """Kill the Hub at its current step, and start another one."""
        self._restarts += 1
        self._say("the Hub restarts")
        self._loop.kill()
        if self._beside is self._store:
            # A database in memory lives as long as its connection, so keep it and drop only the cache.
            self._store.forget()
        else:
            self._store.close()
            self._store = self._watched()
            self._store.open()
        self._boot()

    def _spawn(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a task of the Hub. An exception is a violation, unless it is an error that a Hub tells its user."""
        task = self._loop.create_task(what)
        task.add_done_callback(self._ended_well)
        return task

    def _ended_well(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, FGPUError):
            self._broken = self._broken or Violation(f"{type(error).__name__}: {error}")

    async def _starts(self) -> None:
        stored = self._snapshot().nodes
        while True:
            try:
                await self._queue.start(filled_from_store(self._there(), stored), self._quotas)
                break
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)
        self._ready = True
        self._spawn(self._parks())
        for session in self._snapshot().sessions:
            if session.state in lifecycle.UP:
                self._up[session.id] = None
        with self._store.faultless():
            held = self._store.held_sessions()
        for session in held:
            await asyncio.sleep(self._rng.randrange(6))
            if not self._chance(self._faults.never_resumed):
                self._serve(session.id)
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self._queue.change_nodes(self._there())
            await asyncio.sleep(LOOK_S)

    # --- Launching ---

    def _serve(self, session_id: int) -> None:
        """Wait for a session's shares, and launch it."""
        if session_id not in self._serving:
            task = self._serving[session_id] = self._spawn(self._serves(session_id))
            task.add_done_callback(lambda _: self._serving.pop(session_id))

    async def _serves(self, session_id: int) -> None:
        try:
            while True:
                placed = await self._queue.placed(session_id)
                if placed.state in lifecycle.UP:
                    return
                if self._chance(self._faults.inventory):
                    self._inventory_changes()
                launch = self._launches[session_id] = self._loop.create_task(self._launch(placed))
                launch.add_done_callback(lambda its: its.cancelled() or its.exception())
                try:
                    # A cancelled spawn leaves the launch to `_stop`.
                    await asyncio.shield(launch)
                    return
                except Requeued:
                    self._say(f"session {session_id} waits again")
        except SessionEnded:
            return
        except FGPUError as e:
            self._say(f"session {session_id} fails: {e}")
            cause = e.cause if isinstance(e, LaunchFails) else EndCause.LAUNCH_FAILED
            await self._stop(session_id, cause)

    async def _launch(self, placed: Session) -> None:
        queue, faults = self._queue, self._faults
        with queue.launching(placed.id):
            session = await queue.prepare(placed.id)
            if session.attempt > 1 and not await self._engine_stops(session):
                raise LaunchFails(EndCause.NODE_LOST)
            if self._chance(faults.not_bound) or not self._has_devices(session):
                await asyncio.sleep(self._rng.randint(1, 40))
                await queue.give_back(session.id, session.attempt, "no room")
                raise Requeued(f"session {session.id} is back in the queue")
            await self._fetch(session)
            hub, slowest_s = self._hub, 120 if self._chance(faults.late_create) else 15
            if not await self._engine_does(1, slowest_s, lambda: self._created(session, hub)):
                raise LaunchFails(EndCause.LAUNCH_FAILED)
            await asyncio.sleep(self._rng.randint(1, 40))
            handle = f"c{session.id}-{session.attempt}"
            container = self._containers.get(handle)
            if container is None or not container.alive:
                raise LaunchFails(EndCause.LAUNCH_FAILED)
            if self._chance(faults.failed_start):
                raise LaunchFails(EndCause.ISOLATION_FAILED)
            try:
                await queue.running(session.id, session.attempt, handle)
            except InvalidTransition as e:
                if self._get(session.id).state in lifecycle.UP:
                    self._broken = Violation(f"session {session.id} runs, and its launch is told: {e}")
                raise
            self._ran += 1
            self._up[session.id] = None

    async def _fetch(self, session: Session) -> None:
        image = node_of(session), session.request.image
        if image in self._images:
            return
        await self._queue.pulling(session.id, session.attempt)
        late = self._chance(self._faults.late_pull)
        await asyncio.sleep(self._rng.randint(600, 4000) if late else self._rng.randint(3, 120))
        if self._chance(self._faults.failed_pull):
            raise LaunchFails(EndCause.PULL_FAILED)
        self._images[image] = None

    def _created(self, session: Session, hub: int) -> bool:
        if node_of(session) in self._unreachable or self._chance(self._faults.failed_create):
            return False
        handle = f"c{session.id}-{session.attempt}"
        orphan = hub != self._hub
        self._orphans += orphan
        on_gpu = not session.request.on_demand
        self._containers[handle] = Container(
            handle, node_of(session), session.id, session.attempt, True, orphan, on_gpu
        )
        self._say(f"{handle} is up{' as an orphan' if orphan else ''}")
        self._look()
        return True

    # --- Parking ---

    async def _parks(self) -> None:
        # What a Hub that died has asked of an engine is done by then.
        await asyncio.sleep(PROBE_S)
        while True:
            # The session may have ended, and the next round looks again.
            with contextlib.suppress(StoreUnavailable, InvalidTransition):
                await self._park_round()
            await asyncio.sleep(self._rng.choice((1, 5)))

    async def _park_round(self) -> None:
        """Give sessions their GPU memory back that hold their shares, and park one that is due."""
        snapshot = await self._queue.snapshot()
        for session in snapshot.sessions:
            # A Hub that died may have left a running session without its GPU memory.
            if session.state is S.RESUMING or (
                session.state is S.RUNNING and self._is_on_gpu(session) is False
            ):
                await self._restore(session)
        held_mib = {s.id: 1000 * (s.id % 4) for s in snapshot.sessions}
        due = plan_parking(
            snapshot,
            self._rules,
            gpu_idle_since_s=self._idle,
            held_mib=held_mib,
            host_mib={node.id: HOST_MIB for node in snapshot.nodes},
        ).due
        for session in due[:1]:
            if await self._engine_does(0, 3, lambda: self._moves(session, on_gpu=False)):  # noqa: B023
                await self._queue.park(session.id, held_mib[session.id])
                self._say(f"session {session.id} is parked")

    async def _restore(self, session: Session) -> None:
        refused = session.state is S.RESUMING and self._chance(self._faults.failed_restore)
        if not refused and await self._engine_does(0, 3, lambda: self._moves(session, on_gpu=True)):
            if session.state is S.RESUMING:
                await self._queue.resumed(session.id)
                self._say(f"session {session.id} has its GPU back")
        elif refused:
            await self._queue.park(session.id, session.parked_mib, "the driver refused")

    def _is_on_gpu(self, session: Session) -> bool | None:
        container = self._containers.get(f"c{session.id}-{session.attempt}")
        return None if container is None or not container.alive else container.on_gpu

    def _moves(self, session: Session, *, on_gpu: bool) -> bool:
        """Move the GPU memory of a session to its GPU, or to the host; return whether it is there."""
        handle = f"c{session.id}-{session.attempt}"
        container = self._containers.get(handle)
        if container is None or not container.alive or container.node_id in self._unreachable:
            return False
        self._containers[handle] = replace(container, on_gpu=on_gpu)
        self._look()
        return True

    # --- Ending ---

    def _on_end(self, session: Session) -> None:
        # Usually the Hub stops a server itself; otherwise the scheduler does.
        self._say(f"session {session.id} ends: {session.end_cause}")
        if session.id in self._up and session.id not in self._leaving and self._chance(80):
            self._spawn(self._stop(session.id, session.end_cause or EndCause.USER))

    async def _stop(self, session_id: int, cause: EndCause) -> None:
        """End a session, its launch first, and report when nothing of it is left."""
        self._leaving[session_id] = None
        queue = self._queue
        while True:
            try:
                with queue.ending(session_id):
                    session = await queue.end(session_id, cause)
                    launch = self._launches.get(session_id)
                    if launch is not None and not launch.done():
                        launch.cancel()
                        await asyncio.wait([launch])
                    if session.state is S.TERMINATING and await self._engine_stops(session):
                        await queue.gone(session_id)
                return
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)

    async def _engine_stops(self, session: Session) -> bool:
        """Have the engine remove a session's containers; return whether they are known to be gone."""
        if node_of(session) in self._unreachable or self._chance(self._faults.failed_stop):
            await asyncio.sleep(self._rng.randrange(10))
            return False
        return await self._engine_does(1, 8, lambda: self._removed(session))

    def _removed(self, session: Session) -> bool:
        for container in self._standing():
            if container.session_id == session.id:
                self._drop(container.handle)
        return node_of(session) not in self._unreachable

    def _drop(self, handle: str) -> bool:
        """Remove a container if its node answers; return whether it is gone."""
        container = self._containers.get(handle)
        if container is not None and container.node_id not in self._unreachable:
            del self._containers[handle]
            self._say(f"{handle} is removed")
            self._look()
        return handle not in self._containers

    async def _engine_does(self, least_s: float, most_s: float, act: Callable[[], T]) -> T:
        """Have an engine act. It acts even if the Hub dies, and a cancelled caller waits for it."""
        hub, done = self._hub, self._loop.create_future()

        def does() -> None:
            found = act()
            if hub == self._hub:
                done.set_result(found)

        self._elsewhere(least_s, most_s, does)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            # A launch may be cancelled more than once.
            while not done.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            raise
        return done.result()  # type: ignore[no-any-return]

    # --- The launcher and the activity of sessions, for the scheduler ---

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    async def observe(self) -> Seen:
        await asyncio.sleep(self._rng.uniform(0, 3))
        nodes = [node_id for node_id in self._offered if node_id not in self._unreachable]
        found = [
            Observed(
                c.node_id,
                c.session_id,
                c.attempt,
                c.handle,
                c.alive,
                self._causes.get(c.handle, EndCause.EXITED),
            )
            for c in self._standing()
            if c.node_id in nodes
        ]
        self._rng.shuffle(found)
        await asyncio.sleep(self._rng.uniform(0, 3))
        return Seen(found, nodes)

    async def remove(self, observed: Observed) -> bool:
        if self._chance(self._faults.failed_stop):
            await asyncio.sleep(self._rng.randrange(10))
            raise EngineFails("the engine does not answer")
        return await self._engine_does(0, 4, lambda: self._drop(observed.handle))

    async def idle_since(self, sessions: Sequence[Session]) -> Mapping[int, int | None]:
        await asyncio.sleep(self._rng.uniform(0, 1))
        return {session.id: self._idle.get(session.id) for session in sessions}

    # --- The nodes ---

    def _inventory_changes(self) -> None:
        """Remove, close, open, shrink or grow a node."""
        rng, node_id = self._rng, self._rng.choice(sorted(self._whole))
        whole = self._whole[node_id]
        self._offered.pop(node_id, None)
        match rng.randrange(6):
            case 0:
                pass
            case 1:
                self._offered[node_id] = replace(whole, closed=True)
            case 2:
                some = rng.sample(whole.devices, rng.randrange(len(whole.devices) + 1))
                self._offered[node_id] = replace(whole, devices=tuple(d for d in whole.devices if d in some))
            case 3:
                less = tuple(replace(d, memory_mib=d.memory_mib // 2) for d in whole.devices)
                self._offered[node_id] = replace(whole, devices=less)
            case 4:
                self._offered[node_id] = replace(whole, cpu_milli=2000, memory_mib=4096)
            case _:
                self._offered[node_id] = whole
        self._offer()

    def _offer(self) -> None:
        """Tell the Hub the current nodes."""
        self._say(f"the nodes are {list(self._offered.values())}")
        if self._ready:
            self._spawn(self._queue.change_nodes(self._there()))

    # --- Resuming ---

    def _unserved(self) -> list[Session]:
        """Return the sessions that no spawn waits for."""
        early = (S.PENDING, S.SCHEDULED, *lifecycle.LAUNCHING)
        # A Hub does not launch a session that it is stopping.
        taken = {*self._serving, *self._leaving}
        return [s for s in self._snapshot().sessions if s.state in early and s.id not in taken]

    def _resume(self) -> None:
        """A user comes back to a held session."""
        found = self._unserved()
        if found and self._ready:
            self._serve(self._rng.choice(found).id)

    def _logged(self, record: logging.LogRecord) -> bool:
        """Treat an unexpected error in the scheduler's log as a violation, and show nothing of the log."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, StoreUnavailable | EngineFails):
            self._broken = self._broken or Violation(f"{record.getMessage()}: {error!r}")
        return False
