"""Observers of GPUs: idle times, health, and the memory of kernel code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sessions import MIB, Clock, session

from fgpu_scheduler import Device, Node, Session, Share, SystemClock
from fgpuspawner.hub.gpu_observers import (
    COUNT_AGAIN_S,
    LONGEST_WAIT_S,
    CodeMemoryWatch,
    GpuHealthWatch,
    GpuIdleTimes,
    code_by_process,
    is_idle,
)
from fgpuspawner.isolation import facts, limits
from fgpuspawner.isolation.gpu_poller import LONGEST_PAUSE, GpuSnapshot, NvmlSource
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import Native
from fgpuspawner.isolation.nvml_reader import DeviceUse, NvmlUnknown, ProcessUse
from fgpuspawner.isolation.report import BadReport, SlotReport
from fgpuspawner.meter.gpu_health import HEALTH, OLD_S, GpuHealth, GpuHealthState, health_of
from fgpuspawner.settings import FGPU

REAL = Device("GPU-1f", "rack", 0, "NVIDIA A100", 40960, 2000)
NVML = NvmlSource("libnvidia-ml.so.1")

# --- Idle times ---


def holding(*uuids: str) -> Session:
    return session(1, *(Share(uuid, 500, 2048, 25) for uuid in uuids), started_at_s=100)


def snapshot(
    used: dict[str, dict[int, int | None] | str], *, source: NvmlSource = NVML, ago_s: float = 0.0
) -> GpuSnapshot:
    """Return a snapshot of busy percents. Processes below 100 belong to session 1, others to session 2."""
    devices = {
        uuid: own
        if isinstance(own, str)
        else DeviceUse(tuple(ProcessUse(pid, 0, 0.0, busy, pid, "python3") for pid, busy in own.items()))
        for uuid, own in used.items()
    }
    owners = {pid: 1 if pid < 100 else 2 for own in used.values() if not isinstance(own, str) for pid in own}
    return GpuSnapshot(source, time.monotonic() - ago_s, devices, owners)


@pytest.mark.parametrize(
    ("used", "idle"),
    [
        ({"GPU-a": {}}, True),
        ({"GPU-a": {7: 0}}, True),
        ({"GPU-a": {7: 1}}, False),
        ({"GPU-a": {7: 0, 8: 90}}, False),
        # Unknown use of the session's own process is not idle; other sessions do not count.
        ({"GPU-a": {7: None}}, False),
        ({"GPU-a": {107: 90, 108: None}}, True),
        ({"GPU-a": "the driver is away"}, False),
        ({}, False),
    ],
)
def test_gpu_is_idle_if_no_process_of_the_session_uses_it(
    used: dict[str, dict[int, int | None] | str], idle: bool
) -> None:
    assert is_idle(holding("GPU-a"), snapshot(used)) is idle


def test_all_gpus_of_a_session_must_be_idle_and_simulated_ones_are(tmp_path: Path) -> None:
    both = holding("GPU-a", "GPU-b")
    assert not is_idle(both, snapshot({"GPU-a": {}, "GPU-b": {7: 5}}))
    nothing = NvmlSource(str(tmp_path / "libnvidia-ml.so.1"), simulated=True)
    assert is_idle(both, snapshot({"GPU-a": "simulated", "GPU-b": "simulated"}, source=nothing))


async def test_idle_time_begins_with_the_first_idle_snapshot_and_ends_with_any_other() -> None:
    clock, live = Clock(), [holding("GPU-a")]
    gpus = GpuIdleTimes(clock, every_s=10)
    since = []
    for seen in ({7: 5}, {7: 0}, {}, "the driver is away", {}):
        clock.now += 10
        await gpus.observe(snapshot({"GPU-a": seen}), live)  # type: ignore[dict-item]
        since.append(gpus.idle_since_s(1))
    assert since == [None, 1020, 1020, None, 1050]
    await gpus.observe(snapshot({"GPU-other": {}}), live)
    assert gpus.idle_since_s(1) == 1050, "a snapshot of another machine changes nothing"


async def test_idle_time_is_unknown_after_a_long_time_without_snapshots() -> None:
    gpus = GpuIdleTimes(Clock(), every_s=10)
    await gpus.observe(snapshot({"GPU-a": {}}, ago_s=LONGEST_PAUSE * 10), [holding("GPU-a")])
    assert gpus.idle_since_s(1) == 1000
    await gpus.observe(snapshot({"GPU-a": {}}, ago_s=(LONGEST_PAUSE + 2) * 10), [holding("GPU-a")])
    assert gpus.idle_since_s(1) is None


# --- Health ---

ANSWER = {
    "use_percent": 50,
    "memory_used_bytes": 3 * 2**30,
    "temperature_c": 61,
    "power_mw": 120_500,
    "power_limit_mw": 700_000,
    "ecc_errors": 0,
    "xid": 0,
}


class Drivers:
    """Drivers of one GPU each, with these answers."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers

    def sources(self) -> dict[NvmlSource, list[str]]:
        return {NvmlSource(f"lib{n}"): [f"GPU-{n}"] for n in range(len(self.answers))}

    def reader(self, place: NvmlSource) -> Drivers:
        return Drivers(self.answers[int(place.library.removeprefix("lib"))])

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        (answer,) = self.answers
        if isinstance(answer, Exception):
            raise answer
        return {"devices": dict.fromkeys(question["uuids"], answer)}


