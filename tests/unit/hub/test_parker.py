"""The Hub's Parker: a session with memory on a GPU holds its share, and a step that failed is done again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fgpu_scheduler import (
    Device,
    InvalidTransition,
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
from fgpuspawner.hub.parking import MIB, ROOM_MIB, Parker, has_room
from fgpuspawner.hub.session_probes import ProveLimits
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.gpu_poller import Drivers, GpuSnapshot, NvmlSource
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import Native
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse
from fgpuspawner.isolation.report import Answer
from fgpuspawner.settings import FGPU

S = SessionState
GPU = Device("GPU-simulated-lab-0", "lab", 0, "Simulated GPU 8192 MiB", 8192, 1000, True)
LAB = Node("lab", "default", 16000, 65536, (GPU,))
OWN, OTHER, STRANGE = 7, 8, 9


def session(session_id: int, state: SessionState, **more: Any) -> Session:
    request = Request("alice", "", "python", "default", 500, 1000, 2048)
    return Session(session_id, request, state, 0, placement=Placement("lab", (Share.of(GPU, 500),)), **more)


async def proved(*_: object) -> Sequence[str]:
    return []


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
        #: Whether its owner ends it during the next step.
        self.ends = False
        #: The steps that the driver refuses.
        self.refuses: set[str] = set()
        #: What processes of no session hold of the GPU.
        self.strange_mib = 0
        self.other_mib = 0
        #: Another session of the same GPU, and whether the program in the own one is stopped.
        self.other: Session | None = None
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.was_asked = asyncio.Event()
        self.capabilities = type("Capabilities", (), {"own_root": True})

    @property
    def gate_is_closed(self) -> bool:
        return limits.gate_closed(self.isolation.folder(OWN))

    def parker(self, prove: ProveLimits = proved) -> Parker:
        stand_in = cast(Any, self)
        idle_times = GpuIdleTimes(SystemClock(), every_s=1)
        engine, drivers = cast(Engine, stand_in), cast(Drivers, stand_in)
        return Parker(stand_in, engine, self.isolation, drivers, idle_times, self.settings, prove=prove)

    def _fail(self, step: str) -> None:
        if step in self.fails:
            raise self.fails[step]

    # The queue.

    async def snapshot(self) -> Snapshot:
        return Snapshot(50, 1, (LAB,), (self.own, *([self.other] if self.other else [])))

    async def park(self, session_id: int, mib: int, message: str | None = None) -> None:
        changes: dict[str, Any] = {
            "state": S.PARKED,
            "parked_at_s": 50,
            "parked_mib": mib,
            "message": message,
        }
        if session_id == OWN:
            self._check_serves()
            self.own = replace(self.own, **changes)
        else:
            assert self.other is not None
            self.other = replace(self.other, **changes)

    async def refuse_to_park(self, session_id: int, why: str) -> None:
        self.own = replace(self.own, park_refused=why)

    def _check_serves(self) -> None:
        if self.own.state is S.TERMINATING:
            raise InvalidTransition("it ends")

    async def resumed(self, session_id: int) -> None:
        self._check_serves()
        self.own = replace(self.own, state=S.RUNNING)

    async def want(self, session_id: int, wanted: bool) -> None:
        self.own = replace(self.own, wanted_at_s=50 if wanted else None)

    # The engine.

    async def set_memory(self, _: Session, memory_mib: int) -> None:
        self._fail("set_memory")
        self.memory_mib = memory_mib

    async def probe(self, of: Session, command: Sequence[str], **more: object) -> Answer:
        what = command[5].removeprefix("--")
        self.asked.append(what)
        self.was_asked.set()
        if self.ends:
            self.own = replace(self.own, state=S.TERMINATING)
        if what in self.refuses:
            pass
        elif of.id == OTHER:
            self.other_mib = 0
        elif what == "park":
            await self.goes_on.wait()
            self.held_mib, self.on_host_mib = 0, self.on_host_mib + self.held_mib
        else:
            self.held_mib, self.on_host_mib = self.held_mib + self.on_host_mib, 0
        if of.id == OWN:
            self._fail(what)
        why = "the driver refuses process 12 (error 600)" if what in self.refuses else None
        report = {"probe": 1, "nonce": command[2], "done": why is None, "processes": [], "why": why}
        return Answer(json.dumps(report).encode(), 0)

    # The driver.

    def sources(self) -> dict[NvmlSource, list[str]]:
        return {NvmlSource("libnvidia-ml.so.1", None, True): [GPU.uuid]}

    def reader(self, _: NvmlSource) -> Lab:
        return self

    def device_uses(self, uuids: Sequence[str], _: Mapping[str, int]) -> dict[str, DeviceUse]:
        used = {OWN: self.held_mib, OTHER: self.other_mib, STRANGE: self.strange_mib}
        found = (ProcessUse(pid, mib * MIB, None, None, 0, None) for pid, mib in used.items() if mib)
        return {GPU.uuid: DeviceUse(tuple(found))}

    def owners(self, _: NvmlSource, pids: Sequence[int]) -> dict[int, int]:
        return {OWN: OWN, OTHER: OTHER}


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, native_parts: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for data, and a driver that is not waited for."""
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


