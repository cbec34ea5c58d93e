"""The backend `driver-cgroup` with a simulated driver r615: its limits hold, change, and leave nothing behind.

No such driver was at hand: what is simulated is what NVIDIA documents of nvmlDeviceSetMemoryLimits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from simulatedmachine import LIBRARIES, Machine, Running
from test_simulated_nvml import cgroup_mount, limit, within

from fgpu_scheduler import ShareMode
from fgpuspawner.isolation import backends, facts
from fgpuspawner.isolation.backends import DriverCgroup
from fgpuspawner.isolation.base import Host
from fgpuspawner.isolation.limits import DeviceLimit, Limits

DEVICE_MIB = 1024
OUT_OF_MEMORY = "2"


def limits_of(memory_mib: int) -> Limits:
    device = DeviceLimit("GPU-a", memory_mib, DEVICE_MIB, 0, 0, ShareMode.MEMORY, ())
    return Limits(1, "charge", (device,))


@dataclass(frozen=True, slots=True)
class Session:
    """A session's cgroup, and the backend that limits it."""

    machine: Machine
    backend: DriverCgroup
    path: str

    async def held_to(self, memory_mib: int) -> list[str]:
        """Set its limit as the Hub does; return what is wrong."""
        return await self.backend.driver_problems(limits_of(memory_mib), self.path)

    def program(self) -> contextlib.AbstractContextManager[Running]:
        """Run a program in it that takes memory when told, and kill it at the end."""
        return self.machine.running("sim_tool", "steps", before=within(self.path))

    def ends(self) -> None:
        """Remove its cgroup, as the container runtime does."""
        mount = cgroup_mount()
        assert mount is not None
        (mount / self.path.strip("/")).rmdir()

    def neighbours_may_take(self, mib: int) -> bool:
        held = self.machine.run("sim_tool", "hold", mib, before=("sh", "-c", '"$@" < /dev/null', "sh"))
        return held == "held 1\n"


@pytest.fixture
def session(
    simulated_machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    mount = cgroup_mount()
    if mount is None:
        pytest.skip("no cgroup v2 that may be written: run as root")
    machine = simulated_machine(f"driver=615.71\ngpu uuid=GPU-a memory_mib={DEVICE_MIB}\n")
    monkeypatch.setattr(backends, "NVML", str(machine.folder / LIBRARIES[1]))
    monkeypatch.setattr(facts, "CGROUP_V2", mount / "cgroup.controllers")
    path = f"/fgpu-driver-{os.getpid()}"
    try:
        (mount / path.strip("/")).mkdir()
    except OSError as error:
        pytest.skip(f"cannot make cgroups: {error}")
    yield Session(machine, DriverCgroup(Host(tmp_path, own_root=True)), path)
    with contextlib.suppress(FileNotFoundError):
        (mount / path.strip("/")).rmdir()


async def test_slice_changes_in_the_driver_while_a_program_runs(session: Session) -> None:
    assert await session.held_to(200) == []
    with session.program() as program:
        assert [program.tell(150), program.tell(100)] == ["0", OUT_OF_MEMORY]
        assert await session.held_to(300) == []
        assert [program.tell(100), program.tell(100)] == ["0", OUT_OF_MEMORY]
        assert await session.held_to(260) == []
        assert [program.tell(20), program.tell(9)] == [OUT_OF_MEMORY, "0"]
        assert await session.held_to(DEVICE_MIB) == [], "a whole GPU has no limit"
        assert program.tell(600) == "0"


@pytest.mark.parametrize("steps", [(), (200,), (200, 300), (300, 200), (200, DEVICE_MIB)])
@pytest.mark.parametrize("computes", [False, True])
async def test_session_killed_at_any_step_leaves_no_reservation(
    session: Session, steps: tuple[int, ...], computes: bool
) -> None:
    for memory_mib in steps:
        assert await session.held_to(memory_mib) == []
        # Nothing is kept from neighbours in between either.
        assert session.neighbours_may_take(DEVICE_MIB)
    if computes:
        with session.program() as program:
            assert program.tell(150) == "0"
            assert not session.neighbours_may_take(DEVICE_MIB - 100)
    session.ends()
    assert session.neighbours_may_take(DEVICE_MIB)


async def test_reservation_that_another_program_made_is_taken_back_before_the_cgroup_ends(
    session: Session,
) -> None:
    limit(session.machine, session.path, 200, 200)  # as the container toolkit's hook does
    assert not session.neighbours_may_take(900)
    assert await session.held_to(200) == []
    session.ends()
    assert session.neighbours_may_take(DEVICE_MIB)


def test_reservation_outlives_its_cgroup_in_the_simulated_driver(session: Session) -> None:
    limit(session.machine, session.path, 200, 200)
    session.ends()
    assert not session.neighbours_may_take(900)
    assert session.neighbours_may_take(800)


async def test_limit_that_the_driver_does_not_take_is_told(session: Session) -> None:
    session.ends()
    (problem,) = await session.held_to(200)
    assert "does not hold the session to 200 MiB of GPU GPU-a" in problem
    assert "Not Found" in problem
