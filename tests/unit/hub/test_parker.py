"""The Hub's Parker: a session with memory on a GPU holds its share, and a step that failed is done again."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fgpu_scheduler import (
    Device,
    Node,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    SystemClock,
)
from fgpuspawner.engines.base import Engine, EngineSilent
from fgpuspawner.hub import parking
from fgpuspawner.hub.gpu_observers import GpuIdleTimes
from fgpuspawner.hub.parking import MIB, Parker
from fgpuspawner.isolation import limits, native
from fgpuspawner.isolation.gpu_poller import Drivers, GpuSnapshot, NvmlSource
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import Native
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse
from fgpuspawner.isolation.report import Answer
from fgpuspawner.settings import FGPU

S = SessionState
GPU = Device("GPU-simulated-lab-0", "lab", 0, "Simulated GPU 8192 MiB", 8192, 1000, True)
LAB = Node("lab", "default", 16000, 65536, (GPU,))
OWN, OTHER = 7, 8


def session(session_id: int, state: SessionState, **more: Any) -> Session:
    request = Request("alice", "", "python", "default", 500, 1000, 2048)
    return Session(session_id, request, state, 0, placement=Placement("lab", (Share.of(GPU, 500),)), **more)


class Lab:
    """A session and its GPU, in place of the queue, the engine and the driver."""

    def __init__(self, folder: Path, own: Session) -> None:
        self.own = own
        self.settings = FGPU(
            data_dir=str(folder / "data"), accounting_dir=str(folder / "shm"), parked_memory_mib=1024
        )
        self.isolation = Isolation(self.settings, (LAB,))
        self.isolation.open(own_root=True, installation="abc")
        self.isolation.prepare(own, [own.id])
        #: What the session holds of its GPU as the driver says, and what its processes have in the host's memory.
        self.held_mib, self.on_host_mib = 0, 0
        self.memory_mib = own.request.memory_mib
        self.asked: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.capabilities = type("Capabilities", (), {"own_root": True})

    @property
    def gate_is_closed(self) -> bool:
        return limits.gate_closed(self.isolation.folder(OWN))

    def parker(self) -> Parker:
        async def proved(*_: object) -> Sequence[str]:
            return []

        stand_in = cast(Any, self)
        idle_times = GpuIdleTimes(SystemClock(), every_s=1)
        engine, drivers = cast(Engine, stand_in), cast(Drivers, stand_in)
        return Parker(stand_in, engine, self.isolation, drivers, idle_times, self.settings, prove=proved)

    def _fail(self, step: str) -> None:
        if step in self.fails:
            raise self.fails[step]

    # The queue.

    async def snapshot(self) -> Snapshot:
        return Snapshot(50, 1, (LAB,), (self.own,))

    async def park(self, session_id: int, mib: int, message: str | None = None) -> None:
        self.own = replace(self.own, state=S.PARKED, parked_at_s=50, parked_mib=mib, message=message)

    async def resumed(self, session_id: int) -> None:
        self.own = replace(self.own, state=S.RUNNING)

    async def want(self, session_id: int, wanted: bool) -> None:
        self.own = replace(self.own, wanted_at_s=50 if wanted else None)

    # The engine.

    async def set_memory(self, _: Session, memory_mib: int) -> None:
        self._fail("set_memory")
        self.memory_mib = memory_mib

    async def probe(self, _: Session, command: Sequence[str], **more: object) -> Answer:
        what = command[5].removeprefix("--")
        self.asked.append(what)
        if what == "park":
            self.held_mib, self.on_host_mib = 0, self.on_host_mib + self.held_mib
        else:
            self.held_mib, self.on_host_mib = self.held_mib + self.on_host_mib, 0
        self._fail(what)
        report = {"probe": 1, "nonce": command[2], "done": True, "processes": [], "why": None}
        return Answer(json.dumps(report).encode(), 0)

    # The driver.

    def sources(self) -> dict[NvmlSource, list[str]]:
        return {NvmlSource("libnvidia-ml.so.1", None, True): [GPU.uuid]}

    def reader(self, _: NvmlSource) -> Lab:
        return self

    def device_uses(self, uuids: Sequence[str], _: Mapping[str, int]) -> dict[str, DeviceUse]:
        used = (ProcessUse(OWN, self.held_mib * MIB, None, None, 0, None),) if self.held_mib else ()
        return {GPU.uuid: DeviceUse(used)}

    def owners(self, _: NvmlSource, pids: Sequence[int]) -> dict[int, int]:
        return {OWN: OWN}


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the places of the built parts, and a driver that is not waited for."""
    monkeypatch.setattr(native, "FOLDER", tmp_path / "native")
    for part in Native(tmp_path / "native").parts:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(part.name)
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(parking, "PROVED_WITHIN_S", 0.0)


async def looked(parker: Parker) -> None:
    await parker.look()
    await parker.done()


async def test_a_session_whose_memory_came_back_keeps_its_share_though_the_answer_was_lost(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path, session(OWN, S.RESUMING, parked_mib=64))
    lab.isolation.close_gate(OWN)
    lab.on_host_mib, lab.fails["resume"] = 64, EngineSilent("no answer")
    await looked(lab.parker())
    assert (lab.own.state, lab.held_mib, lab.gate_is_closed) == (S.RESUMING, 64, True)
    lab.fails.clear()
    await looked(lab.parker())
    assert (lab.own.state, lab.gate_is_closed) == (S.RUNNING, False)


