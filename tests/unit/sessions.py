"""Sessions of a machine with two GPUs, their processes, and a clock."""

from __future__ import annotations

import json
from typing import Any

from fgpu_scheduler import Device, Placement, Request, Session, SessionState, Share
from fgpuspawner.isolation.nvml_reader import ProcessUse

MIB = 2**20
GPU, OTHER = "GPU-1f", "GPU-2a"
DEVICES = {uuid: Device(uuid, "lab", i, "GPU", 8192, 2000, True) for i, uuid in enumerate((GPU, OTHER))}
QUARTER = Share(GPU, 500, 2048, 25)


def session(
    number: int = 1,
    *shares: Share,
    node: str = "lab",
    state: SessionState = SessionState.RUNNING,
    isolation: str = "interposer",
    **more: Any,
) -> Session:
    """Return a session that was launched with these shares, or a quarter of the first GPU."""
    held = shares or (QUARTER,)
    asked = Request("alice", "", "python", "default", sum(s.fgpu_milli for s in held), 1000, 2048)
    note = json.dumps({"ip": "127.0.0.1", "port": 1, "isolation": isolation})
    return Session(number, asked, state, 0, placement=Placement(node, held), launched=note, **more)


def process(pid: int, mib: int | None, sm: float | None = 0.0, *, inner: int | None = None) -> ProcessUse:
    return ProcessUse(pid, None if mib is None else mib * MIB, sm, None, inner or pid, "python3")


class Clock:
    """A clock that the test sets."""

    now = 1000

    def now_s(self) -> int:
        return self.now
