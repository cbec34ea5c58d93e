"""Reads the accounting file in which libfgpu counts what a session's processes hold. Layout: libfgpu/region.h."""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from fgpuspawner.isolation.backends import REGION_BYTES

MAGIC = 0x31302D7570676600
SLOTS, DEVICES = 1024, 16
PEAK_OFFSET, OWNER_OFFSET, OWNER_BYTES = 0x40, 0x2000, 16
CELL_OFFSET, CELL_BYTES = 0x100000, 64


@dataclass(frozen=True)
class ProcessAccount:
    """The bytes that a living process holds of each device."""

    pid: int
    committed_bytes: tuple[int, ...]


@dataclass(frozen=True)
class DeviceAccount:
    """What all living processes hold of a device, and the most that they ever held at once."""

    committed_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Accounting:
    """The content of an accounting file; devices in the order of the limits file."""

    devices: tuple[DeviceAccount, ...]
    processes: tuple[ProcessAccount, ...]


def read(path: Path) -> Accounting:
    """Return what living processes hold: those that have their slot's byte locked."""
    data = path.read_bytes()
    magic, high_water = struct.unpack_from("<QQ", data)
    assert (len(data), magic) in ((REGION_BYTES, 0), (REGION_BYTES, MAGIC))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        living = [slot for slot in range(min(high_water, SLOTS)) if _is_locked(descriptor, slot)]
    finally:
        os.close(descriptor)
    processes = tuple(
        ProcessAccount(
            struct.unpack_from("<I", data, OWNER_OFFSET + slot * OWNER_BYTES)[0],
            tuple(
                struct.unpack_from("<8xQ", data, CELL_OFFSET + (device * SLOTS + slot) * CELL_BYTES)[0]
                for device in range(DEVICES)
            ),
        )
        for slot in living
    )
    peaks = struct.unpack_from(f"<{DEVICES}Q", data, PEAK_OFFSET)
    held = tuple(sum(p.committed_bytes[device] for p in processes) for device in range(DEVICES))
    return Accounting(tuple(map(DeviceAccount, held, peaks)), processes)


def _is_locked(descriptor: int, slot: int) -> bool:
    # struct flock: l_type, l_whence, l_start, l_len, l_pid.
    asked = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, slot, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
