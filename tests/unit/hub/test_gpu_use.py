"""Whose GPUs rest, as the driver says: what it does not tell is not taken for resting."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fgpu_scheduler import Placement, Request, Session, SessionState, Share
from fgpuspawner.hub.gpu_observers import GpuIdleTimes, is_idle
from fgpuspawner.isolation.gpu_poller import LONGEST_PAUSE, GpuSnapshot, NvmlSource
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse

THERE = NvmlSource("libnvidia-ml.so.1")


def session(number: int = 1, *uuids: str) -> Session:
    shares = tuple(Share(uuid, 500, 2048, 25) for uuid in uuids or ("GPU-a",))
    asked = Request("alice", str(number), "python", "default", 500, 1000, 1024)
    return Session(number, asked, SessionState.RUNNING, 0, placement=Placement("n", shares), started_at_s=100)


def snapshot(
    used: dict[str, dict[int, int | None] | str],
    owners: dict[int, int],
    *,
    source: NvmlSource = THERE,
    ago_s: float = 0.0,
) -> GpuSnapshot:
    devices = {
        uuid: own
        if isinstance(own, str)
        else DeviceUse(
            tuple(ProcessUse(pid, 0, 0.0, percent, pid, "python3") for pid, percent in own.items())
        )
        for uuid, own in used.items()
    }
    return GpuSnapshot(source, time.monotonic() - ago_s, devices, owners)


@pytest.mark.parametrize(
    ("used", "owners", "idle"),
    [
        # Nobody there, or only programs that rest.
        ({"GPU-a": {}}, {}, True),
        ({"GPU-a": {7: 0}}, {7: 1}, True),
        ({"GPU-a": {7: 1}}, {7: 1}, False),
        ({"GPU-a": {7: 0, 8: 90}}, {7: 1, 8: 1}, False),
        # What is not told of one's own program is not idle; what others do is theirs.
        ({"GPU-a": {7: None}}, {7: 1}, False),
        ({"GPU-a": {7: 90, 8: None}}, {7: 2}, True),
        ({"GPU-a": "the driver is away"}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_gpu_is_idle_when_the_driver_says_of_each_of_ones_programs_that_it_rests(
    used: dict[str, dict[int, int | None] | str], owners: dict[int, int], idle: bool
) -> None:
    assert is_idle(session(), snapshot(used, owners)) is idle


def test_all_gpus_of_a_session_have_to_rest_and_those_that_nobody_can_use_do(tmp_path: Path) -> None:
    both = session(1, "GPU-a", "GPU-b")
    assert not is_idle(both, snapshot({"GPU-a": {}, "GPU-b": {7: 5}}, {7: 1}))
    nothing = NvmlSource(str(tmp_path / "libnvidia-ml.so.1"), simulated=True)
    assert is_idle(both, snapshot({"GPU-a": "simulated", "GPU-b": "simulated"}, {}, source=nothing))


class Clock:
    now = 1000

    def now_s(self) -> int:
        return self.now


async def test_rest_begins_with_the_first_look_that_sees_it_and_ends_with_any_that_does_not() -> None:
    clock, live = Clock(), [session()]
    gpus = GpuIdleTimes(clock, every_s=10)
    since = []
    for seen in ({7: 5}, {7: 0}, {}, "the driver is away", {}):
        clock.now += 10
        await gpus.observe(snapshot({"GPU-a": seen}, {7: 1}), live)  # type: ignore[dict-item]
        since.append(gpus.idle_since_s(1))
    assert since == [None, 1020, 1020, None, 1050]
    await gpus.observe(snapshot({"GPU-other": {}}, {}), live)
    assert gpus.idle_since_s(1) == 1050, "a look at another machine says nothing of it"


async def test_rest_that_was_not_seen_for_too_long_is_not_known() -> None:
    gpus = GpuIdleTimes(Clock(), every_s=10)
    await gpus.observe(snapshot({"GPU-a": {}}, {}, ago_s=LONGEST_PAUSE * 10), [session()])
    assert gpus.idle_since_s(1) == 1000
    await gpus.observe(snapshot({"GPU-a": {}}, {}, ago_s=(LONGEST_PAUSE + 2) * 10), [session()])
    assert gpus.idle_since_s(1) is None