def lose_the_word(lab: Lab) -> None:
    """Leave the session as one that was started while no host memory was set aside for parked sessions."""
    (lab.isolation.words_folder(str(OWN)) / "wanted").unlink()


@pytest.mark.parametrize(
    ("happens", "asked", "words"),
    [
        (
            lambda lab: lab.refuses.add("park"),
            ["park", "resume"],
            "the driver refuses process 12 (error 600)",
        ),
        # The host, or the engine, has no memory for its GPU memory.
        (lambda lab: lab.fails.update(set_memory=EngineSilent("full")), ["resume"], "full"),
        (
            lambda lab: setattr(lab, "held_mib", 2000),
            ["resume"],
            "it holds 2000 MiB of GPU memory by now, more than 1024 MiB",
        ),
        (
            lose_the_word,
            [],
            "it was started before sessions could be parked here, and could not ask for its GPU",
        ),
        (
            lambda lab: lab.fails.update(park=TimeoutError()),
            ["park", "resume"],
            "its machine did not do it in time",
        ),
        (
            lambda lab: lab.fails.update(park=PermissionError(13, "denied", "/srv/secret")),
            ["park", "resume"],
            "its machine failed; the Hub's log says why",
        ),
    ],
    ids=["driver", "memory limit", "more than measured", "no word", "too slow", "denied"],
)
async def test_a_session_that_cannot_be_parked_runs_on_with_the_reason_and_is_left_alone(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    happens: Callable[[Lab], None],
    asked: list[str],
    words: str,
) -> None:
    logging.getLogger("fgpu").propagate = True
    lab = Lab(tmp_path, session(OWN, S.RUNNING, park_asked_at_s=40))
    lab.held_mib = 64
    parker = lab.parker()
    await seen(lab, parker)
    happens(lab)
    for _ in range(3):
        await looked(parker)
    assert (lab.own.state, lab.asked) == (S.RUNNING, asked)
    assert lab.own.park_refused == words
    # It stays closed until the memory limit is lowered.
    assert lab.gate_is_closed is ("set_memory" in lab.fails)
    assert ("Session 7 cannot be parked, next try in 10 min: " in caplog.text) is bool(asked)


async def test_a_refused_restore_gives_the_share_back_and_tells_the_owner(tmp_path: Path) -> None:
    lab = Lab(tmp_path, session(OWN, S.RESUMING, parked_mib=64))
    lab.isolation.close_gate(OWN)
    lab.on_host_mib, lab.refuses = 64, {"resume"}
    parker = lab.parker()
    await looked(parker)
    assert (lab.own.state, lab.own.parked_mib, lab.gate_is_closed) == (S.PARKED, 64, True)
    assert lab.own.message == (
        "the GPU could not be given back (the driver refuses process 12 (error 600)); it is tried again in 60 s"
    )
    lab.own = replace(lab.own, state=S.RESUMING, parked_at_s=None)
    await looked(parker)
    assert lab.asked == ["resume"], "a minute is left"


