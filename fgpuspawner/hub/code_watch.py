"""Learns what an image's kernel code takes: the memory that the driver counts for a process beyond libfgpu's charge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from fgpu_scheduler import FGPUError, Session
from fgpuspawner.hub.compute_watch import WATCHED, Ask
from fgpuspawner.hub.watchdog import launched_with
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.gpu_poller import GpuSnapshot, running_on
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse
from fgpuspawner.isolation.report import SlotReport

log = logging.getLogger("fgpu.isolation")

MIB = 2**20
FIRST_AFTER_S = 120.0
"""Earlier a program has hardly loaded all its code."""
EVERY_S = 1800.0
MOST_PROCESSES = 32
"""Processes of one session that are asked for: those that hold most."""

Used = Mapping[int, int]
"""Bytes of a device, by the process's number in its session."""


def beyond_mib(used: Used, slots: SlotReport, *, device: int, code_mib: int) -> int | None:
    """Return the most that a process holds beyond its charge, in MiB; None if no process is charged. Pure.

    ``device`` is its index in the limits. ``code_mib`` is the part of the charge that is for code.
    """
    charged = {row[0]: row[1 + device] for row in slots.amounts if len(row) > 1 + device and row[1 + device]}
    found = [-(-(used[pid] - charged[pid]) // MIB) + code_mib for pid in used.keys() & charged.keys()]
    return max(found, default=None)


class CodeWatch:
    """Observes snapshots, and now and then asks a session what libfgpu has charged. It only learns."""

    def __init__(self, isolation: Isolation, ask: Ask) -> None:
        self._isolation = isolation
        self._ask = ask
        self._due_at_s: dict[int, float] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        """Ask the sessions that are due, concurrently."""
        self._due_at_s = {s.id: self._due_at_s[s.id] for s in live if s.id in self._due_at_s}
        there = running_on(snapshot.devices, live)
        code = self._isolation.host.code
        if code is None or not code.learns:
            return
        for session in live:
            if session.id not in there or launched_with(session) not in WATCHED:
                continue
            used = self._used(snapshot, session)
            due_at_s = self._due_at_s.setdefault(session.id, snapshot.at_s + FIRST_AFTER_S)
            if used and snapshot.at_s >= due_at_s and session.id not in self._asking:
                self._due_at_s[session.id] = snapshot.at_s + EVERY_S
                self._asking[session.id] = asyncio.create_task(self._look_closer(session, used))

    def _used(self, snapshot: GpuSnapshot, session: Session) -> dict[str, Used]:
        """Return what the session's processes hold of each device, where the driver tells."""
        own_devices = {d.uuid for d in self._isolation.devices_of(session)}
        found: dict[str, Used] = {}
        for uuid, use in snapshot.devices.items():
            own = {
                p.inner_pid: p.used_bytes
                for p in (use.processes if uuid in own_devices and isinstance(use, DeviceUse) else ())
                if snapshot.owners.get(p.pid) == session.id and p.used_bytes
            }
            if own:
                found[uuid] = own
        return found

    async def _look_closer(self, session: Session, used: Mapping[str, Used]) -> None:
        try:
            amounts = {pid: held for own in used.values() for pid, held in own.items()}
            asked = sorted(amounts, key=lambda pid: -amounts[pid])[:MOST_PROCESSES]
            slots = await self._ask(session, asked)
            await asyncio.to_thread(self._learn, session, used, slots)
        except (FGPUError, OSError) as e:
            log.info("What the code of session %d takes could not be learnt: %s", session.id, e)
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