async def read_health(data: Path, *answers: object) -> dict[str, GpuHealth]:
    await GpuHealthWatch(Drivers(*answers), SystemClock(), data=data).look()  # type: ignore[arg-type]
    return dict(HEALTH.read(data).devices)


async def test_gpu_without_an_answer_is_unknown_with_the_reason_and_others_are_read(tmp_path: Path) -> None:
    found = await read_health(
        tmp_path, ANSWER, NvmlUnknown("no answer"), {"use_percent": 1}, {"error": "GPU is lost"}
    )
    first = found["GPU-0"]
    assert (first.use_percent, first.memory_used_mib, first.temperature_c) == (50, 3072, 61)
    assert (first.power_w, first.power_limit_w, first.ecc_errors, first.xid) == (120.5, 700.0, 0, 0)
    assert first.problem == ""
    assert found["GPU-1"].trouble == "no answer"
    assert "makes no sense" in str(found["GPU-2"].trouble)
    assert found["GPU-3"].problem == "its driver does not tell how it is: GPU is lost"
    assert found["GPU-3"].ecc_errors is None


async def test_error_of_a_gpu_stays_known_after_a_restart_of_the_hub(tmp_path: Path) -> None:
    seen = (await read_health(tmp_path, ANSWER | {"xid": 79}))["GPU-0"]
    assert (seen.xid, seen.xid_at_s) == (79, seen.at_s)
    later = (await read_health(tmp_path, ANSWER | {"xid": None}))["GPU-0"]
    assert (later.xid, later.xid_at_s) == (79, seen.at_s)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"xid": 31}, ""),
        ({"xid": 79}, "error 79 of the driver (Xid)"),
        ({"ecc_errors": 2}, "2 uncorrected memory errors (ECC)"),
        ({"temperature_c": 95}, "95 °C"),
        (dict.fromkeys(ANSWER), ""),
    ],
)
def test_problems_of_a_gpu_are_named(more: dict[str, Any], problem: str) -> None:
    assert health_of(ANSWER | more, 100).problem == problem


def test_old_or_invalid_health_counts_as_unknown(tmp_path: Path) -> None:
    state = GpuHealthState({"GPU-0": GpuHealth(1000, use_percent=5)})
    assert state.of("GPU-0", 1000 + OLD_S) == GpuHealth(1000, use_percent=5)
    assert state.of("GPU-0", 1001 + OLD_S) is None
    (tmp_path / "gpu_health.json").write_text("[")
    assert HEALTH.read(tmp_path) == GpuHealthState()