async def test_a_restore_that_its_machine_fails_says_how(tmp_path: Path) -> None:
    lab = Lab(tmp_path, session(OWN, S.RESUMING))
    lab.fails["resume"] = TimeoutError()
    await looked(lab.parker())
    assert lab.own.message is not None
    assert lab.own.message.startswith("the GPU could not be given back (its machine did not do it in time); ")


@pytest.mark.parametrize("state", [S.RUNNING, S.RESUMING])
async def test_a_session_that_ends_while_it_is_moved_is_left_to_its_end(
    tmp_path: Path, state: SessionState
) -> None:
    lab = Lab(tmp_path, session(OWN, state, park_asked_at_s=40))
    lab.held_mib = 64
    parker = lab.parker()
    await seen(lab, parker)
    lab.ends = True
    await looked(parker)
    assert lab.own.state is S.TERMINATING
    lab.asked.clear()
    await looked(parker)
    assert lab.asked == []


async def test_the_gate_stays_closed_until_the_memory_limit_is_lowered(tmp_path: Path) -> None:
    lab = Lab(tmp_path, session(OWN, S.RESUMING, parked_mib=64))
    lab.isolation.close_gate(OWN)
    lab.memory_mib, lab.fails["set_memory"] = 4096, EngineSilent("no answer")
    await looked(lab.parker())
    assert (lab.own.state, lab.gate_is_closed) == (S.RESUMING, True)
    lab.fails.clear()
    await looked(lab.parker())
    assert (lab.own.state, lab.gate_is_closed, lab.memory_mib) == (S.RUNNING, False, 2048)


@pytest.mark.parametrize("crashed", [False, True])
async def test_host_memory_of_a_session_that_hinders_its_parking_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashed: bool
) -> None:
    """It stops or kills the mover, which runs as its user, and so keeps the memory limit that was raised."""
    monkeypatch.setattr(parking, "ALONE_FOR_S", 0.0)
    lab = Lab(tmp_path, session(OWN, S.RUNNING, park_asked_at_s=40))
    lab.held_mib, lab.fails = 64, {what: EngineSilent("no answer") for what in ("park", "resume")}
    parker = lab.parker()
    await seen(lab, parker)
    await looked(parker)
    assert (lab.own.state, lab.gate_is_closed, lab.memory_mib) == (S.RUNNING, True, 2048 + 64 + ROOM_MIB)
    if crashed:
        # A restarted Hub does not know how much it was: at most its share, 4096 MiB.
        lab.settings.parked_memory_mib = 4096 + 1000
        parker = lab.parker()
        await looked(parker)
    lab.other = session(OTHER, S.RUNNING, park_asked_at_s=41)
    lab.isolation.prepare(lab.other, [OWN, OTHER])
    for other_mib, state in ((1001, S.RUNNING), (900, S.PARKED)):
        lab.other_mib, lab.other = other_mib, replace(lab.other, park_asked_at_s=41 + other_mib)
        await seen(lab, parker)
        await looked(parker)
        assert lab.other.state is state


