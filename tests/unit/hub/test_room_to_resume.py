"""Whether a GPU has room for the memory of a session that comes back."""

from __future__ import annotations

import pytest

from fgpu_scheduler import Device, Placement, Request, Session, SessionState, Share
from fgpuspawner.hub.parking import has_room
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse

MIB = 2**20
GPU = Device("GPU-a", "lab", 0, "Simulated GPU", 8192, 2000, True)
OWN = Session(
    7,
    Request("alice", "", "python", "default", 1000, 1000, 2048),
    SessionState.RESUMING,
    0,
    placement=Placement("lab", (Share.of(GPU, 1000),)),
)


def use(**held_mib: int | None) -> DeviceUse:
    """Return a use by process 1 of another session, process 7 of this session and process 9 of no session."""
    pids = {"other": 1, "own": 7, "stranger": 9}
    processes = (
        ProcessUse(pids[n], mib if mib is None else mib * MIB, None, None, 0, None)
        for n, mib in held_mib.items()
    )
    return DeviceUse(tuple(processes))


@pytest.mark.parametrize(
    ("found", "mib", "room"),
    [
        (use(), 4000, True),
        (use(other=4096), 4096, True),
        (use(other=4097), 4096, False),
        (use(other=4097), 4095, True),
        (use(other=4000, stranger=200), 4096, False),
        (use(other=4096), 9000, True),
        (use(other=4096, own=4096), 4096, True),
        (use(other=None), 1, False),
        ("the driver does not answer", 1, False),
    ],
)
def test_room_is_what_other_processes_leave(found: DeviceUse | str, mib: int, room: bool) -> None:
    assert has_room(OWN, mib, (GPU,), {GPU.uuid: found}, {1: 6, 7: 7}) is room


def test_unknown_use_is_no_room() -> None:
    assert not has_room(OWN, 1, (GPU,), {}, {})
