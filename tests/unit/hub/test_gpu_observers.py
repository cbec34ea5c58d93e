"""Observers of GPUs: idle times, health, and the memory of kernel code."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import Device, Node, Placement, Request, Session, SessionState, Share, SystemClock
from fgpuspawner.hub.gpu_observers import (
    LEARN_AFTER_S,
    LEARN_EVERY_S,
    CodeMemoryWatch,
    GpuHealthWatch,
    GpuIdleTimes,
    beyond_mib,
    is_idle,
)
from fgpuspawner.isolation import facts, native
from fgpuspawner.isolation.gpu_poller import LONGEST_PAUSE, GpuSnapshot, NvmlSource
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import Native
from fgpuspawner.isolation.nvml_reader import DeviceUse, NvmlUnknown, ProcessUse
from fgpuspawner.isolation.report import BadReport, SlotReport
from fgpuspawner.meter.gpu_health import HEALTH, OLD_S, GpuHealth, GpuHealthState, health_of
from fgpuspawner.settings import FGPU

MIB = 2**20
REAL = Device("GPU-1f", "rack", 0, "NVIDIA A100", 40960, 2000)
NVML = NvmlSource("libnvidia-ml.so.1")

# --- Idle times ---


def session(*uuids: str) -> Session:
    shares = tuple(Share(uuid, 500, 2048, 25) for uuid in uuids or ("GPU-a",))
    asked = Request("alice", "", "python", "default", 500, 1000, 1024)
    return Session(1, asked, SessionState.RUNNING, 0, placement=Placement("n", shares), started_at_s=100)


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
    assert is_idle(session(), snapshot(used)) is idle


def test_all_gpus_of_a_session_must_be_idle_and_simulated_ones_are(tmp_path: Path) -> None:
    both = session("GPU-a", "GPU-b")
    assert not is_idle(both, snapshot({"GPU-a": {}, "GPU-b": {7: 5}}))
    nothing = NvmlSource(str(tmp_path / "libnvidia-ml.so.1"), simulated=True)
    assert is_idle(both, snapshot({"GPU-a": "simulated", "GPU-b": "simulated"}, source=nothing))


class Clock:
    now = 1000

    def now_s(self) -> int:
        return self.now


async def test_idle_time_begins_with_the_first_idle_snapshot_and_ends_with_any_other() -> None:
    clock, live = Clock(), [session()]
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
    await gpus.observe(snapshot({"GPU-a": {}}, ago_s=LONGEST_PAUSE * 10), [session()])
    assert gpus.idle_since_s(1) == 1000
    await gpus.observe(snapshot({"GPU-a": {}}, ago_s=(LONGEST_PAUSE + 2) * 10), [session()])
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
    ("used", "amounts", "code_mib", "found"),
    [
        pytest.param({17: 700}, ((17, 500 * MIB),), 0, 200, id="beyond"),
        pytest.param({17: 700}, ((17, 500 * MIB - 1),), 0, 201, id="rounded up"),
        pytest.param({17: 700}, ((17, 700 * MIB),), 150, 150, id="charged for it"),
        pytest.param({17: 700, 18: 900}, ((17, 500 * MIB), (18, 600 * MIB)), 0, 300, id="the most"),
        pytest.param({17: 700}, ((17, 0),), 0, None, id="nothing charged"),
        pytest.param({17: 700}, ((18, 1), (17,)), 0, None, id="another process"),
        pytest.param({17: 700}, (), 0, None, id="none"),
    ],
)
def test_what_a_process_holds_beyond_its_charge(
    used: dict[int, int], amounts: tuple[tuple[int, ...], ...], code_mib: int, found: int | None
) -> None:
    slots = SlotReport(1, (17, 18), (17, 18), amounts=amounts)
    held = {pid: mib * MIB for pid, mib in used.items()}
    assert beyond_mib(held, slots, device=0, code_mib=code_mib) == found


class World:
    """A session on a real GPU that holds 1,000 MiB by the driver, and was charged ``charged_mib``."""

    def __init__(self, tmp_path: Path, *, isolation: str = "interposer", share: int = 500) -> None:
        (tmp_path / "data").mkdir()
        settings = FGPU(data_dir=str(tmp_path / "data"), accounting_dir=str(tmp_path / "shm"))
        self.isolation = Isolation(settings, (Node("rack", "default", 16000, 65536, (REAL,)),))
        self.isolation.open(own_root=True, installation="abc")
        request = Request("alice", "", "torch", "default", share, 1000, 2048)
        note = json.dumps({"ip": "127.0.0.1", "port": 1, "isolation": isolation})
        placement = Placement("rack", (Share.of(REAL, share),))
        self.session = Session(1, request, SessionState.RUNNING, 0, placement=placement, launched=note)
        self.charged_mib = 700
        self.silent = False
        self.asked: list[Sequence[int]] = []
        self.watch = CodeMemoryWatch(self.isolation, self.ask)
        self.begin()

    def begin(self) -> int:
        """Return what a context of it is charged."""
        return self.isolation.prepare(self.session, [1]).limits.devices[0].context_mib

    async def ask(self, _: Session, processes: Sequence[int]) -> SlotReport:
        self.asked.append(processes)
        if self.silent:
            raise BadReport("the check printed no report")
        return SlotReport(1, (17,), (17,), amounts=((17, self.charged_mib * MIB),))

    async def sees(self, at_s: float, use: DeviceUse | str | None = None) -> int:
        """Return how often it was asked."""
        one = use or DeviceUse(
            (ProcessUse(1017, 1000 * MIB, 0, None, 17, "x"), ProcessUse(9, 1, 0, None, 9, "y"))
        )
        await self.watch.observe(GpuSnapshot(NVML, at_s, {REAL.uuid: one}, {1017: 1}), [self.session])
        await asyncio.gather(*self.watch._asking.values())
        return len(self.asked)


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the places of the built parts; a driver that measures contexts of 400 MiB."""
    monkeypatch.setattr(native, "FOLDER", tmp_path / "native")
    for part in Native(tmp_path / "native").parts:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(part.name)
        part.chmod(0o755)
    monkeypatch.setattr(facts, "driver_facts", lambda: {"driver": "580.65", "memory_limits": False})
    monkeypatch.setattr(facts, "measure_context", lambda uuid: 400)


