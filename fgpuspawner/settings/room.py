"""Free space on the file system of a folder, in blocks and in files. Writing needs both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SHORT_BYTES = 64 << 20
SHORT_FILES = 200
SHARE = 10
"""Small file systems are short only below a tenth of their size."""
FULL_BYTES = 1 << 20
FULL_FILES = 4
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Room:
    """What this process may still write to a file system. ``files`` is None if that does not limit them."""

    free_bytes: int
    total_bytes: int
    files: int | None = None

    @property
    def full(self) -> bool:
        """Whether next to nothing can be written."""
        return self.free_bytes < FULL_BYTES or (self.files is not None and self.files < FULL_FILES)

    @property
    def short(self) -> bool:
        """Whether it is full soon."""
        least = min(SHORT_BYTES, self.total_bytes // SHARE)
        return self.full or self.free_bytes < least or (self.files is not None and self.files < SHORT_FILES)

    def words(self, data: Path) -> str | None:
        """Return what is wrong, and what to do, for administrators; None if nothing is."""
        if not self.short:
            return None
        state = "is full" if self.full else "is nearly full"
        files = "" if self.files is None else f" and room for {self.files} files"
        return (
            f"The disk of the Hub's data ({data}) {state}: {self.free_bytes // MIB} MiB{files} left. Make room there; "
            "sessions run on, but log-ins, starts and ends can fail until then"
        )


def room_of(folder: Path) -> Room:
    """Return what room there is for this process."""
    found = os.statvfs(folder)
    mine = os.geteuid() == 0
    return Room(
        (found.f_bfree if mine else found.f_bavail) * found.f_frsize,
        found.f_blocks * found.f_frsize,
        (found.f_ffree if mine else found.f_favail) if found.f_files else None,
    )
