"""The accounting file, in which libfgpu counts what a session's processes hold. Layout: isolation/libfgpu/region.h."""

from __future__ import annotations

import os
from pathlib import Path

REGION_BYTES = 2 << 20


def create(path: Path) -> Path:
    """Make the file, filled with zeros, in place of an older one; return its path.

    Its blocks are allocated at once: on a full file system a later write would kill the writer. Everyone may write it,
    as the session's user is not the owner; the folder keeps other users out.
    """
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, REGION_BYTES)
        os.fchmod(descriptor, 0o666)
    finally:
        os.close(descriptor)
    draft.replace(path)
    return path
