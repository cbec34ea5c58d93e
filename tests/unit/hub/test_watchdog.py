"""The watchdog: who is warned and who is ended, and that not knowing is never taken for nothing being held."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fgpu_scheduler import Device, EndCause, Node, Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.hub import watchdog as watchdog_module
from fgpuspawner.hub.watchdog import (
    Above,
    Allowance,
    Looked,
    Watchdog,
    ended_words,
    judge,
    warning_words,
)
from fgpuspawner.isolation import accounting
from fgpuspawner.isolation.drivers import Drivers
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import Held, NvmlReader, NvmlUnknown
from fgpuspawner.settings import FGPU

MIB = 2**20
GPU, OTHER = "GPU-1f", "GPU-2a"
LIMIT = {1: {GPU: Allowance(2048)}, 2: {GPU: Allowance(4096)}}


def held(*amounts: tuple[int, int | None]) -> tuple[Held, ...]:
    """Return what processes hold, in MiB."""
    return tuple(Held(pid, None if mib is None else mib * MIB) for pid, mib in amounts)


def look(
    looked: Looked, owners: Mapping[int, int], before: Sequence[int] = (), **more: object
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the sessions to be warned, ended, recovered and above, at a tolerance of 512 MiB."""
    allowances = more.get("allowances", LIMIT)
    verdict = judge(looked, owners, allowances, frozenset(before), tolerance_mib=512)  # type: ignore[arg-type]
    return (
        [a.session_id for a in verdict.warn],
        [a.session_id for a in verdict.end],
        list(verdict.recovered),
        sorted(verdict.above),
    )


@pytest.mark.parametrize(
    ("mib", "before", "expected"),
    [
        (2048, [], ([], [], [], [])),
        (2560, [], ([], [], [], [])),
        (2561, [], ([1], [], [], [1])),
        (2561, [1], ([], [1], [], [1])),
        (2560, [1], ([], [], [1], [])),
        (8192, [2], ([1], [], [2], [1])),
    ],
)
def test_above_limit_and_tolerance_a_session_is_warned_and_then_ended(
    mib: int, before: list[int], expected: tuple[list[int], ...]
) -> None:
    assert look({GPU: held((10, mib))}, {10: 1}, before) == expected


@pytest.mark.parametrize(("had", "ended"), [(0, False), (2, False), (3, True)])
def test_one_that_goes_above_again_and_again_is_not_warned_for_ever(had: int, ended: bool) -> None:
    looked = {GPU: held((10, 3000))}
    verdict = judge(looked, {10: 1}, LIMIT, frozenset(), tolerance_mib=512, warnings={1: had})
    assert (bool(verdict.warn), bool(verdict.end)) == (not ended, ended)


def test_a_fraction_of_a_mib_above_is_above() -> None:
    one_byte_more = (Held(10, 2560 * MIB + 1),)
    assert look({GPU: one_byte_more}, {10: 1})[0] == [1]


def test_a_sessions_processes_count_together_and_each_sessions_by_themselves() -> None:
    looked = {GPU: held((10, 1500), (11, 1500), (20, 4000))}
    verdict = judge(looked, {10: 1, 11: 1, 20: 2}, LIMIT, frozenset(), tolerance_mib=512)
    assert verdict.warn == (Above(1, GPU, 3000, 2048),)


def test_contexts_that_are_not_charged_are_allowed_for_each_process() -> None:
    allowances = {1: {GPU: Allowance(2048, context_mib=500)}}
    looked = {GPU: held((10, 1700), (11, 1800))}
    assert look(looked, {10: 1, 11: 1}, allowances=allowances) == ([], [], [], [])
    looked = {GPU: held((10, 1700), (11, 1861))}
    assert look(looked, {10: 1, 11: 1}, allowances=allowances) == ([1], [], [], [1])


def test_what_kernels_take_is_allowed_for_each_process() -> None:
    allowances = {1: {GPU: Allowance(2048, code_mib=256)}}
    amounts = [(10 + n, 500) for n in range(6)]
    owners = {pid: 1 for pid, _ in amounts}
    assert look({GPU: held(*amounts)}, owners, allowances=allowances) == ([], [], [], [])
    assert look({GPU: held(*amounts, (20, 1097))}, {**owners, 20: 1}, allowances=allowances)[0] == [1]
    # The tolerance is for one.
    assert look({GPU: held((10, 2561))}, {10: 1}, allowances=allowances)[0] == [1]


def test_of_a_device_that_is_not_its_own_a_session_may_hold_nothing() -> None:
    looked = {GPU: held((10, 100)), OTHER: held((10, 600))}
    verdict = judge(looked, {10: 1}, LIMIT, frozenset(), tolerance_mib=512)
    assert verdict.warn == (Above(1, OTHER, 600, 0),)


