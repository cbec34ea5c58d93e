"""The watchdog warns and ends sessions above their limit of GPU memory; unknown use never counts as none."""

from __future__ import annotations

import logging
import random
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import GPU, MIB, OTHER, session

from fgpu_scheduler import Device, EndCause, Node, Session, SessionState
from fgpuspawner.hub.watchdog import (
    STRIKES,
    Allowance,
    Consequence,
    Found,
    OverLimit,
    Strikes,
    Watchdog,
    compare,
    next_strikes,
)
from fgpuspawner.isolation.backends import REGION_BYTES
from fgpuspawner.isolation.files import make_zeros
from fgpuspawner.isolation.gpu_poller import LONGEST_PAUSE, GpuSnapshot, NvmlSource
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse
from fgpuspawner.settings import FGPU

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


# --- One check ---


@pytest.mark.parametrize(
    ("allowance", "amounts", "is_above"),
    [
        (Allowance(2048), [2560], False),
        (Allowance(2048), [2560 + 1 / MIB], True),
        (Allowance(2048), [1500, 1061], True),
        # Contexts that are not charged to the limit are allowed for each process, and code for each but the first.
        (Allowance(2048, context_mib=500), [1700, 1800], False),
        (Allowance(2048, context_mib=500), [1700, 1861], True),
        (Allowance(2048, code_mib=256), [2561], True),
        (Allowance(2048, code_mib=256), [500] * 6, False),
        (Allowance(2048, code_mib=256), [*[500] * 6, 1097], True),
    ],
    ids=str,
)
def test_session_above_limit_and_tolerance_is_found(
    allowance: Allowance, amounts: list[float], is_above: bool
) -> None:
    uses = tuple(ProcessUse(n, int(mib * MIB), 0.0, 0, n, "x") for n, mib in enumerate(amounts, 10))
    owners = {use.pid: 1 for use in uses}
    assert (1 in found({GPU: DeviceUse(uses)}, owners, {1: {GPU: allowance}}).above) is is_above


def test_each_session_is_compared_with_its_own_limit_on_each_device() -> None:
    devices = {GPU: held((10, 1500), (11, 1500), (20, 4000))}
    assert found(devices, {10: 1, 11: 1, 20: 2}).above == {1: OverLimit(1, GPU, 3000, 2048)}
    devices = {GPU: held((10, 100)), OTHER: held((10, 600))}
    assert found(devices, {10: 1}).above == {1: OverLimit(1, OTHER, 600, 0)}


def test_session_without_figures_is_unknown_unless_the_known_ones_are_above() -> None:
    assert found({GPU: "GPU is lost"}, {}) == Found({}, frozenset({1, 2}), frozenset())
    some = found({GPU: held((10, None), (11, 100))}, {10: 1, 11: 1})
    assert (some.above, some.unknown) == ({}, {1})
    more = found({GPU: held((10, None), (11, 3000))}, {10: 1, 11: 1})
    assert (set(more.above), more.unknown) == ({1}, frozenset())


def test_unknown_process_is_not_attributed_to_any_session() -> None:
    seen = found({GPU: held((10, 100), (66, 9000), (50, 9000))}, {10: 1, 50: 5})
    assert (seen.unknown_processes, seen.above) == ({(GPU, 66)}, {}), (
        "a process of an unwatched session is not unknown"
    )


# --- From check to check ---


def steps(looks: Iterable[tuple[float, bool | None]]) -> list[Consequence]:
    """Return the consequence of each check, given its instant and whether the session was above."""
    told, strikes = [], Strikes()
    for at_s, is_above in looks:
        strikes, step = next_strikes(strikes, at_s=at_s, is_above=is_above, every_s=EVERY_S)
        told.append(step)
    return told


