"""What the Hub learns about GPUs: their health, how long sessions leave them unused, the memory of kernel code."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fgpu_scheduler import Clock, FGPUError, Session
from fgpuspawner.concurrency.background import Background
from fgpuspawner.hub.compute_watch import WATCHED, Ask
from fgpuspawner.hub.watchdog import MIB, launched_with
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
LEARN_AFTER_S = 120.0
"""Earlier a program has hardly loaded all its code."""
LEARN_EVERY_S = 1800.0
MOST_PROCESSES = 32
"""Processes of one session to learn from: those that hold the most memory."""

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


def beyond_mib(used: Used, slots: SlotReport, *, device: int, code_mib: int) -> int | None:
    """Return the most that a process holds beyond its charge, in MiB; None if no process is charged. Pure.

    ``device`` is its index in the limits. ``code_mib`` is the part of the charge that is for code.
    """
    charged = {row[0]: row[1 + device] for row in slots.amounts if len(row) > 1 + device and row[1 + device]}
    found = [-(-(used[pid] - charged[pid]) // MIB) + code_mib for pid in used.keys() & charged.keys()]
    return max(found, default=None)


class CodeMemoryWatch:
    """Learns the memory of an image's kernel code: what the driver counts for a process beyond libfgpu's charge.

    Now and then it asks a session for that charge. It changes nothing in the session.
    """

    def __init__(self, isolation: Isolation, ask: Ask) -> None:
        self._isolation = isolation
        self._ask = ask
        self._due_at_s: dict[int, float] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        """Ask the sessions that are due, concurrently."""
        self._due_at_s = {s.id: self._due_at_s[s.id] for s in live if s.id in self._due_at_s}
        code = self._isolation.host.code
        if code is None or not code.learns:
            return
        there = running_on(snapshot.devices, live)
        for session in live:
            if session.id not in there or launched_with(session) not in WATCHED:
                continue
            used = self._used(snapshot, session)
            due_at_s = self._due_at_s.setdefault(session.id, snapshot.at_s + LEARN_AFTER_S)
            if used and snapshot.at_s >= due_at_s and session.id not in self._asking:
                self._due_at_s[session.id] = snapshot.at_s + LEARN_EVERY_S
                self._asking[session.id] = asyncio.create_task(self._ask_and_learn(session, used))

    def _used(self, snapshot: GpuSnapshot, session: Session) -> dict[str, Used]:
        """Return what the session's processes hold of each device, if the driver reports it."""
        found: dict[str, Used] = {}
        for uuid in {d.uuid for d in self._isolation.devices_of(session)}:
            use = snapshot.devices.get(uuid)
            own = {
                p.inner_pid: p.used_bytes
                for p in (use.processes if isinstance(use, DeviceUse) else ())
                if snapshot.owners.get(p.pid) == session.id and p.used_bytes
            }
            if own:
                found[uuid] = own
        return found

    async def _ask_and_learn(self, session: Session, used: Mapping[str, Used]) -> None:
        try:
            amounts = {pid: held for own in used.values() for pid, held in own.items()}
            asked = sorted(amounts, key=lambda pid: -amounts[pid])[:MOST_PROCESSES]
            slots = await self._ask(session, asked)
            await asyncio.to_thread(self._learn, session, used, slots)
        except (FGPUError, OSError) as e:
            log.info("The memory of session %d's kernel code could not be learnt: %s", session.id, e)
        finally:
            del self._asking[session.id]

    def _learn(self, session: Session, used: Mapping[str, Used], slots: SlotReport) -> None:
        host, code = self._isolation.host, self._isolation.host.code
        models = {d.uuid: d.model for d in self._isolation.devices_of(session)}
        for index, limit in enumerate(limits.read(self._isolation.folder(session.id)).devices):
            if limit.uuid in used and limit.uuid in models:
                code_mib = max(0, limit.context_mib - host.context_mib.get(limit.uuid, 0))
                found = beyond_mib(used[limit.uuid], slots, device=index, code_mib=code_mib)
                if found is not None and code is not None:
                    request = session.request
                    code.learn(host.gpu_name(models[limit.uuid]), request.image, request.user, max(0, found))