def test_what_nvml_does_not_tell_neither_ends_nor_clears_anybody() -> None:
    unknown: Looked = {GPU: NvmlUnknown("GPU is lost")}
    assert look(unknown, {}) == ([], [], [], [])
    assert look(unknown, {}, before=[1]) == ([], [], [], [1]), "neither ended nor recovered"
    # Seen again, still above: it is the next look for which there is a reading.
    assert look({GPU: held((10, 3000))}, {10: 1}, before=[1])[1] == [1]


def test_a_process_without_an_amount_is_not_one_that_holds_nothing() -> None:
    some: Looked = {GPU: held((10, None), (11, 100))}
    assert look(some, {10: 1, 11: 1}) == ([], [], [], [])
    assert look(some, {10: 1, 11: 1}, before=[1]) == ([], [], [], [1])
    # What is known is enough.
    assert look({GPU: held((10, None), (11, 3000))}, {10: 1, 11: 1}) == ([1], [], [], [1])


def test_a_session_that_is_gone_is_forgotten() -> None:
    assert look({GPU: held()}, {}, before=[9]) == ([], [], [], [])


def test_whose_process_it_is_not_is_a_stranger_and_nobody_is_blamed() -> None:
    verdict = judge({GPU: held((10, 100), (66, 9000))}, {10: 1}, LIMIT, frozenset(), tolerance_mib=0)
    assert verdict.strangers == {(GPU, 66)}
    assert not verdict.warn


def test_a_process_of_a_session_that_is_not_watched_is_no_stranger() -> None:
    verdict = judge({GPU: held((50, 9000))}, {50: 5}, LIMIT, frozenset(), tolerance_mib=0)
    assert (verdict.strangers, verdict.warn) == (frozenset(), ())


def test_the_words_have_the_figures() -> None:
    above = Above(1, GPU, 3000, 2048)
    assert "3000 MiB" in warning_words(above, 10)
    assert "2048 MiB" in warning_words(above, 10)
    assert "in 10 seconds" in warning_words(above, 10)
    assert "3000 MiB" in ended_words(above)
    assert "2048 MiB" in ended_words(above)


# --- Looking ---


class Scheduler:
    """Remembers what it was told."""

    def __init__(self, *sessions: Session) -> None:
        self.sessions = sessions
        self.told: list[tuple[str, int, str]] = []

    async def live(self) -> tuple[Session, ...]:
        return self.sessions

    async def warn(self, session_id: int, message: str | None) -> Session:
        self.told.append(("warn", session_id, message or ""))
        return self.sessions[0]

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        self.told.append((cause, session_id, message or ""))
        return self.sessions[0]


