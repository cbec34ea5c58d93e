"""The watchdog: who is warned and who is ended, and that not knowing is never taken for nothing being held."""

from __future__ import annotations

import json
import logging
import random
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgpu_scheduler import Device, EndCause, Node, Placement, Request, Session, SessionState, Share
from fgpuspawner.hub.watchdog import (
    FADES_IN,
    STRIKES,
    Allowance,
    Found,
    OverLimit,
    Step,
    Strikes,
    Watchdog,
    after_look,
    compare,
    warning_words,
)
from fgpuspawner.isolation.backends import REGION_BYTES
from fgpuspawner.isolation.files import make_zeros
from fgpuspawner.isolation.gpu_poller import LONGEST_PAUSE, GpuSnapshot, NvmlSource
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse
from fgpuspawner.settings import FGPU

MIB = 2**20
GPU, OTHER = "GPU-1f", "GPU-2a"
LIMIT = {1: {GPU: Allowance(2048)}, 2: {GPU: Allowance(4096)}}
EVERY_S = 10.0


def held(*amounts: tuple[int, int | None]) -> DeviceUse:
    """Return what processes hold, in MiB."""
    return DeviceUse(
        tuple(ProcessUse(pid, None if mib is None else mib * MIB, 0.0, 0, pid, "x") for pid, mib in amounts)
    )


def snapshot(
    devices: Mapping[str, DeviceUse | str], owners: Mapping[int, int], at_s: float = 0.0
) -> GpuSnapshot:
    return GpuSnapshot(NvmlSource("libnvidia-ml.so.1"), at_s, devices, owners)


def found(
    devices: Mapping[str, DeviceUse | str],
    owners: Mapping[int, int],
    allowances: Mapping[int, Mapping[str, Allowance]] = LIMIT,
) -> Found:
    return compare(snapshot(devices, owners), allowances, tolerance_mib=512)


# --- One look ---


@pytest.mark.parametrize(("mib", "is_above"), [(2048, False), (2560, False), (2561, True)])
def test_above_is_who_holds_more_than_limit_and_tolerance(mib: int, is_above: bool) -> None:
    assert (1 in found({GPU: held((10, mib))}, {10: 1}).above) is is_above


def test_a_fraction_of_a_mib_above_is_above() -> None:
    one_byte_more = DeviceUse((ProcessUse(10, 2560 * MIB + 1, 0.0, 0, 10, "x"),))
    assert 1 in found({GPU: one_byte_more}, {10: 1}).above


def test_a_sessions_processes_count_together_and_each_sessions_by_themselves() -> None:
    devices = {GPU: held((10, 1500), (11, 1500), (20, 4000))}
    assert found(devices, {10: 1, 11: 1, 20: 2}).above == {1: OverLimit(1, GPU, 3000, 2048)}


def test_contexts_that_are_not_charged_are_allowed_for_each_process() -> None:
    allowances = {1: {GPU: Allowance(2048, context_mib=500)}}
    assert not found({GPU: held((10, 1700), (11, 1800))}, {10: 1, 11: 1}, allowances).above
    assert found({GPU: held((10, 1700), (11, 1861))}, {10: 1, 11: 1}, allowances).above


def test_what_kernels_take_is_allowed_for_each_process() -> None:
    allowances = {1: {GPU: Allowance(2048, code_mib=256)}}
    amounts = [(10 + n, 500) for n in range(6)]
    owners = {pid: 1 for pid, _ in amounts}
    assert not found({GPU: held(*amounts)}, owners, allowances).above
    assert found({GPU: held(*amounts, (20, 1097))}, {**owners, 20: 1}, allowances).above
    # The tolerance is for one.
    assert found({GPU: held((10, 2561))}, {10: 1}, allowances).above


def test_of_a_device_that_is_not_its_own_a_session_may_hold_nothing() -> None:
    devices = {GPU: held((10, 100)), OTHER: held((10, 600))}
    assert found(devices, {10: 1}).above == {1: OverLimit(1, OTHER, 600, 0)}