async def test_memory_of_a_session_that_a_crash_left_parked_is_not_restored_without_room(
    tmp_path: Path,
) -> None:
    """A restarted Hub does not know how much it is, and one restore without room would lose it."""
    lab = Lab(tmp_path, session(OWN, S.RUNNING))
    lab.isolation.close_gate(OWN)
    lab.on_host_mib, lab.strange_mib = 64, GPU.memory_mib - 32
    await looked(lab.parker())
    assert (lab.asked, lab.gate_is_closed) == ([], True)
    lab.strange_mib = 0
    await looked(lab.parker())
    assert (lab.asked, lab.held_mib, lab.gate_is_closed) == (["resume"], 64, False)


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
    live = (await lab.snapshot()).sessions
    await parker.observe(GpuSnapshot(next(iter(lab.sources())), 0.0, uses, lab.owners(None, [])), live)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("alone_for_s", "other_mib", "state"),
    [(15, 400, S.RUNNING), (1e-6, 500, S.RUNNING), (1e-6, 400, S.PARKED)],
)
async def test_a_session_that_delays_its_parking_keeps_others_from_theirs_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_for_s: float, other_mib: int, state: SessionState
) -> None:
    """The host has 1024 MiB, and the session that is being parked takes 600 of them, more than was measured."""
    monkeypatch.setattr(parking, "ALONE_FOR_S", alone_for_s)
    lab = Lab(tmp_path, session(OWN, S.RUNNING, park_asked_at_s=40))
    lab.other = session(OTHER, S.RUNNING, park_asked_at_s=41)
    lab.isolation.prepare(lab.other, [OWN, OTHER])
    parker = lab.parker()
    lab.held_mib, lab.other_mib = 400, other_mib
    await seen(lab, parker)
    lab.held_mib = 600
    lab.goes_on.clear()
    await parker.look()
    await lab.was_asked.wait()
    await parker.look()
    if OTHER in parker._busy:
        await parker._busy[OTHER]
    assert (lab.own.state, lab.other.state) == (S.RUNNING, state)
    lab.goes_on.set()
    await parker.done()
    assert lab.own.state is S.PARKED


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


@pytest.mark.parametrize(
    ("asked_at_s", "words"),
    [(40, None), (-20, "the driver does not tell how much GPU memory it holds")],
)
async def test_a_wish_is_refused_where_the_driver_does_not_tell_for_a_minute(
    tmp_path: Path, asked_at_s: int, words: str | None
) -> None:
    lab = Lab(tmp_path, session(OWN, S.RUNNING, park_asked_at_s=asked_at_s))
    lab.isolation.open_gate(lab.own)
    await looked(lab.parker())
    assert (lab.own.park_refused, lab.own.state) == (words, S.RUNNING)


async def test_a_person_who_asks_again_after_a_refusal_is_not_made_to_wait(tmp_path: Path) -> None:
    lab = Lab(tmp_path, session(OWN, S.RUNNING, park_asked_at_s=40))
    lab.isolation.open_gate(lab.own)
    lab.fails["park"] = EngineSilent("the engine does not answer")
    parker = lab.parker()
    await seen(lab, parker)
    await looked(parker)
    await looked(parker)
    assert (lab.asked, lab.gate_is_closed) == (["park", "resume"], False)
    assert lab.own.park_refused == "the engine does not answer"
    lab.fails.clear()
    lab.own = replace(lab.own, park_asked_at_s=45, park_refused=None)
    await looked(parker)
    assert lab.own.state is S.PARKED


async def test_the_limits_of_a_session_on_demand_are_proved_once(tmp_path: Path) -> None:
    own = session(OWN, S.RESUMING)
    lab = Lab(tmp_path, replace(own, request=replace(own.request, on_demand=True)))
    proofs = []

    async def prove(*_: object) -> Sequence[str]:
        proofs.append(lab.own.id)
        return []

    parker = lab.parker(prove)
    for _ in range(2):
        lab.own = replace(lab.own, state=S.RESUMING)
        await looked(parker)
        assert lab.own.state is S.RUNNING
    assert len(proofs) == 1


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
    assert said.startswith("Session 7 is not parked: it holds")
    assert lab.asked == []


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
        (None, 1, False),
    ],
)
def test_room_is_what_other_processes_leave(found: DeviceUse | str | None, mib: int, room: bool) -> None:
    uses = {} if found is None else {GPU.uuid: found}
    assert has_room(session(OWN, S.RESUMING), mib, (GPU,), uses, {1: 6, 7: 7}) is room
