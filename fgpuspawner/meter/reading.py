"""Turns the driver's figures of processes into what a session holds, uses, lends and borrows. Pure.

Unknown values are None with a reason, never 0. libfgpu counts lent compute too, but in a file of the session that the
host cannot trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fgpu_scheduler import MIB, Device, Session
from fgpuspawner.isolation.nvml_reader import DeviceUse
from fgpuspawner.meter.model import MOST_PROCESSES, Process


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """A snapshot of one device with the owners of its processes. ``energy_mj`` is since the last snapshot."""

    use: DeviceUse
    owners: Mapping[int, int]
    energy_mj: int | None = None


@dataclass(frozen=True, slots=True)
class SessionReading:
    """What is known of a session in one snapshot."""

    memory_mib: int | None
    sm_percent: float | None
    processes: tuple[Process, ...] = ()
    energy_mj: int | None = None
    energy_estimated: bool = False
    trouble: str | None = None
    context_mib: int | None = None


def read(
    session: Session,
    seen: Mapping[str, DeviceReading | str],
    devices: Mapping[str, Device],
    charged_mib: Mapping[str, int] = MappingProxyType({}),
    code_mib: Mapping[str, int] = MappingProxyType({}),
) -> SessionReading:
    """Return what a placed session holds and uses, summed over its devices.

    ``seen`` has each device's reading, or why there is none. ``charged_mib`` is what each process's context is charged
    there, ``code_mib`` what the code of all their kernels is.
    """
    assert session.placement is not None
    memory, contexts, sm, troubles = 0, 0, 0.0, []
    knows_memory = knows_sm = True
    energy: int | None = 0
    estimated = False
    held: dict[int, tuple[str | None, int | None]] = {}
    for share in session.placement.shares:
        uuid = share.device_uuid
        device = seen.get(uuid, "this GPU is no longer configured")
        if isinstance(device, str):
            troubles.append(f"GPU {uuid}: {device}")
            knows_memory = knows_sm = False
            energy = None
            continue
        own = [p for p in device.use.processes if device.owners.get(p.pid) == session.id]
        for process in own:
            name, before = held.get(process.inner_pid, (process.name, 0))
            amount = None if process.used_bytes is None or before is None else before + process.used_bytes
            held[process.inner_pid] = name, amount
        if any(p.used_bytes is None for p in own):
            troubles.append(f"GPU {uuid}: the driver does not tell what each process holds")
            knows_memory = False
        if any(p.sm_percent is None for p in own):
            troubles.append(f"GPU {uuid}: the driver does not tell how much each process computes")
            knows_sm = False
        memory += sum(p.used_bytes or 0 for p in own)
        contexts += sum(min(charged_mib.get(uuid, 0) * MIB, p.used_bytes or 0) for p in own)
        contexts += code_mib.get(uuid, 0) * MIB
        sm += min(100.0, sum(p.sm_percent or 0.0 for p in own))
        part, is_estimate = _energy(session.id, device, share.fgpu_milli, devices.get(uuid))
        energy = None if energy is None or part is None else energy + part
        estimated = estimated or is_estimate
    most = sorted(held.items(), key=lambda item: (-(item[1][1] or 0), item[0]))[:MOST_PROCESSES]
    return SessionReading(
        -(-memory // MIB) if knows_memory else None,
        round(sm, 1) if knows_sm else None,
        tuple(Process(pid, name, None if used is None else -(-used // MIB)) for pid, (name, used) in most),
        energy,
        estimated and energy is not None,
        "; ".join(troubles) or None,
        contexts // MIB or None if knows_memory else None,
    )


def _energy(
    session_id: int, seen: DeviceReading, fgpu_milli: int, device: Device | None
) -> tuple[int | None, bool]:
    """Return a session's part of a device's energy since the last snapshot, and whether it is an estimate.

    A session with the whole GPU gets all of it. On a shared GPU only the sum is known: it is divided by compute, or by
    shares while no session computes.
    """
    if seen.energy_mj is None or device is None:
        return None, False
    if fgpu_milli >= device.capacity_milli:
        return seen.energy_mj, False
    percents = [p.sm_percent for p in seen.use.processes]
    total = sum(p for p in percents if p is not None)
    if total and None not in percents:
        own = sum(p.sm_percent or 0.0 for p in seen.use.processes if seen.owners.get(p.pid) == session_id)
        return round(seen.energy_mj * own / total), True
    return seen.energy_mj * fgpu_milli // device.capacity_milli, True


def shares_of(sessions: Iterable[Session], uuid: str) -> dict[int, int]:
    """Return the compute share, in percent, of each session on a device."""
    return {
        s.id: share.compute_percent
        for s in sessions
        if s.placement is not None
        for share in s.placement.shares
        if share.device_uuid == uuid
    }


def computed_by_session(seen: DeviceReading) -> dict[int, float] | None:
    """Return how much of a device each session computed; None if unknown for any process."""
    found: dict[int, float] = {}
    for process in seen.use.processes:
        session_id = seen.owners.get(process.pid)
        if process.sm_percent is None:
            return None
        if session_id is not None:
            found[session_id] = min(100.0, found.get(session_id, 0.0) + process.sm_percent)
    return found


@dataclass(frozen=True, slots=True)
class Lent:
    """Percent of a GPU: what a session computed, what of it exceeded its share, what others used of its share."""

    received: float
    borrowed: float
    lent: float

    def __add__(self, other: Lent) -> Lent:
        return Lent(self.received + other.received, self.borrowed + other.borrowed, self.lent + other.lent)


def lent_on(
    shares: Mapping[int, int], lend: Mapping[int, int], computed: Mapping[int, float]
) -> dict[int, Lent]:
    """Return what each session that lends on a device received and gave, by the shares of all sessions there.

    ``lend`` has the lenders' shares, ``computed`` what each session computed. Borrowed compute is attributed to lenders
    and to free capacity in proportion to their idle parts.
    """
    had = {i: computed.get(i, 0.0) for i in lend}
    borrowed = {i: max(0.0, had[i] - share) for i, share in lend.items()}
    idle = {i: max(0.0, share - had[i]) for i, share in lend.items()}
    all_idle = sum(idle.values()) + max(0, 100 - sum(shares.values()))
    part = min(1.0, sum(borrowed.values()) / all_idle) if all_idle else 0.0
    return {i: Lent(had[i], borrowed[i], idle[i] * part) for i in lend}