async def test_next_session_of_an_image_is_charged_the_measured_code(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.begin() == 400
    assert await world.sees(0) == 0
    assert await world.sees(LEARN_AFTER_S - 1) == 0
    assert await world.sees(LEARN_AFTER_S) == 1
    assert world.asked == [[17]], "of its own processes only"
    assert world.begin() == 400 + 300
    world.charged_mib = 1000  # with the code
    assert await world.sees(LEARN_AFTER_S + LEARN_EVERY_S - 1) == 1
    assert await world.sees(LEARN_AFTER_S + LEARN_EVERY_S) == 2
    assert world.begin() == 400 + 300, "what is charged for code is not beyond"


async def test_session_without_an_answer_or_gpu_use_changes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.silent = True
    await world.sees(0)
    assert await world.sees(LEARN_AFTER_S) == 1
    assert await world.sees(2 * LEARN_EVERY_S, DeviceUse(())) == 1
    assert await world.sees(2 * LEARN_EVERY_S, "NVML fails") == 1
    assert world.begin() == 400


async def test_session_without_libfgpu_is_not_asked(tmp_path: Path) -> None:
    world = World(tmp_path, isolation="mig")
    await world.sees(0)
    assert await world.sees(LEARN_AFTER_S) == 0


def test_code_is_charged_a_quarter_of_the_slice_at_most(tmp_path: Path) -> None:
    world = World(tmp_path, share=100)  # 1/20 of the GPU: 2,048 MiB
    assert world.isolation.host.code is not None
    world.isolation.host.code.learn("NVIDIA A100, driver 580.65", "torch", "alice", 1000)
    assert world.begin() == 400 + 2048 // 4