NOTHING, WARN, END, WITHDRAW = Consequence.NOTHING, Consequence.WARN, Consequence.END, Consequence.WITHDRAW


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(0, True), (10, True), (20, True)], [WARN, WARN, END]),
        # Checks may follow each other at once: a warning is given time.
        (
            [(0, True), (1, True), (9, True), (10, True), (11, True), (20, True)],
            [WARN, *[NOTHING] * 2, WARN, NOTHING, END],
        ),
        ([(0, True), (10, False), (20, False)], [WARN, WITHDRAW, NOTHING]),
        # Memory is freed before every other check.
        (
            [(0, True), (10, False), (20, True), (30, False), (40, True)],
            [WARN, WITHDRAW, WARN, WITHDRAW, END],
        ),
        # Strikes have faded after a long time.
        ([(0, True), (10, True), (900, False), (910, True)], [WARN, WARN, WITHDRAW, WARN]),
        # Unknown use neither ends, nor clears, nor lets strikes fade.
        ([(0, True), (10, True), (910, None), (920, True)], [WARN, WARN, NOTHING, END]),
    ],
)
def test_strikes_gather_and_fade_slowly(
    looks: list[tuple[float, bool | None]], expected: list[Consequence]
) -> None:
    assert steps(looks) == expected


def time_to_end_s(part: float, seed: int, *, within_s: float) -> float | None:
    """Return when a session that is above for a part of the time is ended; None if not within this time."""
    chance = random.Random(seed)
    at_s, strikes = 0.0, Strikes()
    while at_s < within_s:
        at_s += min(chance.expovariate(1 / EVERY_S), LONGEST_PAUSE * EVERY_S)
        strikes, step = next_strikes(strikes, at_s=at_s, is_above=chance.random() < part, every_s=EVERY_S)
        if step is Consequence.END:
            return at_s
    return None


@pytest.mark.parametrize(("part", "mean_s"), [(1.0, 60), (0.75, 75), (0.5, 110), (0.25, 250), (0.1, 1800)])
def test_mean_time_to_the_end_is_the_one_in_docs_isolation(part: float, mean_s: float) -> None:
    """Checks come at random instants, so each finds the session above with this probability."""
    ends = [time_to_end_s(part, seed, within_s=100 * mean_s) for seed in range(300)]
    assert None not in ends
    assert sum(e or 0 for e in ends) / len(ends) <= mean_s


@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from([True, False, None])), max_size=60))
def test_no_session_is_ended_without_warnings_and_time_to_react(
    looks: list[tuple[float, bool | None]],
) -> None:
    at_s, strikes, warned_at = 0.0, Strikes(), []
    for gap, is_above in looks:
        at_s += gap
        strikes, step = next_strikes(strikes, at_s=at_s, is_above=is_above, every_s=EVERY_S)
        if step is END:
            assert is_above
            assert len(warned_at) >= STRIKES - 1
            assert at_s - warned_at[0] >= (STRIKES - 1) * EVERY_S
            break
        if step is WARN:
            warned_at.append(at_s)


# --- Warnings and ends ---


class Scheduler:
    """A scheduler that records warnings and ends. For sessions in ``away`` both fail."""

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


@pytest.fixture
def isolation(tmp_path: Path) -> Isolation:
    device = Device(GPU, "lab", 0, "Simulated GPU", 8192, 2000, True)
    settings = FGPU(data_dir=str(tmp_path), isolation="none")
    made = Isolation(settings, (Node("lab", "default", 1000, 1024, (device,)),))
    made.open(own_root=False, installation="abc")
    return made


