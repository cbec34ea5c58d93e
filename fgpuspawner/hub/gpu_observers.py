"""What the Hub learns about GPUs: their health, how long sessions leave them unused, the memory of kernel code."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fgpu_scheduler import MIB, Clock, FGPUError, Session
from fgpuspawner.concurrency.background import Background
from fgpuspawner.hub.compute_watch import WATCHED, Ask
from fgpuspawner.hub.watchdog import launched_with
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.gpu_poller import (
    LONGEST_PAUSE,
    LONGEST_SNAPSHOT_S,
    Drivers,
    GpuSnapshot,
    NvmlSource,
    running_on,
)
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse
from fgpuspawner.isolation.report import SlotReport
from fgpuspawner.meter.gpu_health import HEALTH, GpuHealth, GpuHealthState, health_of

log = logging.getLogger("fgpu.isolation")

HEALTH_EVERY_S = 20
FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0
"""Between two questions about the same processes; the first wait doubles up to it."""
COUNT_AGAIN_S = 0.5
"""The driver counts again this soon after libfgpu's account was read."""
SLACK_MIB = 16
"""A process that holds less than this beyond its charge has it from rounding."""
MOST_PROCESSES = 256
"""Processes of one session that are asked for: those that hold the most memory."""

Used = Mapping[int, int]
"""Bytes of a device, by the process's number in its session."""


class GpuHealthWatch:
    """Reads the health of every GPU, also of unused ones, and writes it for the service."""

    def __init__(self, drivers: Drivers, clock: Clock, *, data: Path) -> None:
        self._drivers, self._clock, self._data = drivers, clock, data
        # Xid errors from before a restart of the Hub have been reported already.
        self._known: Mapping[str, GpuHealth] = HEALTH.read(data).devices

    def begin(self, background: Background) -> None:
        background.every(HEALTH_EVERY_S, self.look, failed="The health of the GPUs could not be read")

    async def look(self) -> None:
        """Ask every driver once, concurrently, so that one that hangs delays no other."""
        sources = {p: uuids for p, uuids in self._drivers.sources().items() if not p.has_no_driver}
        answers = await asyncio.gather(*(self._health(source, uuids) for source, uuids in sources.items()))
        self._known = {
            uuid: health.after(self._known.get(uuid)) for found in answers for uuid, health in found.items()
        }
        await asyncio.to_thread(HEALTH.write, self._data, GpuHealthState(self._known))

    async def _health(self, source: NvmlSource, uuids: list[str]) -> dict[str, GpuHealth]:
        now_s = self._clock.now_s()
        try:
            reader = await asyncio.to_thread(self._drivers.reader, source)
            answer = await reader.ask({"do": "health", "uuids": sorted(uuids)})
            return {uuid: health_of(answer["devices"][uuid], now_s) for uuid in uuids}
        except (FGPUError, OSError) as e:
            trouble = str(e)
        except (KeyError, TypeError, ValueError) as e:
            trouble = f"an answer that makes no sense ({e!r})"
        return {uuid: GpuHealth(now_s, trouble=trouble) for uuid in uuids}


def is_idle(session: Session, snapshot: GpuSnapshot) -> bool:
    """Return whether none of a session's processes has used any of its devices. Pure.

    Simulated GPUs without a driver are always idle. A device without figures does not count as idle, because no
    session may be ended for unknown use.
    """
    assert session.placement is not None
    own = [snapshot.devices.get(share.device_uuid) for share in session.placement.shares]
    return snapshot.source.has_no_driver or all(
        isinstance(device, DeviceUse)
        and all(p.busy_percent == 0 for p in device.processes if snapshot.owners.get(p.pid) == session.id)
        for device in own
    )


class GpuIdleTimes:
    """Keeps since when each session has not used its GPUs, according to the driver."""

    def __init__(self, clock: Clock, *, every_s: float) -> None:
        self._clock = clock
        self._known_for_s = (LONGEST_PAUSE + 1) * every_s + LONGEST_SNAPSHOT_S
        #: By session: idle since (UTC seconds), and the monotonic time of the last snapshot that showed it.
        self._since: dict[int, tuple[int, float]] = {}

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        there = running_on(snapshot.devices, live)
        idle = {s.id for s in live if s.id in there and is_idle(s, snapshot)}
        known = {s.id for s in live} - there | idle
        self._since = {i: since for i, since in self._since.items() if i in known}
        for session_id in idle:
            since_s = self.idle_since_s(session_id)
            self._since[session_id] = (self._clock.now_s() if since_s is None else since_s, snapshot.at_s)

    def idle_since_s(self, session_id: int) -> int | None:
        """Return since when a session's GPUs are idle; None if they are not, or the last snapshot is old."""
        since_s, seen_at_s = self._since.get(session_id, (None, 0.0))
        return since_s if time.monotonic() - seen_at_s <= self._known_for_s else None


