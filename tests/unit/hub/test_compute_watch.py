"""Sessions that compute without libfgpu are warned and ended; sessions under libfgpu never are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sessions import GPU, session

from fgpu_scheduler import EndCause, FGPUError, Session, SessionState, Share, ShareMode
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.hub.compute_watch import STRIKE_AFTER_S, ComputeWatch
from fgpuspawner.isolation.gpu_poller import GpuSnapshot, NvmlSource
from fgpuspawner.isolation.nvml_reader import DeviceUse, ProcessUse
from fgpuspawner.isolation.report import BadReport, SlotReport

PLACE = NvmlSource("libnvidia-ml.so.1")


def computing(*percents: tuple[int, float | None]) -> DeviceUse:
    """Return the compute of processes, each by its number in the session."""
    return DeviceUse(tuple(ProcessUse(1000 + pid, 0, sm, None, pid, "x") for pid, sm in percents))


class World:
    """A session with a snapshot every five seconds. Its processes run unless they have ``ended``."""

    def __init__(self, *, ends: bool = True, one: Session | None = None) -> None:
        self.session = one or session()
        self.slots: set[int] = set()
        self.behind: set[int] = set()
        self.ended: set[int] = set()
        self.lately: set[int] = set()
        self.failure: FGPUError | None = None
        self.asked: list[Sequence[int]] = []
        self.told: list[tuple[str, str]] = []
        self.recorded: list[tuple[str, str]] = []
        self.again: list[tuple[NvmlSource, float]] = []
        self.at_s = 0.0
        self.watch = ComputeWatch(
            self, self.record, self.ask, snapshot_soon=lambda *what: self.again.append(what), ends=ends
        )

    async def ask(self, _: Session, processes: Sequence[int]) -> SlotReport:
        self.asked.append(processes)
        if self.failure is not None:
            raise self.failure
        running = tuple(p for p in processes if p not in self.ended)
        return SlotReport(1, tuple(self.slots), running, behind=tuple(self.behind), lately=tuple(self.lately))

    async def warn(self, session_id: int, message: str | None) -> Session:
        self.told.append(("warn" if message else "take back", message or ""))
        return self.session

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        self.told.append((cause, message or ""))
        return self.session

    async def record(self, session: Session, action: str, details: str) -> None:
        self.recorded.append((action, details))

    async def sees(self, *uses: DeviceUse | str) -> list[str]:
        """Return the consequences of these snapshots."""
        before = len(self.told)
        for use in uses:
            self.at_s += STRIKE_AFTER_S
            pids = [p.pid for p in use.processes] if isinstance(use, DeviceUse) else []
            # Processes from 1900 on belong to no session.
            owners = {pid: 1 for pid in pids if pid < 1900}
            await self.watch.observe(GpuSnapshot(PLACE, self.at_s, {GPU: use}, owners), [self.session])
            await self.watch.answered()
        return [what for what, _ in self.told[before:]]


async def test_program_without_libfgpu_is_warned_twice_then_ended_and_audited() -> None:
    world = World()
    assert await world.sees(*[computing((7, 100))] * 3) == ["warn", "warn", "ISOLATION_FAILED"]
    assert world.told[0][1] == (
        "this session has a program (process 7) that computed 100 % of a GPU around its share of 25 %; if it is found "
        "doing so 2 times more, it is ended. End it, and run a program that is linked dynamically"
    )
    assert "a program (process 7) that computed 100 % of a GPU around its share" in world.told[-1][1]
    assert [action for action, _ in world.recorded] == ["watchdog.strike"] * 2 + ["watchdog.end"]
    assert world.again == [(PLACE, STRIKE_AFTER_S)] * 3, "early snapshots bring the end within 30 seconds"
    assert world.recorded[0][1] == (
        f"has a program (process 7) that computed 100 % of a GPU around its share of 25 % ({GPU}); a statically linked "
        "program does that, for one; 1.0 of 3 strikes"
    )


async def test_without_ends_each_strike_is_a_warning_and_no_session_is_ended() -> None:
    world = World(ends=False)
    assert await world.sees(*[computing((7, 100))] * 5) == ["warn"] * 5
    assert "it is ended" not in world.told[0][1]
    assert {action for action, _ in world.recorded} == {"watchdog.strike"}


@pytest.mark.parametrize(
    "use",
    [
        computing((7, 100)),
        computing(*[(n, 6.25) for n in range(1, 17)]),
        computing(*[(n, 100.0) for n in range(1, 17)]),
    ],
    ids=["long kernels", "sixteen loaders", "sixteen that are lent the GPU"],
)
async def test_processes_under_libfgpu_are_left_alone(use: DeviceUse) -> None:
    world = World()
    world.slots = set(range(1, 17))
    assert await world.sees(*[use] * 20) == []


async def test_process_with_outdated_limits_is_warned_and_ended() -> None:
    world = World()
    world.slots, world.behind = {7, 8}, {7}
    assert await world.sees(*[computing((7, 50), (8, 10))] * 3) == ["warn", "warn", "ISOLATION_FAILED"]
    assert world.told[0][1].endswith("End it, and start it again: it cannot read its changed limits")
    assert world.told[-1][1].endswith("also after a warning; it could not read its changed limits")
    assert "computed 50 % of a GPU around its share of 25 % (GPU-1f); it could not" in world.recorded[0][1]


async def test_session_with_lent_compute_is_asked_once_a_minute() -> None:
    world = World()
    world.slots = {7}
    assert await world.sees(*[computing((7, 90))] * 720) == []
    assert 60 <= len(world.asked) <= 68, "720 snapshots in an hour"


async def test_new_process_is_asked_for_at_once_while_the_last_answer_is_trusted() -> None:
    world = World()
    world.slots = {7}
    await world.sees(*[computing((7, 90))] * 100)
    asked = len(world.asked)
    assert await world.sees(computing((7, 90), (9, 40))) == ["warn"]
    world.slots = {7, 9}
    assert await world.sees(*[computing((7, 90), (9, 40))] * 100) == ["take back"]
    assert len(world.asked) > asked + 1
    # Its number now belongs to a process without libfgpu.
    world.slots = {7}
    await world.sees(computing((7, 20)))
    assert await world.sees(computing((7, 20), (9, 70))) == ["warn"]


async def test_resized_session_is_asked_again() -> None:
    world = World()
    world.slots = {7}
    await world.sees(*[computing((7, 90))] * 100)
    world.session, world.behind = session(1, Share(GPU, 500, 2048, 10)), {7}
    assert await world.sees(computing((7, 90))) == ["warn"]


@pytest.mark.parametrize(
    ("held", "around", "told"),
    [(0, 35, []), (90, 10, []), (20, 14, []), (20, 16, ["warn"]), (90, 11, ["warn"])],
)
async def test_compute_under_libfgpu_counts_as_the_share_at_most(
    held: float, around: float, told: list[str]
) -> None:
    world = World()
    world.slots = {1}
    # A process of no session counts for none.
    assert await world.sees(computing((1, held), (7, around), (999, 100))) == told


@pytest.mark.parametrize(
    ("ended", "lately", "is_held"),
    [(True, True, True), (True, False, False), (False, True, False)],
    ids=["ended, and had a slot", "ended without one", "had one, and executes another program"],
)
async def test_process_without_a_slot_counts_as_held_only_if_it_had_one_and_has_ended(
    ended: bool, lately: bool, is_held: bool
) -> None:
    world = World()
    world.ended, world.lately = {7} if ended else set(), {7} if lately else set()
    told = await world.sees(*[computing((7, 100))] * 3)
    assert told == ([] if is_held else ["warn", "warn", "ISOLATION_FAILED"])


async def test_short_programs_without_libfgpu_in_turn_are_ended() -> None:
    relay = [computing((n, 100), (n + 1, 100)) for n in range(1, 40)]
    world = World()
    world.ended = set(range(50))
    assert await world.sees(*relay[:3]) == ["warn", "warn", "ISOLATION_FAILED"]
    honest = World()
    honest.ended = honest.lately = set(range(50))
    assert await honest.sees(*relay) == []


@pytest.mark.parametrize("use", ["GPU is lost", computing((7, None)), computing((7, None), (8, 100))])
async def test_unknown_compute_ends_no_session(use: DeviceUse | str) -> None:
    world = World()
    assert await world.sees(*[use] * 9) == []
    assert world.asked == []


async def test_driver_without_compute_figures_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fgpu.watchdog"):
        await World().sees(*[computing((7, None))] * 4)
    assert [r.getMessage() for r in caplog.records] == [
        f"GPU {GPU} does not tell how much each process computes: compute without libfgpu is not noticed"
    ]


async def test_session_that_prevents_the_answer_is_warned_and_ended() -> None:
    world = World()
    world.failure = BadReport("the check ended with status 137")
    assert await world.sees(*[computing((7, 100))] * 3) == ["warn", "warn", "ISOLATION_FAILED"]
    assert world.told[0][1].startswith(
        "this session has programs that computed 100 % of a GPU around its share"
    )
    assert world.told[-1][1].endswith(
        "also after a warning; no answer told whether libfgpu holds them: the check ended with status 137"
    )


async def test_silent_engine_ends_no_session_and_keeps_strikes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    await world.sees(computing((7, 100)), computing((7, 100)))
    world.failure = EngineSilent("its machine does not answer")
    with caplog.at_level(logging.WARNING, "fgpu.watchdog"):
        assert await world.sees(*[computing((7, 100))] * 5) == []
    assert "it cannot be told whether around libfgpu: its machine does not answer" in caplog.text
    world.failure = None
    assert await world.sees(computing((7, 100))) == ["ISOLATION_FAILED"]


@pytest.mark.parametrize(
    "one",
    [
        session(isolation="none"),
        session(isolation="mig"),
        session(1, Share(GPU, 500, 2048, 100)),
        session(1, Share(GPU, 500, 2048, 25, ShareMode.MEMORY)),
        replace(session(), state=SessionState.TERMINATING),
    ],
    ids=["no isolation", "by hardware", "a whole GPU", "memory only", "terminating"],
)
async def test_session_without_a_share_of_compute_is_not_watched(one: Session) -> None:
    world = World(one=one)
    assert await world.sees(*[computing((7, 100))] * 4) == []
    assert world.asked == []
