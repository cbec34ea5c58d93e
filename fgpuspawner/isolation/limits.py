"""The limits file of a session: text, read-only, the one truth about its slice inside the session.

Version 1: the heading ``fgpu-limits 1``, then ``session=ID``, then one ``device=UUID key=value ...`` line for
each share. Plain lines, so that a C library reads it without a parser.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from fgpu_scheduler import Session, format_milli

VERSION = 1
PATH_IN_CONTAINER = "/run/fgpu/limits"


def render(session: Session) -> str:
    """Return the limits file of a session that holds shares."""
    assert session.placement is not None, "a session without shares has no limits"
    lines = [f"fgpu-limits {VERSION}", f"session={session.id}"]
    lines.extend(
        f"device={s.device_uuid} memory_mib={s.memory_mib} compute_percent={s.compute_percent} mode={s.mode}"
        for s in session.placement.shares
    )
    return "\n".join(lines) + "\n"


def write(folder: Path, session: Session) -> Path:
    """Write the session's limits file into a folder of its own and return its absolute path.

    The file appears whole or not at all, and nobody but its owner could write it, were it writable.
    """
    own = folder / str(session.id)
    own.mkdir(parents=True, exist_ok=True, mode=0o755)
    path = own / "limits"
    draft = own / "limits.new"
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        os.fchmod(descriptor, 0o444)  # Whatever the umask says.
        file.write(render(session))
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)
    return path


def remove(folder: Path, session_id: int) -> None:
    """Remove what `write` made. Removing it twice is fine."""
    shutil.rmtree(folder / str(session_id), ignore_errors=True)


def prune(folder: Path, live: Collection[int]) -> None:
    """Remove the folders of sessions that are not ``live``, left by a Hub that was killed."""
    if not folder.is_dir():
        return
    for own in folder.iterdir():
        if own.name.isdigit() and int(own.name) not in live:
            shutil.rmtree(own, ignore_errors=True)


def environment(session: Session, *, limits_path: str, simulated: bool) -> dict[str, str]:
    """Return what the session is told in its environment. Information only: the limits file is what counts."""
    assert session.placement is not None
    shares = session.placement.shares
    uuids = ",".join(s.device_uuid for s in shares)
    return {
        "FGPU_SESSION_ID": str(session.id),
        "FGPU_AMOUNT": format_milli(session.request.fgpu_milli),
        "FGPU_MEMORY_MIB": str(sum(s.memory_mib for s in shares)),
        "FGPU_COMPUTE_PERCENT": str(sum(s.compute_percent for s in shares)),
        "FGPU_LIMITS_FILE": limits_path,
        "FGPU_SIMULATED": "1" if simulated else "0",
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "CUDA_VISIBLE_DEVICES": uuids,
    }