class OneMachine:
    """An engine's processes, of which those of a session begin with its number."""

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        return {pid: pid // 10 for pid in pids if pid < 100}

    def gpu_reader(self, node_id: str) -> NvmlReader:
        raise EngineSilent(f"node {node_id} is not another machine")


class Reader(NvmlReader):
    """Tells what a test lays out, one look after another."""

    script: list[Looked | NvmlUnknown] = []

    async def look(self, uuids: object) -> Looked:
        found = self.script.pop(0)
        if isinstance(found, NvmlUnknown):
            raise found
        return found


def session(
    session_id: int, isolation: str = "interposer", state: SessionState = SessionState.RUNNING
) -> Session:
    request = Request("alice", "", "python", "default", 500, 1000, 2048)
    placement = Placement("lab", (Share(GPU, 500, 2048, 25),))
    note = json.dumps({"ip": "127.0.0.1", "port": 1, "isolation": isolation})
    return Session(session_id, request, state, 0, placement=placement, launched=note)


@pytest.fixture
def isolation(tmp_path: Path) -> Isolation:
    device = Device(GPU, "lab", 0, "Simulated GPU", 8192, 2000, True)
    settings = FGPU(data_dir=str(tmp_path), isolation="none")
    found = Isolation(settings, (Node("lab", "default", 1000, 1024, (device,)),))
    found.open(own_root=False, installation="abc")
    return found


def watch(isolation: Isolation, scheduler: Scheduler, *script: Looked | NvmlUnknown) -> Watchdog:
    Reader.script = list(script)
    drivers = Drivers(isolation, OneMachine(), make_reader=Reader)
    return Watchdog(isolation, scheduler, drivers, every_s=10, tolerance_mib=512)


async def test_a_session_is_warned_then_ended_with_figures(isolation: Isolation) -> None:
    scheduler = Scheduler(session(1))
    watchdog = watch(isolation, scheduler, *[{GPU: held((10, 3000))}] * 2)
    await watchdog.look()
    await watchdog.look()
    (warned, first, words), (cause, second, last) = scheduler.told
    assert (warned, first, cause, second) == ("warn", 1, "ISOLATION_FAILED", 1)
    assert "3000 MiB" in words
    assert "2048 MiB" in last


class Absent(Scheduler):
    """Its database is away when it is called for the first few times."""

    def __init__(self, *sessions: Session, calls: int) -> None:
        super().__init__(*sessions)
        self.calls = calls

    def answer(self) -> None:
        self.calls -= 1
        if self.calls >= 0:
            raise OSError("the database does not answer")

    async def warn(self, session_id: int, message: str | None) -> Session:
        self.answer()
        return await super().warn(session_id, message)

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        self.answer()
        return await super().end(session_id, cause, message)


async def test_nobody_is_ended_whose_warning_could_not_be_written(isolation: Isolation) -> None:
    scheduler = Absent(session(1), session(2), calls=1)
    watchdog = watch(isolation, scheduler, *[{GPU: held((10, 3000), (20, 3000))}] * 3)
    await watchdog.look()
    assert [(what, who) for what, who, _ in scheduler.told] == [("warn", 2)], "one failure hides no other"
    await watchdog.look()
    assert [(what, who) for what, who, _ in scheduler.told[1:]] == [("ISOLATION_FAILED", 2), ("warn", 1)]
    await watchdog.look()
    assert ("ISOLATION_FAILED", 1) in [(what, who) for what, who, _ in scheduler.told]


async def test_an_end_and_a_recovery_that_could_not_be_written_are_tried_again(isolation: Isolation) -> None:
    scheduler = Scheduler(session(1), session(2))
    looks = [{GPU: held((10, 3000), (20, 3000))}, *[{GPU: held((10, 3000), (20, 100))}] * 2]
    watchdog = watch(isolation, scheduler, *looks)
    await watchdog.look()
    absent = Absent(session(1), session(2), calls=2)
    watchdog._sessions = absent
    await watchdog.look()
    assert absent.told == []
    await watchdog.look()
    assert [(what, who) for what, who, _ in absent.told] == [("ISOLATION_FAILED", 1), ("warn", 2)]


class Away(OneMachine):
    """Has another machine, which hangs, or says nothing of whose processes there are."""

    def __init__(self, how: str) -> None:
        self._how = how

    def gpu_reader(self, node_id: str) -> NvmlReader:
        how = self._how

        class Hangs(NvmlReader):
            async def look(self, uuids: object) -> Looked:
                if how == "hangs":
                    await asyncio.sleep(3600)
                return {OTHER: held((20, 100))}

        return Hangs(node_id)

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        if node_id is None:
            return super().sessions_of(pids)
        raise EngineSilent("the Docker engine does not say whose processes use the GPUs")


@pytest.mark.parametrize("how", ["hangs", "is silent"])
async def test_a_machine_that_does_not_answer_hides_no_other(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog_module, "LONGEST_LOOK_S", 0.2)
    lab = Node("lab", "default", 1000, 1024, (Device(GPU, "lab", 0, "Simulated GPU", 8192, 2000, True),))
    away = Node("away", "default", 1000, 1024, (Device(OTHER, "away", 0, "A100", 8192, 2000, False),))
    nodes = [{"name": "lab"}, {"name": "away", "engine": "ssh://away"}]
    settings = FGPU(data_dir=str(tmp_path), isolation="none", nodes=nodes, hub_address="10.0.0.1")
    isolation = Isolation(settings, (away, lab))
    isolation.open(own_root=True, installation="abc")
    there = replace(session(2), placement=Placement("away", (Share(OTHER, 500, 2048, 25),)))
    scheduler = Scheduler(session(1), there)
    Reader.script = [{GPU: held((10, 3000))}] * 2
    drivers = Drivers(isolation, Away(how), make_reader=Reader)
    watchdog = Watchdog(isolation, scheduler, drivers, every_s=10, tolerance_mib=512)
    logging.getLogger("fgpu").propagate = True
    with caplog.at_level(logging.ERROR, "fgpu.watchdog"):
        async with asyncio.timeout(60):
            await watchdog.look()
            await watchdog.look()
    assert [(what, number) for what, number, _ in scheduler.told] == [("warn", 1), ("ISOLATION_FAILED", 1)]
    troubles = [
        r.getMessage() for r in caplog.records if "does not know what sessions hold" in r.getMessage()
    ]
    assert len(troubles) == 1, "said once, and not at every look"


async def test_a_session_that_heeds_the_warning_is_told_so(isolation: Isolation) -> None:
    scheduler = Scheduler(session(1))
    watchdog = watch(isolation, scheduler, {GPU: held((10, 3000))}, {GPU: held((10, 1000))}, {GPU: held()})
    for _ in range(3):
        await watchdog.look()
    assert [(what, bool(words)) for what, _, words in scheduler.told] == [("warn", True), ("warn", False)]


async def test_the_fourth_time_above_there_is_no_warning(isolation: Isolation) -> None:
    scheduler = Scheduler(session(1))
    looks: list[Looked] = [{GPU: held((10, 3000))}, {GPU: held()}] * 4
    watchdog = watch(isolation, scheduler, *looks)
    for _ in range(7):
        await watchdog.look()
    assert [what for what, _, words in scheduler.told if words] == ["warn"] * 3 + ["ISOLATION_FAILED"]


async def test_nvml_that_fails_is_said_loudly_and_once_and_nobody_is_ended(
    isolation: Isolation, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler(session(1))
    above: Looked = {GPU: held((10, 3000))}
    lost = NvmlUnknown("no answer within 30 s")
    watchdog = watch(isolation, scheduler, above, lost, lost, {GPU: NvmlUnknown("GPU is lost")}, above)
    logging.getLogger("fgpu").propagate = True
    with caplog.at_level(logging.WARNING, "fgpu.watchdog"):
        for _ in range(4):
            await watchdog.look()
        assert [what for what, _, _ in scheduler.told] == ["warn"]
        await watchdog.look()
    assert [what for what, _, _ in scheduler.told] == ["warn", "ISOLATION_FAILED"]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert sum("no answer within 30 s" in e for e in errors) == 1
    assert sum("GPU is lost" in e for e in errors) == 1
    assert sum("sees again" in r.getMessage() for r in caplog.records) == 2


async def test_a_stranger_is_logged_once_and_again_only_as_another(
    isolation: Isolation, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = watch(
        isolation, Scheduler(session(1)), *[{GPU: held((666, 10))}] * 3, {GPU: held((666, 10), (777, 10))}
    )
    logging.getLogger("fgpu").propagate = True
    with caplog.at_level(logging.WARNING, "fgpu.watchdog"):
        for _ in range(4):
            await watchdog.look()
    said = [r.getMessage() for r in caplog.records if "belongs to no session" in r.getMessage()]
    assert said == [f"Process {pid} uses GPU {GPU} and belongs to no session" for pid in (666, 777)]


@pytest.mark.parametrize(
    "other",
    [
        session(1, isolation="none"),
        session(1, state=SessionState.TERMINATING),
        session(1, state=SessionState.PREPARING),
    ],
)
async def test_a_session_that_nothing_holds_or_that_ends_anyway_is_left_alone(
    isolation: Isolation, other: Session
) -> None:
    scheduler = Scheduler(other, session(2))
    looks: list[Looked] = [{GPU: held((10, 8000))}] * 3
    watchdog = watch(isolation, scheduler, *looks)
    for _ in range(3):
        await watchdog.look()
    assert scheduler.told == []


async def test_logs_that_sessions_let_grow_are_emptied(isolation: Isolation) -> None:
    own = isolation.folder(7)
    own.mkdir(parents=True)
    (own / "log").write_bytes(b"x" * (2 << 20))
    other = isolation.folder(8)
    other.mkdir()
    (other / "log").write_bytes(b"x" * 1000)
    await watch(isolation, Scheduler()).look()
    assert [(folder / "log").stat().st_size for folder in (own, other)] == [0, 1000]


async def test_an_account_that_a_session_lets_grow_is_cut_back(
    isolation: Isolation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    isolation.host = replace(isolation.host, accounting=tmp_path / "memory")
    in_memory, beside = tmp_path / "memory" / "7", isolation.folder(8)
    for folder in (in_memory, beside):
        folder.mkdir(parents=True)
        with accounting.create(folder / "accounting").open("r+b") as file:
            file.write(b"kept")
            file.seek(0, 2)
            file.write(b"x" * (1 << 20))
    logging.getLogger("fgpu").propagate = True
    with caplog.at_level(logging.WARNING, "fgpu"):
        for _ in range(2):
            await watch(isolation, Scheduler()).look()
    for folder in (in_memory, beside):
        data = (folder / "accounting").read_bytes()
        assert (len(data), data[:4]) == (accounting.REGION_BYTES, b"kept")
    assert sum("accounting file grow" in r.getMessage() for r in caplog.records) == 2, "once for each"