def test_error_of_the_gpu_outranks_errors_of_programs_for_a_week() -> None:
    lost = GpuHealth(100, xid=79).after(None)
    later = GpuHealth(200, xid=45).after(lost)
    assert (later.xid, later.xid_at_s) == (79, 100)
    assert GpuHealth(300, xid=48).after(later).xid == 48
    assert GpuHealth(100 + 8 * 24 * 3600, xid=0).after(later).xid == 0


# --- Memory of kernel code ---


@pytest.mark.parametrize(
    ("before", "after", "amounts", "found"),
    [
        pytest.param({17: 700}, {17: 700}, ((17, 500),), {17: 200}, id="beyond"),
        pytest.param({17: 700}, {17: 500}, ((17, 500),), {}, id="freed in between"),
        pytest.param({17: 500}, {17: 700}, ((17, 500),), {}, id="taken in between"),
        pytest.param({17: 700}, {17: 700}, ((17, 684),), {}, id="rounding"),
        pytest.param({17: 700}, {17: 700}, ((17, 900),), {}, id="managed memory, in the host's"),
        pytest.param(
            {17: 700, 18: 900}, {17: 700, 18: 900}, ((17, 500), (18, 600)), {17: 200, 18: 300}, id="two"
        ),
        pytest.param({17: 700, 18: 900}, {18: 900}, ((17, 500), (18, 600)), {18: 300}, id="one has ended"),
        pytest.param({17: 700}, {17: 700}, ((18, 1), (17,)), {17: 700}, id="around libfgpu"),
    ],
)
def test_code_of_a_process_is_what_it_holds_beyond_its_charge(
    before: dict[int, int], after: dict[int, int], amounts: tuple[tuple[int, ...], ...], found: dict[int, int]
) -> None:
    rows = tuple((pid, *(mib * MIB for mib in charged)) for pid, *charged in amounts)
    used = [{pid: mib * MIB for pid, mib in one.items()} for one in (before, after)]
    assert code_by_process(used, SlotReport(1, (17, 18), (17, 18), amounts=rows), device=0) == found


class World:
    """A session on a real GPU, whose processes hold ``used`` MiB by the driver and were charged ``charged``."""

    def __init__(self, tmp_path: Path, *, isolation: str = "interposer") -> None:
        settings = FGPU(data_dir=str(tmp_path / "data"), accounting_dir=str(tmp_path / "shm"))
        (tmp_path / "data").mkdir(exist_ok=True)
        self.isolation = Isolation(settings, (Node("rack", "default", 16000, 65536, (REAL,)),))
        self.isolation.open(own_root=True, installation="abc")
        self.session = session(1, Share.of(REAL, 500), node="rack", isolation=isolation)
        self.used = {17: 1000}
        self.charged = {17: 700}
        self.silent = False
        self.asked: list[Sequence[int]] = []
        self.soon: list[float] = []
        self.at_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Watch, as a Hub that has just started does."""
        self.watch = CodeMemoryWatch(
            self.isolation, self.ask, snapshot_soon=lambda _, after_s: self.soon.append(after_s)
        )

    async def ask(self, _: Session, processes: Sequence[int]) -> SlotReport:
        self.asked.append(processes)
        if self.silent:
            raise BadReport("the check printed no report")
        amounts = tuple((pid, mib * MIB) for pid, mib in self.charged.items())
        return SlotReport(1, tuple(self.charged), tuple(self.charged), amounts=amounts)

    async def sees(self, use: DeviceUse | str | None = None, *, after_s: float = 1.0) -> int | None:
        """Take a snapshot; return what its limits then charge for code."""
        self.at_s += after_s
        neighbour = ProcessUse(9, 5000 * MIB, 0, None, 17, "y")
        own = [ProcessUse(1000 + pid, mib * MIB, 0, None, pid, "x") for pid, mib in self.used.items()]
        owners = {1000 + pid: 1 for pid in self.used} | {9: 2}
        snapshot = GpuSnapshot(NVML, self.at_s, {REAL.uuid: use or DeviceUse((*own, neighbour))}, owners)
        await self.watch.observe(snapshot, [self.session])
        await asyncio.gather(*self.watch._asking.values())
        return limits.read(self.isolation.folder(1)).devices[0].code_mib


@pytest.fixture
def world(tmp_path: Path, measured: None) -> World:
    world = World(tmp_path)
    world.isolation.prepare(world.session, [1])
    return world


@pytest.fixture(autouse=True)
def measured(native_parts: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's contexts take 400 MiB."""
    monkeypatch.setattr(facts, "measure_context", lambda uuid: 400)


