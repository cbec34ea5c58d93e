"""What is learnt of a session's code: what the driver counts of its processes beyond their charge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fgpu_scheduler import Device, Node, Placement, Request, Session, SessionState, Share
from fgpuspawner.hub.gpu_observers import LEARN_AFTER_S, LEARN_EVERY_S, CodeMemoryWatch, beyond_mib
from fgpuspawner.isolation import facts, native
from fgpuspawner.isolation.gpu_poller import GpuSnapshot, NvmlSource
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import Native
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse
from fgpuspawner.isolation.report import BadReport, SlotReport
from fgpuspawner.settings import FGPU

MIB = 2**20
REAL = Device("GPU-1f", "rack", 0, "NVIDIA A100", 40960, 2000)
PLACE = NvmlSource("libnvidia-ml.so.1")


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
        await self.watch.observe(GpuSnapshot(PLACE, at_s, {REAL.uuid: one}, {1017: 1}), [self.session])
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


async def test_the_next_session_of_the_image_is_charged_what_this_one_took(tmp_path: Path) -> None:
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


async def test_a_session_that_does_not_answer_or_uses_no_gpu_teaches_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.silent = True
    await world.sees(0)
    assert await world.sees(LEARN_AFTER_S) == 1
    assert await world.sees(2 * LEARN_EVERY_S, DeviceUse(())) == 1
    assert await world.sees(2 * LEARN_EVERY_S, "NVML fails") == 1
    assert world.begin() == 400


async def test_a_session_that_libfgpu_does_not_hold_is_not_asked(tmp_path: Path) -> None:
    world = World(tmp_path, isolation="mig")
    await world.sees(0)
    assert await world.sees(LEARN_AFTER_S) == 0


def test_code_is_charged_a_quarter_of_the_slice_at_most(tmp_path: Path) -> None:
    world = World(tmp_path, share=100)  # 1/20 of the GPU: 2,048 MiB
    assert world.isolation.host.code is not None
    world.isolation.host.code.learn("NVIDIA A100, driver 580.65", "torch", "alice", 1000)
    assert world.begin() == 400 + 2048 // 4