async def test_a_session_of_which_nothing_came_back_is_parked_with_a_closed_gate(tmp_path: Path) -> None:
    """An earlier Hub has died after it opened the gate."""
    lab = Lab(tmp_path, session(OWN, S.RESUMING))
    lab.fails["resume"] = EngineSilent("no answer")
    await looked(lab.parker())
    assert (lab.own.state, lab.gate_is_closed) == (S.PARKED, True)


async def test_the_gate_stays_closed_until_the_memory_limit_is_lowered(tmp_path: Path) -> None:
    lab = Lab(tmp_path, session(OWN, S.RESUMING, parked_mib=64))
    lab.isolation.close_gate(OWN)
    lab.memory_mib, lab.fails["set_memory"] = 4096, EngineSilent("no answer")
    await looked(lab.parker())
    assert (lab.own.state, lab.gate_is_closed) == (S.RESUMING, True)
    lab.fails.clear()
    await looked(lab.parker())
    assert (lab.own.state, lab.gate_is_closed, lab.memory_mib) == (S.RUNNING, False, 2048)


async def test_a_failing_step_is_not_tried_again_at_once(tmp_path: Path) -> None:
    lab = Lab(tmp_path, session(OWN, S.RUNNING))
    lab.isolation.close_gate(OWN)
    lab.fails["resume"] = EngineSilent("no answer")
    parker = lab.parker()
    await looked(parker)
    await looked(parker)
    assert (lab.asked, lab.gate_is_closed) == (["resume"], True)


async def seen(lab: Lab, parker: Parker) -> None:
    """Show the driver's figures of long ago."""
    uses = lab.device_uses([GPU.uuid], {})
    await parker.observe(GpuSnapshot(next(iter(lab.sources())), 0.0, uses, lab.owners(None, [])), [lab.own])  # type: ignore[arg-type]


async def test_a_session_that_has_taken_more_than_the_host_has_left_is_not_parked(tmp_path: Path) -> None:
    lab = Lab(tmp_path, session(OWN, S.RUNNING, park_asked_at_s=40))
    parker = lab.parker()
    lab.held_mib = 64
    await seen(lab, parker)
    lab.held_mib = 2000
    await looked(parker)
    assert (lab.own.state, lab.gate_is_closed, lab.memory_mib) == (S.RUNNING, False, 2048)
    assert "park" not in lab.asked


async def test_a_session_on_demand_keeps_a_gpu_that_it_has_begun_to_use(tmp_path: Path) -> None:
    own = session(OWN, S.RUNNING)
    lab = Lab(tmp_path, replace(own, request=replace(own.request, on_demand=True)))
    lab.isolation.open_gate(lab.own)
    parker = lab.parker()
    await seen(lab, parker)
    lab.held_mib = 64
    await looked(parker)
    assert (lab.own.state, lab.gate_is_closed) == (S.RUNNING, False)


async def test_a_session_on_demand_that_the_driver_refuses_is_left_alone_for_a_while(tmp_path: Path) -> None:
    own = session(OWN, S.RUNNING)
    lab = Lab(tmp_path, replace(own, request=replace(own.request, on_demand=True)))
    lab.isolation.open_gate(lab.own)
    lab.fails["park"] = EngineSilent("no answer")
    parker = lab.parker()
    await seen(lab, parker)
    await looked(parker)
    await looked(parker)
    assert lab.asked == ["park", "resume"]


@pytest.mark.parametrize("state", [S.RUNNING, S.RESUMING])
async def test_a_session_gets_slots_beside_those_that_took_its_own_meanwhile(
    tmp_path: Path, state: SessionState
) -> None:
    lab = Lab(tmp_path, session(OWN, state))
    lab.isolation.close_gate(OWN)
    other = lab.isolation.prepare(session(OTHER, S.PREPARING), [OWN, OTHER]).limits
    await looked(lab.parker())
    own = limits.read(lab.isolation.folder(OWN))
    assert sorted((*own.devices[0].slots, *other.devices[0].slots)) == [(0, 50), (50, 100)]


async def test_a_session_that_could_not_ask_for_its_gpu_is_never_parked(tmp_path: Path) -> None:
    """It was started while no host memory was set aside for parked sessions."""
    lab = Lab(tmp_path, session(OWN, S.RUNNING, park_asked_at_s=40))
    (lab.isolation.words_folder(str(OWN)) / "wanted").unlink()
    parker = lab.parker()
    await seen(lab, parker)
    await looked(parker)
    assert (lab.own.state, lab.asked) == (S.RUNNING, [])


async def test_a_session_that_does_not_fit_into_the_hosts_memory_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("fgpu").propagate = True
    lab = Lab(tmp_path, session(OWN, S.RUNNING, park_asked_at_s=40))
    parker = lab.parker()
    lab.held_mib = 2000
    await seen(lab, parker)
    await looked(parker)
    await looked(parker)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "fgpu.parking"]
    assert said.startswith("Session 7: it is not parked: it holds")
    assert lab.asked == []
