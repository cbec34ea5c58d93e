"""The accounting file, in which libfgpu counts what a session's processes hold. Layout: isolation/libfgpu/region.h.

The session can write the file, so its content is a claim, for display only. Enforcement asks the driver.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from fgpu_scheduler import FGPUError
from fgpuspawner.isolation.files import read_bounded

REGION_BYTES = 2 << 20
MAGIC = 0x31302D7570676600
SLOTS = 1024
DEVICES = 16
PEAK_OFFSET = 0x40
OWNER_OFFSET = 0x2000
OWNER_BYTES = 16
CELL_OFFSET = 0x100000
CELL_BYTES = 64


class BadAccounting(FGPUError):
    """An accounting file cannot be read."""

    code = "bad_accounting"


@dataclass(frozen=True, slots=True)
class ProcessAccount:
    """A living process of the session.

    ``pid`` is its number in its own container, so processes of different containers can share it. ``committed_bytes``
    has an entry for each possible device, in the order of the limits file.
    """

    pid: int
    committed_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceAccount:
    """What all living processes of the session hold of a device, and the most that they ever held at once."""

    committed_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Accounting:
    """What a session claims to hold; devices in the order of its limits file."""

    devices: tuple[DeviceAccount, ...]
    processes: tuple[ProcessAccount, ...]


def create(path: Path, *, mode: int = 0o666) -> Path:
    """Make the file, filled with zeros, in place of an older one; return its path.

    Its blocks are allocated at once: on a full file system a later write would kill the writer. The session's user is
    another than the file's owner, hence ``mode``; the folder keeps other users out.
    """
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, REGION_BYTES)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    draft.replace(path)
    return path


def read(path: Path) -> Accounting:
    """Return what living processes hold.

    Not an atomic snapshot: amounts that change during the read may count twice or not at all.

    Raises:
        BadAccounting: the file is missing, or not one that libfgpu would use.
    """
    try:
        data = read_bounded(path, REGION_BYTES)
        if len(data) != REGION_BYTES:
            raise BadAccounting(f"{path} has {len(data)} bytes, not {REGION_BYTES}")
        (magic, high_water) = struct.unpack_from("<QQ", data)
        if magic not in (0, MAGIC):
            raise BadAccounting(f"{path} begins with {magic:#x}, not with {MAGIC:#x}")
        living = _locked(path, min(high_water, SLOTS))
    except OSError as e:
        raise BadAccounting(f"{path} cannot be read: {e}") from e
    processes = tuple(
        ProcessAccount(
            pid=struct.unpack_from("<I", data, OWNER_OFFSET + slot * OWNER_BYTES)[0],
            committed_bytes=tuple(_committed(data, device, slot) for device in range(DEVICES)),
        )
        for slot in living
    )
    peaks = struct.unpack_from(f"<{DEVICES}Q", data, PEAK_OFFSET)
    held = tuple(sum(p.committed_bytes[device] for p in processes) for device in range(DEVICES))
    return Accounting(tuple(map(DeviceAccount, held, peaks)), processes)


def _committed(data: bytes, device: int, slot: int) -> int:
    (committed,) = struct.unpack_from("<8xQ", data, CELL_OFFSET + (device * SLOTS + slot) * CELL_BYTES)
    return int(committed)


def _locked(path: Path, slots: int) -> list[int]:
    """Return the slots with a write lock on their byte: those of living processes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return [slot for slot in range(slots) if _is_locked(descriptor, slot)]
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, slot: int) -> bool:
    # struct flock: l_type, l_whence, l_start, l_len, l_pid.
    asked = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, slot, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