class World:
    """A watchdog that gets a snapshot every ten seconds; the first digit of a process id is its session."""

    def __init__(self, isolation: Isolation, *live: Session) -> None:
        self.scheduler = Scheduler()
        self.live = live or (session(1),)
        self.at_s = 0.0
        self.watchdog = Watchdog(
            isolation, self.scheduler, self.scheduler.record, every_s=EVERY_S, tolerance_mib=512
        )

    async def sees(self, *uses: DeviceUse | str) -> list[tuple[str, int]]:
        """Return the consequences of these snapshots."""
        before = len(self.scheduler.told)
        for use in uses:
            self.at_s += EVERY_S
            pids = [p.pid for p in use.processes] if isinstance(use, DeviceUse) else []
            seen = snapshot({GPU: use}, {pid: pid // 10 for pid in pids if pid < 100}, self.at_s)
            await self.watchdog.observe(seen, self.live)
        return [(what, who) for what, who, _ in self.scheduler.told[before:]]


ABOVE = held((10, 3000))


async def test_session_is_warned_then_ended_with_figures_and_audited(
    isolation: Isolation,
) -> None:
    world = World(isolation)
    assert await world.sees(ABOVE, ABOVE, ABOVE) == [("warn", 1), ("warn", 1), ("ISOLATION_FAILED", 1)]
    (_, _, words), _, (_, _, last) = world.scheduler.told
    assert (
        "3000 MiB of GPU memory, above its limit of 2048 MiB; if it is found above it 2 times more" in words
    )
    assert "3000 MiB of GPU memory, above its limit of 2048 MiB" in last
    assert [(who, action) for who, action, _ in world.scheduler.recorded] == [
        (1, "watchdog.strike"),
        (1, "watchdog.strike"),
        (1, "watchdog.end"),
    ]
    assert world.scheduler.recorded[1][2] == (
        f"holds 3000 MiB of GPU {GPU}, above its limit of 2048 MiB; 2.0 of 3 strikes"
    )


async def test_session_without_stored_warnings_is_not_ended(isolation: Isolation) -> None:
    world = World(isolation, session(1), session(2))
    both = held((10, 3000), (20, 5000))
    world.scheduler.away = {1}
    assert await world.sees(both, both, both) == [("warn", 2)] * 2 + [("ISOLATION_FAILED", 2)], (
        "a failure for one session does not affect the others"
    )
    world.scheduler.away = set()
    assert (await world.sees(both))[0] == ("warn", 1)


async def test_failed_end_and_failed_withdrawal_are_tried_again(
    isolation: Isolation,
) -> None:
    world = World(isolation, session(1), session(2))
    await world.sees(ABOVE, held((10, 3000), (20, 5000)))
    world.scheduler.away = {1, 2}
    assert await world.sees(held((10, 3000), (20, 100))) == []
    world.scheduler.away = set()
    assert await world.sees(held((10, 3000), (20, 100))) == [("ISOLATION_FAILED", 1), ("take back", 2)]


async def test_failing_nvml_is_logged_once_and_ends_no_session(
    isolation: Isolation, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(isolation)
    with caplog.at_level(logging.WARNING, "fgpu.watchdog"):
        await world.sees(ABOVE, ABOVE)
        assert await world.sees(*["GPU is lost"] * 9, held((10, None))) == []
        assert await world.sees(ABOVE) == [("ISOLATION_FAILED", 1)]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert sum("GPU is lost" in e for e in errors) == 1
    assert sum("tells no amount for processes [10]" in e for e in errors) == 1
    assert sum("sees again" in r.getMessage() for r in caplog.records) == 2


async def test_unknown_process_is_logged_once(isolation: Isolation, caplog: pytest.LogCaptureFixture) -> None:
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
async def test_session_without_isolation_or_that_does_not_run_is_not_checked(
    isolation: Isolation, other: Session
) -> None:
    assert await World(isolation, other, session(2)).sees(*[held((10, 8000))] * 4) == []


def test_large_logs_of_sessions_are_emptied(isolation: Isolation) -> None:
    own = isolation.folder(7)
    own.mkdir(parents=True)
    (own / "log").write_bytes(b"x" * (2 << 20))
    other = isolation.folder(8)
    other.mkdir()
    (other / "log").write_bytes(b"x" * 1000)
    isolation.trim_files()
    assert [(folder / "log").stat().st_size for folder in (own, other)] == [0, 1000]
    # Blocks behind the end of a file count too.
    subprocess.run(["fallocate", "--keep-size", "-l", "64M", str(other / "log")], check=True)
    isolation.trim_files()
    assert (other / "log").stat().st_blocks == 0


def test_accounting_file_that_a_session_enlarges_is_truncated(
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
    with caplog.at_level(logging.WARNING, "fgpu"):
        for _ in range(2):
            isolation.trim_files()
    for folder in folders:
        data = (folder / "accounting").read_bytes()
        assert (len(data), data[:4]) == (REGION_BYTES, b"kept")
    assert sum("accounting file grow" in r.getMessage() for r in caplog.records) == 2, "once for each session"