async def test_session_is_charged_what_the_driver_counts_beyond_its_charge(world: World) -> None:
    assert await world.sees() == 0
    assert world.asked == [[17]], "of its own processes only"
    assert world.soon == [COUNT_AGAIN_S], "the driver counts again soon"
    assert await world.sees() == 300
    assert world.isolation.code_mib == {1: {REAL.uuid: 300}}, "the meter shows it"
    revision = (world.isolation.folder(1) / "revision").read_bytes()
    assert revision == (1).to_bytes(16, "little"), "its processes read the new limits"


async def test_code_of_processes_that_come_and_go_is_added_and_taken_off(world: World) -> None:
    await world.sees()
    assert await world.sees() == 300
    world.used[18], world.charged[18] = 600, 500
    await world.sees()
    assert world.asked[-1] == [17, 18]
    assert await world.sees() == 400
    del world.used[17]
    assert await world.sees() == 100, "at once, without a question"
    world.used.clear()
    assert await world.sees() == 0
    assert len(world.asked) == 2


async def test_same_processes_are_asked_ever_more_seldom(world: World) -> None:
    for _ in range(600):
        await world.sees()
    assert len(world.asked) == 7
    world.used[17] = 1100  # it has loaded more code
    await world.sees(after_s=LONGEST_WAIT_S)
    assert await world.sees() == 400


@pytest.mark.parametrize(
    "unknown",
    ["NVML fails", DeviceUse((ProcessUse(1017, None, 0, None, 17, "x"),))],
    ids=["no answer", "no amount"],
)
async def test_unknown_figures_leave_the_charge_as_it_was(world: World, unknown: DeviceUse | str) -> None:
    await world.sees()
    assert await world.sees() == 300
    for _ in range(3):
        assert await world.sees(unknown, after_s=LONGEST_WAIT_S) == 300
    world.silent = True
    assert await world.sees(after_s=LONGEST_WAIT_S) == 300


async def test_charge_stays_when_the_hub_starts_again(world: World) -> None:
    await world.sees()
    assert await world.sees() == 300
    world.begin()
    world.isolation.code_mib.clear()
    assert await world.sees() == 300
    assert await world.sees() == 300
    assert world.isolation.code_mib == {1: {REAL.uuid: 300}}
    world.begin()
    world.used.clear()
    assert await world.sees() == 0, "its processes ended while no Hub ran"


async def test_session_from_before_code_was_charged_keeps_its_limits(world: World) -> None:
    own = world.isolation.folder(1)
    now = limits.read(own)
    limits.write(own, replace(now, devices=(replace(now.devices[0], code_mib=None),)))
    await world.sees()
    assert await world.sees() is None
    assert (own / "revision").read_bytes() == bytes(16), "its libfgpu would refuse limits with another field"


async def test_session_without_libfgpu_is_not_asked(tmp_path: Path) -> None:
    world = World(tmp_path, isolation="none")
    world.isolation.prepare(world.session, [1])
    assert await world.sees() == 0
    assert world.asked == []