def code_by_process(used: Sequence[Used], slots: SlotReport, *, device: int) -> dict[int, int]:
    """Return the MiB that each process holds beyond its charge, without those within `SLACK_MIB`. Pure.

    ``used`` has what the driver counted before and after libfgpu's account was read. The smaller counts: memory that
    was taken or freed in between is no code. ``device`` is its index in the limits.
    """
    charged = {row[0]: row[1 + device] for row in slots.amounts if len(row) > 1 + device}
    least = {pid: min(one[pid] for one in used) for pid in set(used[0]).intersection(*used)}
    found = {pid: -(-(held - charged.get(pid, 0)) // MIB) for pid, held in least.items()}
    return {pid: mib for pid, mib in found.items() if mib > SLACK_MIB}


class CodeMemoryWatch:
    """Charges sessions for the code of kernels: what the driver counts for their processes beyond libfgpu's charge.

    It asks for libfgpu's account after a process began and then ever more seldom. What a device or an answer does not
    tell stays as it was last known, also after a restart of the Hub: the figures are in the limits files.
    """

    def __init__(
        self, isolation: Isolation, ask: Ask, *, snapshot_soon: Callable[[NvmlSource, float], None]
    ) -> None:
        self._isolation = isolation
        self._ask = ask
        self._snapshot_soon = snapshot_soon
        self._known: dict[int, dict[str, dict[int, int]]] = {}
        """The code of each process, by session and device."""
        self._seen: dict[int, frozenset[int]] = {}
        """The processes that a session was last asked for."""
        self._due: dict[int, tuple[float, float]] = {}
        """When a session is asked again, and the wait after that."""
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, tuple[Mapping[str, Used], SlotReport, Sequence[str]]] = {}
        """What the driver counted, libfgpu's account after that, and the order of its devices."""

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        """Charge what is known now, and ask the sessions that are due, concurrently."""
        ids = {s.id for s in live}
        for table in (self._known, self._seen, self._due, self._answers):
            for session_id in table.keys() - ids:
                del table[session_id]
        there = running_on(snapshot.devices, live)
        for session in live:
            if session.id in there and launched_with(session) in WATCHED:
                used = self._used(snapshot, session)
                if used is not None:
                    await self._charge(session, used)
                    self._ask_if_due(session, snapshot, used)

    def _used(self, snapshot: GpuSnapshot, session: Session) -> dict[str, Used] | None:
        """Return what the session's processes hold of each device; None if the driver does not tell all of it."""
        found: dict[str, Used] = {}
        for uuid in {d.uuid for d in self._isolation.devices_of(session)}:
            use = snapshot.devices.get(uuid)
            if not isinstance(use, DeviceUse):
                return None
            own = [p for p in use.processes if snapshot.owners.get(p.pid) == session.id]
            if any(p.used_bytes is None for p in own):
                return None
            found[uuid] = {p.inner_pid: p.used_bytes for p in own if p.used_bytes}
        return found

    async def _charge(self, session: Session, used: Mapping[str, Used]) -> None:
        """Charge what a finished question found, without processes that have ended."""
        before, answer = self._known.get(session.id), self._answers.pop(session.id, None)
        if answer is not None:
            held, slots, order = answer
            self._known[session.id] = {
                uuid: code_by_process((held[uuid], used[uuid]), slots, device=order.index(uuid))
                for uuid in held.keys() & used.keys() & set(order)
            }
        elif before is not None or not any(used.values()):
            self._known[session.id] = {
                uuid: {pid: mib for pid, mib in (before or {}).get(uuid, {}).items() if pid in own}
                for uuid, own in used.items()
            }
        known = self._known.get(session.id)
        if known is None or known == before:
            return
        counted = {uuid: sum(own.values()) for uuid, own in known.items()}
        try:
            await asyncio.to_thread(self._isolation.charge_code, session.id, counted)
        except (FGPUError, OSError) as e:
            self._known.pop(session.id)
            log.warning("The code of session %d's kernels could not be charged: %s", session.id, e)

    def _ask_if_due(self, session: Session, snapshot: GpuSnapshot, used: Mapping[str, Used]) -> None:
        amounts = {pid: held for own in used.values() for pid, held in own.items()}
        due_at_s, wait_s = self._due.get(session.id, (0.0, FIRST_WAIT_S))
        # A parked session's processes come back, and are asked for again.
        seen = self._seen[session.id] = self._seen.get(session.id, frozenset()) & amounts.keys()
        is_new = bool(amounts.keys() - seen)
        if not amounts or session.id in self._asking or not (is_new or snapshot.at_s >= due_at_s):
            return
        wait_s = FIRST_WAIT_S if is_new else wait_s
        self._due[session.id] = snapshot.at_s + wait_s, min(2 * wait_s, LONGEST_WAIT_S)
        self._seen[session.id] = frozenset(amounts)
        asked = sorted(amounts, key=lambda pid: -amounts[pid])[:MOST_PROCESSES]
        self._asking[session.id] = asyncio.create_task(self._ask_for(session, snapshot.source, used, asked))

    async def _ask_for(
        self, session: Session, source: NvmlSource, used: Mapping[str, Used], asked: Sequence[int]
    ) -> None:
        try:
            slots = await self._ask(session, asked)
            held = {uuid: {pid: own[pid] for pid in own if pid in asked} for uuid, own in used.items()}
            now = await asyncio.to_thread(limits.read, self._isolation.folder(session.id))
            self._answers[session.id] = held, slots, [limit.uuid for limit in now.devices]
            self._snapshot_soon(source, COUNT_AGAIN_S)
        except (FGPUError, OSError) as e:
            log.info("The code of session %d's kernels could not be counted: %s", session.id, e)
        finally:
            del self._asking[session.id]
