"""Parks idle sessions and brings them back. docs/decisions/0066 has the order of the steps and its reasons.

Parking: the gate closes, so new CUDA calls wait; the driver moves the memory of all processes to the host; NVML shows
that they hold nothing; the state PARKED is committed, which frees the share.

Resuming: the scheduler has committed RESUMING, so the share is held; the driver moves the memory back; the gate opens;
RUNNING is committed.

So a crash at any point leaves no share held twice. A session that is RUNNING with a closed gate is brought back, and
every step can run again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from fgpu_scheduler import (
    MIB,
    Device,
    EndCause,
    FGPUError,
    Queue,
    Session,
    SessionState,
    duration,
    is_asked_for,
    plan_parking,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import Engine
from fgpuspawner.hub.gpu_observers import GpuIdleTimes
from fgpuspawner.hub.session_probes import ProveLimits, account_path
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.gpu_poller import Drivers, GpuSnapshot, running_on
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse
from fgpuspawner.isolation.report import CheckpointReport, checkpoint_command, read_answer
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu.parking")

LOOK_EVERY_S = 0.5
AGAIN_AFTER_S = 600.0
"""After a refusal of the driver, the next try to park or to resume a session comes that much later."""
PROVED_WITHIN_S = 5.0
"""How long the driver may take to show that a parked session holds nothing."""
MIB_A_SECOND = 500
"""A driver that moves memory more slowly than this has failed. On the H100 it moves several GiB a second."""
LEAST_TIME_S = 60
ALONE_FOR_S = 15.0
"""While a session is being parked, others on its node wait at most this long: its own processes can delay it."""
SETTLED_AFTER_S = 5.0
"""A program that an earlier Hub has started in a session has begun its work, and holds its lock, after this time."""
RELEASED_AFTER_S = 30.0
"""A session on demand without a CUDA context gives its slice back after this time."""
UNKNOWN_HELD = "the driver does not tell how much GPU memory it holds"
ROOM_MIB = 64
"""Host memory that the driver takes for a parked process beside the contents of its GPU memory."""


class CannotPark(FGPUError):
    """A session cannot be parked or resumed now; the message says why."""

    code = "cannot_park"


class Parker:
    """Carries out what `core.parking` and the scheduler decide. One for the Hub."""

    def __init__(
        self,
        queue: Queue,
        engine: Engine,
        isolation: Isolation,
        drivers: Drivers,
        idle_times: GpuIdleTimes,
        settings: FGPU,
        *,
        prove: ProveLimits,
        on_moved: Callable[[str, float], None] = lambda way, took_s: None,
    ) -> None:
        self._queue = queue
        self._engine = engine
        self._isolation = isolation
        self._drivers = drivers
        self._idle_times = idle_times
        self._settings = settings
        self._rules = settings.rules()
        self._prove = prove
        self._on_moved = on_moved
        self._busy: dict[int, asyncio.Task[None]] = {}
        #: By session that is being parked, or that a failure left with a closed gate and its raised memory limit: its
        #: node, since when (monotonic seconds), and what goes to the host (MiB).
        self._parking: dict[int, tuple[str, float, int]] = {}
        #: What each session holds of its GPUs by the last snapshot, in MiB, if the driver tells.
        self._held_mib: dict[int, int] = {}
        #: Since when a session on demand holds nothing, in monotonic seconds.
        self._released_s: dict[int, float] = {}
        #: Until when a session that the driver refused is left alone, in monotonic seconds.
        self._refused_until_s: dict[int, float] = {}
        #: The sessions on demand whose limits were in force when they got their GPU first.
        self._proved: set[int] = set()
        #: The parked sessions with a waiting call, as this process has told the scheduler.
        self._wanted: set[int] = set()
        #: The sessions that are due and for which the host's memory has no room.
        self._without_room: set[int] = set()
        #: When each idle session will be parked, if that is soon; UTC seconds by session.
        self.soon: Mapping[int, int] = {}

    def begin(self, background: Background) -> None:
        background.every(
            # With parking turned off, sessions that were parked before still get their GPU back.
            LOOK_EVERY_S if self._settings.parked_memory_mib else SETTLED_AFTER_S,
            self.look,
            failed="Sessions are neither parked nor resumed now",
            first_after_s=SETTLED_AFTER_S,
        )

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        """Note what each session holds of its GPUs."""
        there = running_on(snapshot.devices, live)
        for session in (s for s in live if s.id in there):
            held = held_mib(session, snapshot.devices, snapshot.owners)
            self._held_mib.pop(session.id, None)
            if held is not None:
                self._held_mib[session.id] = held
            if held != 0 or session.state is not SessionState.RUNNING:
                self._released_s.pop(session.id, None)
            else:
                self._released_s.setdefault(session.id, snapshot.at_s)

    async def look(self) -> None:
        """Begin what is due: each session has at most one task."""
        world = await self._queue.snapshot()
        live = {s.id: s for s in world.sessions}
        self._forget(live)
        now_s = time.monotonic()
        free = [s for s in world.sessions if s.id not in self._busy]
        asked = [s for s in free if s.state is SessionState.RUNNING and is_asked_for(s, world.now_s)]
        settled = [s for s in free if self._refused_until_s.get(s.id, 0.0) <= now_s]
        closed = await asyncio.to_thread(self._with_closed_gate, settled)
        for session in settled:
            match session.state:
                case SessionState.RESUMING:
                    self._begin(session, self._resume(session))
                case SessionState.PARKED:
                    await self._note_wanted(session)
                case SessionState.RUNNING if session.id in closed:
                    assert session.placement is not None
                    # How much an earlier Hub has moved is unknown: at most its shares.
                    most_mib = sum(share.memory_mib for share in session.placement.shares)
                    self._begin(session, self._repair(session, most_mib))
        idle_since_s = {s.id: self._idle_times.idle_since_s(s.id) for s in settled}
        plan = plan_parking(
            world,
            self._rules,
            gpu_idle_since_s={i: since_s for i, since_s in idle_since_s.items() if since_s is not None},
            held_mib=self._parkable_mib({s.id: s for s in (*settled, *asked)}.values()),
            host_mib={node.id: self._host_mib(node.id) for node in world.nodes},
        )
        self.soon = plan.soon
        self._log_no_room(plan.no_room)
        for session in asked:
            why = self._isolation.parks(session) or plan.no_room.get(session.id)
            # A new Hub knows it after a while.
            waited_s = world.now_s - (session.park_asked_at_s or 0)
            if why is None and session.id not in self._held_mib and waited_s >= LEAST_TIME_S:
                why = UNKNOWN_HELD
            if why is not None:
                await self._queue.refuse_to_park(session.id, why)
        released = [s for s in settled if self._has_released(s)]
        for session in (*released, *plan.due):
            # One after the other on each node: the first may be enough for the sessions that wait.
            where = session.placement
            if where is None or session.id in self._busy:
                continue
            node_id, moving = (
                where.node_id,
                [one for one in self._parking.values() if one[0] == where.node_id],
            )
            if all(now_s - since_s >= ALONE_FOR_S for _, since_s, _ in moving):
                there = (s for s in world.sessions if s.placement and s.placement.node_id == node_id)
                left_mib = self._host_mib(node_id) - sum(s.parked_mib for s in there)
                self._parking[session.id] = node_id, now_s, 0
                self._begin(session, self._park(session, 0 if session in released else left_mib))

    async def done(self) -> None:
        """Wait for all tasks, for tests."""
        while self._busy:
            await asyncio.wait(tuple(self._busy.values()))

    # -- what is due --------------------------------------------------------------------------------------

    def _forget(self, live: Mapping[int, Session]) -> None:
        for known in (self._held_mib, self._released_s, self._refused_until_s):
            for session_id in known.keys() - live.keys():
                del known[session_id]
        self._parking = {i: moving for i, moving in self._parking.items() if i in live or i in self._busy}
        self._wanted &= live.keys()
        self._proved &= live.keys()

    def _host_mib(self, node_id: str) -> int:
        """Return the host memory for the parked sessions of a node, without what goes there now."""
        return self._settings.parked_memory_mib - sum(
            mib for node, _, mib in self._parking.values() if node == node_id
        )

    def _parkable_mib(self, sessions: Iterable[Session]) -> Mapping[int, int]:
        return {
            s.id: self._held_mib[s.id]
            for s in sessions
            if s.id in self._held_mib and self._isolation.parks(s) is None
        }

    def _has_released(self, session: Session) -> bool:
        """Return whether a session on demand has had no CUDA context for a while."""
        since_s = self._released_s.get(session.id)
        return (
            session.request.on_demand
            and session.state is SessionState.RUNNING
            and since_s is not None
            and time.monotonic() - since_s >= RELEASED_AFTER_S
            and self._isolation.parks(session) is None
        )

    async def _note_wanted(self, session: Session) -> None:
        """Tell the scheduler whether a CUDA call of a parked session waits."""
        calls = await asyncio.to_thread(self._isolation.gpu_is_wanted, session.id)
        if calls and session.wanted_at_s is None:
            self._wanted.add(session.id)
            await self._queue.want(session.id, True)
        elif not calls and session.id in self._wanted:
            # The cell was stopped. A wish of its owner, which this process has not told, stays.
            self._wanted.discard(session.id)
            await self._queue.want(session.id, False)

    def _with_closed_gate(self, sessions: Sequence[Session]) -> frozenset[int]:
        """Return the running sessions on this machine with a closed gate. Blocks."""
        return frozenset(
            s.id
            for s in sessions
            if s.state is SessionState.RUNNING
            and s.placement is not None
            and not self._isolation.is_elsewhere(s.placement.node_id)
            and limits.gate_closed(self._isolation.folder(s.id))
        )

    def _log_no_room(self, found: Mapping[int, str]) -> None:
        """Log once for each session why the host's memory has no room for it."""
        for session_id in found.keys() - self._without_room:
            log.warning("Session %d is not parked: %s", session_id, found[session_id])
        self._without_room = set(found)

    def _begin(self, session: Session, step: Coroutine[Any, Any, None]) -> None:
        self._busy[session.id] = asyncio.create_task(self._guarded(session, step))

    async def _guarded(self, session: Session, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except Exception as e:
            foreseen = isinstance(e, FGPUError | OSError)
            self._refused_until_s[session.id] = time.monotonic() + LEAST_TIME_S
            log.warning(
                "Session %d is left as it is, trying on: %s", session.id, e, exc_info=None if foreseen else e
            )
        finally:
            del self._busy[session.id]

    # -- the steps ----------------------------------------------------------------------------------------

    async def _park(self, session: Session, most_mib: int) -> None:
        """Park a session that holds at most ``most_mib``: it may have taken more since it was measured."""
        began_s, held = time.monotonic(), None
        await asyncio.to_thread(self._isolation.close_gate, session.id)
        try:
            held = await self._held_now(session)
            if held is None:
                raise CannotPark(UNKNOWN_HELD)
            if held > most_mib:
                raise CannotPark(f"it holds {held} MiB of GPU memory by now, more than {most_mib} MiB")
            node_id, since_s, _ = self._parking[session.id]
            self._parking[session.id] = node_id, since_s, held
            # The driver keeps the contents in the memory of the session's own processes.
            await self._engine.set_memory(session, session.request.memory_mib + held + ROOM_MIB)
            await self._checkpoint(session, "park", held)
            await self._check_nothing_held(session)
        except (FGPUError, OSError, TimeoutError) as e:
            self._refused_until_s[session.id] = time.monotonic() + AGAIN_AFTER_S
            log.warning(
                "Session %d cannot be parked, next try in %s: %s", session.id, duration(int(AGAIN_AFTER_S)), e
            )
            try:
                await self._repair(session, held or 0)
            finally:
                if session.park_asked_at_s is not None:
                    await self._queue.refuse_to_park(session.id, failure_words(e)[:500])
            return
        await self._queue.park(session.id, held)
        self._parking.pop(session.id, None)
        took_s = time.monotonic() - began_s
        self._on_moved("parked", took_s)
        log.info("Session %d is parked: %d MiB in %.1f s", session.id, held, took_s)

    async def _resume(self, session: Session) -> None:
        began_s = time.monotonic()
        try:
            await self._checkpoint(session, "resume", session.parked_mib)
        except (FGPUError, OSError, TimeoutError) as e:
            self._refused_until_s[session.id] = time.monotonic() + LEAST_TIME_S
            log.warning("Session %d cannot get its GPU back now: %s", session.id, e)
            # What was done may be unknown, or an earlier Hub's: with memory on the GPU the session keeps its share.
            await asyncio.to_thread(self._isolation.close_gate, session.id)
            await self._check_nothing_held(session)
            words = (
                f"the GPU could not be given back ({failure_words(e)}); it is tried again in {LEAST_TIME_S} s"
            )
            await self._queue.park(session.id, session.parked_mib, words[:500])
            self._wanted.discard(session.id)
            return
        await self._open(session)
        if session.request.on_demand and session.id not in self._proved:
            # It was not verified at its start, because the proof needs the GPU.
            held_to = await asyncio.to_thread(limits.read, self._isolation.folder(session.id))
            # Twice: on a busy machine the proof may not end in time, and the session's variables would be lost.
            problems = await self._prove(session, held_to) and await self._prove(session, held_to)
            if problems:
                message = f"the limits of its GPU were not in force ({problems[0][:200]})"
                await self._queue.end(session.id, EndCause.ISOLATION_FAILED, message)
                return
            self._proved.add(session.id)
        await self._queue.resumed(session.id)
        self._wanted.discard(session.id)
        took_s = time.monotonic() - began_s
        self._on_moved("resumed", took_s)
        log.info("Session %d has its GPU back after %.1f s", session.id, took_s)

    async def _repair(self, session: Session, mib: int) -> None:
        """Bring back a session that holds its share, after a refusal or a crash of the Hub, with at most ``mib``."""
        try:
            await self._checkpoint(session, "resume", mib)
            await self._open(session)
        except BaseException:
            assert session.placement is not None
            # Its memory may be on the host still. No other session has to wait for it.
            self._parking.setdefault(session.id, (session.placement.node_id, 0.0, mib))
            raise

    async def _open(self, session: Session) -> None:
        # The gate comes last: while it is closed, a crash or a failure before has all of this done again.
        await self._engine.set_memory(session, session.request.memory_mib)
        await asyncio.to_thread(self._isolation.open_gate, session)
        self._parking.pop(session.id, None)

    async def _checkpoint(self, session: Session, what: str, mib: int) -> None:
        """Have the driver move the memory of all processes of a session.

        Raises:
            CannotPark: a process refused; all are as before.
            BadReport, LaunchFailed, EngineSilent: it is unknown what was done; the step can run again.
        """
        if what == "resume":
            await self._wait_for_room(session, mib)
        timeout_s = LEAST_TIME_S + mib // MIB_A_SECOND
        nonce, account = secrets.token_hex(16), account_path(self._engine, self._isolation, session.id)
        command = checkpoint_command(nonce, account, what, timeout_s=timeout_s)
        async with asyncio.timeout(timeout_s + LEAST_TIME_S):
            answer = await self._engine.probe(session, command, environment={}, timeout_s=timeout_s)
        report = read_answer(CheckpointReport, answer, nonce)
        if not report.done:
            raise CannotPark(report.why or "the driver refused")

    async def _check_nothing_held(self, session: Session) -> None:
        """Return when the host's driver shows that no process of the session holds memory of its GPUs.

        What the session's own program says is not believed.
        """
        until_s = time.monotonic() + PROVED_WITHIN_S
        while (held := await self._held_now(session)) != 0:
            if time.monotonic() > until_s:
                known = "an unknown amount" if held is None else f"{held} MiB"
                raise CannotPark(f"the driver still shows {known} of GPU memory")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _wait_for_room(self, session: Session, mib: int) -> None:
        """Return when the session's GPUs have room for the memory that comes back.

        After one restore without room, driver 580 can never restore that process (NVIDIA/cuda-checkpoint issue 44).
        """
        until_s = time.monotonic() + PROVED_WITHIN_S
        while not (
            mib == 0
            or has_room(session, mib, self._isolation.devices_of(session), *await self._uses(session))
        ):
            if time.monotonic() > until_s:
                raise CannotPark("other processes hold the memory of its GPU")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _held_now(self, session: Session) -> int | None:
        """Ask the host's driver what a session holds of its GPUs, in MiB; None if it does not tell."""
        return held_mib(session, *await self._uses(session))

    async def _uses(self, session: Session) -> tuple[Mapping[str, DeviceUse | str], Mapping[int, int]]:
        """Ask the host's driver for the use of a session's GPUs, and for the session of each process."""
        own = {d.uuid for d in self._isolation.devices_of(session)}
        for source, uuids in self._drivers.sources().items():
            if own.issubset(uuids):
                uses = await asyncio.to_thread(self._drivers.reader(source).device_uses, sorted(own), {})
                pids = {p.pid for use in uses.values() if isinstance(use, DeviceUse) for p in use.processes}
                return uses, await asyncio.to_thread(self._drivers.owners, source, sorted(pids))
        return {}, {}


def failure_words(failure: Exception) -> str:
    """Return for a session's owner why it was not parked or resumed. Errors of the machine can name its files."""
    if isinstance(failure, TimeoutError):
        return "its machine did not do it in time"
    return "its machine failed; the Hub's log says why" if isinstance(failure, OSError) else str(failure)


def has_room(
    session: Session,
    mib: int,
    devices: Sequence[Device],
    uses: Mapping[str, DeviceUse | str],
    owners: Mapping[int, int],
) -> bool:
    """Return whether a session's GPUs have room for ``mib`` of its memory, at most its share of each. Pure.

    An unknown use is no room.
    """
    assert session.placement is not None
    shares = {share.device_uuid: share.memory_mib for share in session.placement.shares}
    for device in devices:
        use = uses.get(device.uuid)
        if not isinstance(use, DeviceUse):
            return False
        others = [p.used_bytes for p in use.processes if owners.get(p.pid) != session.id]
        if any(used is None for used in others):
            return False
        if sum(filter(None, others)) + min(mib, shares[device.uuid]) * MIB > device.memory_mib * MIB:
            return False
    return True


def held_mib(
    session: Session, devices: Mapping[str, DeviceUse | str], owners: Mapping[int, int]
) -> int | None:
    """Return what a session's processes hold of its GPUs, in MiB; None if the driver does not tell. Pure."""
    assert session.placement is not None
    total = 0
    for share in session.placement.shares:
        use = devices.get(share.device_uuid)
        if not isinstance(use, DeviceUse):
            return None
        for process in use.processes:
            if owners.get(process.pid) == session.id:
                if process.used_bytes is None:
                    return None
                total += process.used_bytes
    return -(-total // MIB)