def test_what_nvml_does_not_tell_is_not_known_and_what_is_known_is_enough() -> None:
    assert found({GPU: "GPU is lost"}, {}) == Found({}, frozenset({1, 2}), frozenset())
    some = found({GPU: held((10, None), (11, 100))}, {10: 1, 11: 1})
    assert (some.above, some.unknown) == ({}, {1})
    more = found({GPU: held((10, None), (11, 3000))}, {10: 1, 11: 1})
    assert (set(more.above), more.unknown) == ({1}, frozenset())


def test_whose_process_it_is_not_is_a_stranger_and_nobody_is_blamed() -> None:
    seen = found({GPU: held((10, 100), (66, 9000), (50, 9000))}, {10: 1, 50: 5})
    assert (seen.strangers, seen.above) == ({(GPU, 66)}, {}), "one of a session that is not watched is none"


# --- From look to look ---


def steps(looks: Iterable[tuple[float, bool | None]]) -> list[Step]:
    """Return what follows from each look: when it was, and whether the session was above."""
    told, strikes = [], Strikes()
    for at_s, is_above in looks:
        strikes, step = after_look(strikes, at_s=at_s, is_above=is_above, every_s=EVERY_S)
        told.append(step)
    return told


NOTHING, WARN, END, TAKE_BACK = Step.NOTHING, Step.WARN, Step.END, Step.TAKE_BACK


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(0, True), (10, True), (20, True)], [WARN, WARN, END]),
        # Looks may follow each other at once: a warning is given time.
        (
            [(0, True), (1, True), (9, True), (10, True), (11, True), (20, True)],
            [WARN, *[NOTHING] * 2, WARN, NOTHING, END],
        ),
        ([(0, True), (10, False), (20, False)], [WARN, TAKE_BACK, NOTHING]),
        # Freed around every other look.
        (
            [(0, True), (10, False), (20, True), (30, False), (40, True)],
            [WARN, TAKE_BACK, WARN, TAKE_BACK, END],
        ),
        # Hours later it is another matter.
        ([(0, True), (10, True), (900, False), (910, True)], [WARN, WARN, TAKE_BACK, WARN]),
        # What is not known neither ends, nor clears, nor lets strikes fade.
        ([(0, True), (10, True), (910, None), (920, True)], [WARN, WARN, NOTHING, END]),
    ],
)
def test_strikes_gather_and_fade_slowly(looks: list[tuple[float, bool | None]], expected: list[Step]) -> None:
    assert steps(looks) == expected


def time_to_end_s(part: float, seed: int, *, within_s: float) -> float | None:
    """Return when a session is ended that is above for a part of the time, as it likes; None: not within this time."""
    chance = random.Random(seed)
    at_s, strikes = 0.0, Strikes()
    while at_s < within_s:
        at_s += min(chance.expovariate(1 / EVERY_S), LONGEST_PAUSE * EVERY_S)
        strikes, step = after_look(strikes, at_s=at_s, is_above=chance.random() < part, every_s=EVERY_S)
        if step is Step.END:
            return at_s
    return None


@pytest.mark.parametrize(("part", "mean_s"), [(1.0, 60), (0.75, 75), (0.5, 110), (0.25, 250), (0.1, 1800)])
def test_who_is_above_for_a_part_of_the_time_is_ended_in_a_time_that_docs_isolation_says(
    part: float, mean_s: float
) -> None:
    """Looks come at instants that nobody can foresee, so that each finds it above with just this probability."""
    ends = [time_to_end_s(part, seed, within_s=100 * mean_s) for seed in range(300)]
    assert None not in ends
    assert sum(e or 0 for e in ends) / len(ends) <= mean_s


@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from([False, None]))))
def test_who_is_never_found_above_is_never_told_anything(
    looks: list[tuple[float, bool | None]],
) -> None:
    at_s, told = 0.0, []
    for gap, is_above in looks:
        at_s += gap
        told.append((at_s, is_above))
    assert set(steps(told)) <= {NOTHING}


@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from([True, False, None])), max_size=60))
def test_nobody_is_ended_without_warnings_and_time_to_heed_them(
    looks: list[tuple[float, bool | None]],
) -> None:
    at_s, strikes, warned_at = 0.0, Strikes(), []
    for gap, is_above in looks:
        at_s += gap
        strikes, step = after_look(strikes, at_s=at_s, is_above=is_above, every_s=EVERY_S)
        if step is END:
            assert is_above
            assert len(warned_at) >= STRIKES - 1
            assert at_s - warned_at[0] >= (STRIKES - 1) * EVERY_S
            break
        if step is WARN:
            warned_at.append(at_s)


