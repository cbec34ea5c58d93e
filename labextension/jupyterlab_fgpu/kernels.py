"""Which notebook a process belongs to: kernels of this server, and what descends from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_ANCESTORS = 64
NAME_BYTES = 4096
SHOWN_NAME = 200


async def kernels_of(server_app: Any) -> dict[int, str]:
    """Return the notebook (or the console) of each kernel, by the kernel's process."""
    found = {}
    for session in await server_app.session_manager.list_sessions():
        try:
            kernel = server_app.kernel_manager.get_kernel(session["kernel"]["id"])
        except KeyError:
            continue  # It has ended since.
        pid = getattr(getattr(kernel, "provisioner", None), "pid", None)
        if isinstance(pid, int):
            found[pid] = str(session.get("path") or session.get("name") or "")
    return found


def notebook_of(pid: int, kernels: Mapping[int, str], proc: Path = Path("/proc")) -> str | None:
    """Return the notebook of the kernel that started this process; None: a terminal's, or it
    ended.
    """
    for _ in range(MOST_ANCESTORS):
        if pid in kernels:
            return kernels[pid]
        parent = _parent(pid, proc)
        if parent is None or parent <= 1:
            return None
        pid = parent
    return None


def process_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return a process's command in a few words, None where it has ended."""
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            words = file.read(NAME_BYTES).rstrip(b"\0").split(b"\0")
    except OSError:
        return None
    words[0] = os.path.basename(words[0])
    return b" ".join(words).decode("utf-8", "replace")[:SHOWN_NAME] or None


def _parent(pid: int, proc: Path) -> int | None:
    try:
        # The name, in brackets, may hold anything; what follows the last one does not.
        fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