@given(st.lists(st.floats(FADES_IN * EVERY_S, 10 * FADES_IN * EVERY_S), min_size=1, max_size=50))
def test_a_mishap_now_and_then_is_forgiven(pauses: list[float]) -> None:
    """A strike fades in the time between two mishaps: there can be any number of them."""
    at_s, told = 0.0, []
    for pause_s in pauses:
        told += [(at_s, True), (at_s + pause_s / 2, False), (at_s + pause_s, False)]
        at_s += pause_s + 1
    assert END not in steps(told)


def test_the_words_have_the_figures() -> None:
    above = OverLimit(1, GPU, 3000, 2048)
    assert "holds 3000 MiB" in warning_words(above, 1.0)
    assert "limit of 2048 MiB; if it is found above it 2 times more" in warning_words(above, 1.0)
    assert "found above it once more" in warning_words(above, 1.9)
    assert "3000 MiB" in above.ended
    assert "2048 MiB" in above.ended


# --- What is done ---


class Scheduler:
    """Remembers what it was told; while it is ``away`` nothing can be done."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, str]] = []
        self.away: set[int] = set()
        self.recorded: list[tuple[int, str, str]] = []

    def tell(self, what: str, session_id: int, words: str) -> Session:
        if session_id in self.away:
            raise OSError("the database does not answer")
        self.told.append((what, session_id, words))
        return session(session_id)

    async def warn(self, session_id: int, message: str | None) -> Session:
        return self.tell("warn" if message else "take back", session_id, message or "")

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        return self.tell(cause, session_id, message or "")

    async def record(self, session: Session, action: str, details: str) -> None:
        self.recorded.append((session.id, action, details))


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
    made = Isolation(settings, (Node("lab", "default", 1000, 1024, (device,)),))
    made.open(own_root=False, installation="abc")
    return made


class World:
    """A watchdog, which sees what a test lays out every ten seconds; a session's processes begin with its number."""

    def __init__(self, isolation: Isolation, *live: Session) -> None:
        self.scheduler = Scheduler()
        self.live = live or (session(1),)
        self.at_s = 0.0
        self.watchdog = Watchdog(
            isolation, self.scheduler, self.scheduler.record, every_s=EVERY_S, tolerance_mib=512
        )

    async def sees(self, *uses: DeviceUse | str) -> list[tuple[str, int]]:
        """Return what was done at these looks."""
        before = len(self.scheduler.told)
        for use in uses:
            self.at_s += EVERY_S
            pids = [p.pid for p in use.processes] if isinstance(use, DeviceUse) else []
            seen = snapshot({GPU: use}, {pid: pid // 10 for pid in pids if pid < 100}, self.at_s)
            await self.watchdog.observe(seen, self.live)
        return [(what, who) for what, who, _ in self.scheduler.told[before:]]


ABOVE = held((10, 3000))


async def test_a_session_is_warned_then_ended_with_figures_and_each_is_in_the_audit_log(
    isolation: Isolation,
) -> None:
    world = World(isolation)
    assert await world.sees(ABOVE, ABOVE, ABOVE) == [("warn", 1), ("warn", 1), ("ISOLATION_FAILED", 1)]
    (_, _, words), _, (_, _, last) = world.scheduler.told
    assert "3000 MiB" in words
    assert "2048 MiB" in last
    assert [(who, action) for who, action, _ in world.scheduler.recorded] == [
        (1, "watchdog.strike"),
        (1, "watchdog.strike"),
        (1, "watchdog.end"),
    ]
    assert world.scheduler.recorded[1][2] == (
        f"holds 3000 MiB of GPU {GPU}, above its limit of 2048 MiB; 2.0 of 3 strikes"
    )


async def test_a_session_that_frees_its_memory_around_every_other_look_is_ended_too(
    isolation: Isolation,
) -> None:
    world = World(isolation)
    done = await world.sees(*[ABOVE, held()] * 3)
    assert [what for what, _ in done] == [
        "warn",
        "take back",
        "warn",
        "take back",
        "ISOLATION_FAILED",
        "take back",
    ]


async def test_nobody_is_ended_whose_warnings_could_not_be_written(isolation: Isolation) -> None:
    world = World(isolation, session(1), session(2))
    both = held((10, 3000), (20, 5000))
    world.scheduler.away = {1}
    assert await world.sees(both, both, both) == [("warn", 2)] * 2 + [("ISOLATION_FAILED", 2)], (
        "one hides no other"
    )
    world.scheduler.away = set()
    assert (await world.sees(both))[0] == ("warn", 1)


async def test_an_end_and_a_taking_back_that_could_not_be_written_are_tried_again(
    isolation: Isolation,
) -> None:
    world = World(isolation, session(1), session(2))
    await world.sees(ABOVE, held((10, 3000), (20, 5000)))
    world.scheduler.away = {1, 2}
    assert await world.sees(held((10, 3000), (20, 100))) == []
    world.scheduler.away = set()
    assert await world.sees(held((10, 3000), (20, 100))) == [("ISOLATION_FAILED", 1), ("take back", 2)]


async def test_nvml_that_fails_is_said_loudly_and_once_and_nobody_is_ended(
    isolation: Isolation, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(isolation)
    logging.getLogger("fgpu").propagate = True
    with caplog.at_level(logging.WARNING, "fgpu.watchdog"):
        await world.sees(ABOVE, ABOVE)
        assert await world.sees(*["GPU is lost"] * 9, held((10, None))) == []
        assert await world.sees(ABOVE) == [("ISOLATION_FAILED", 1)]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert sum("GPU is lost" in e for e in errors) == 1
    assert sum("tells no amount for processes [10]" in e for e in errors) == 1
    assert sum("sees again" in r.getMessage() for r in caplog.records) == 2


async def test_a_stranger_is_logged_once_and_again_only_as_another(
    isolation: Isolation, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("fgpu").propagate = True
    with caplog.at_level(logging.WARNING, "fgpu.watchdog"):
        await World(isolation).sees(*[held((666, 10))] * 3, held((666, 10), (777, 10)))
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
    assert await World(isolation, other, session(2)).sees(*[held((10, 8000))] * 4) == []


def test_logs_that_sessions_let_grow_are_emptied(isolation: Isolation) -> None:
    own = isolation.folder(7)
    own.mkdir(parents=True)
    (own / "log").write_bytes(b"x" * (2 << 20))
    other = isolation.folder(8)
    other.mkdir()
    (other / "log").write_bytes(b"x" * 1000)
    isolation.trim_files()
    assert [(folder / "log").stat().st_size for folder in (own, other)] == [0, 1000]


def test_blocks_behind_the_end_of_a_file_are_cut_off_too(isolation: Isolation) -> None:
    own = isolation.folder(7)
    own.mkdir(parents=True)
    (own / "log").write_bytes(b"x" * 1000)
    subprocess.run(["fallocate", "--keep-size", "-l", "64M", str(own / "log")], check=True)
    assert (own / "log").stat().st_size == 1000
    isolation.trim_files()
    assert (own / "log").stat().st_blocks == 0


def test_an_account_that_a_session_lets_grow_is_cut_back(
    isolation: Isolation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    isolation.host = replace(isolation.host, accounting=tmp_path / "memory")
    folders = [tmp_path / "memory" / name for name in ("7", "8")]
    for folder in folders:
        folder.mkdir(parents=True)
        with make_zeros(folder / "accounting", REGION_BYTES).open("r+b") as file:
            file.write(b"kept")
            file.seek(0, 2)
            file.write(b"x" * (1 << 20))
    logging.getLogger("fgpu").propagate = True
    with caplog.at_level(logging.WARNING, "fgpu"):
        for _ in range(2):
            isolation.trim_files()
    for folder in folders:
        data = (folder / "accounting").read_bytes()
        assert (len(data), data[:4]) == (REGION_BYTES, b"kept")
    assert sum("accounting file grow" in r.getMessage() for r in caplog.records) == 2, "once for each"
