"""The meter's looks: what is told of a session and kept, and that what is not known is never told as nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from sessions import DEVICES, GPU, Clock, process, session

from fgpu_scheduler import (
    Meters,
    Node,
    Session,
    SessionMeasurements,
    SessionState,
    Share,
    ShareMode,
    Store,
    StoreUnavailable,
)
from fgpuspawner.isolation.gpu_poller import GpuSnapshot, NvmlSource
from fgpuspawner.isolation.limits import DeviceLimit, Limits, write
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse
from fgpuspawner.meter.model import KEPT_S, METERS, Meter, Point
from fgpuspawner.meter.reading import Lent
from fgpuspawner.meter.sampler import Sampler, points_with
from fgpuspawner.meter.tally import mean_lent
from fgpuspawner.settings import FGPU


@pytest.mark.parametrize("every_s", [1, 7, 10, 60])
def test_points_are_the_newest_and_at_least_ten_seconds_apart(every_s: int) -> None:
    points: tuple[Point, ...] = ()
    for at_s in range(0, 4000, every_s):
        points = points_with(points, Point(at_s, 1, 1.0))
        assert points[-1].at_s == at_s
    times = [p.at_s for p in points]
    assert all(b - a >= 10 for a, b in itertools.pairwise(times[:-1]))
    assert times[-1] - times[0] < KEPT_S
    assert times[-1] - times[0] >= KEPT_S - 2 * max(10, every_s)
    assert len(times) <= KEPT_S // 10 + 2


# --- Looking ---


class Scheduler:
    def __init__(self, *sessions: Session) -> None:
        self.sessions = sessions

    async def live(self) -> tuple[Session, ...]:
        return self.sessions


Use = Mapping[str, DeviceUse | str]


LAB = Node("lab", "default", 1000, 1024, (DEVICES[GPU],))


class World:
    """A node with one GPU of 2 fGPU, and a meter that looks every 10 s."""

    def __init__(self, folder: Path, *sessions: Session) -> None:
        self.data = folder
        self.clock = Clock()
        self.scheduler = Scheduler(*sessions)
        self.store = Store("sqlite://")
        self.store.open()
        self.meters = Meters(self.store)
        self.isolation = Isolation(FGPU(data_dir=str(folder), isolation="none"), (LAB,))
        self.isolation.open(own_root=False, installation="abc")
        self.sampler = self.another()
        self.script: list[Use] = [{GPU: DeviceUse((process(10, 700, 20.0),))}]

    def another(self) -> Sampler:
        """Return the meter of a Hub that was started again."""
        return Sampler(
            self.isolation,
            self.scheduler,
            self.meters,
            self.clock,
            data=self.data,
            every_s=10,
            poll_every_s=10,
        )

    async def look(self, *script: Use, times: int = 1) -> Meter | None:
        """Look, 10 s after the look before; return what is told of session 1. The last of what is seen is seen again."""
        if script:
            self.script = list(script)
        for _ in range(times):
            self.clock.now += 10
            devices = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            uses = [use for use in devices.values() if isinstance(use, DeviceUse)]
            # The processes of a session begin with its number.
            owners = {p.pid: p.pid // 10 for use in uses for p in use.processes if p.pid < 100}
            seen = GpuSnapshot(NvmlSource("libnvidia-ml.so.1"), float(self.clock.now), devices, owners)
            await self.sampler.observe(seen, self.scheduler.sessions)
            await self.sampler.publish()
        told = METERS.read(self.data).of(1, self.clock.now)
        return told.now if told else None

    def kept(self) -> SessionMeasurements | None:
        return self.meters.of([1]).get(1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, session(1))


async def test_snapshot_gives_use_and_limit(world: World) -> None:
    assert await world.look() == Meter(1010, 700, 2048, 20.0, 25, 20.0, None)
    # Only sessions that run are measured.
    world.scheduler.sessions = (session(1, state=SessionState.TERMINATING),)
    assert await world.look() is None


async def test_received_compute_is_the_mean_of_the_last_minute(world: World) -> None:
    uses = [{GPU: DeviceUse((process(10, 700, sm),))} for sm in (90.0, 10.0, None, 20.0, 30.0, 40.0, 0.0)]
    for use in uses:
        meter = await world.look(use)
    assert meter is not None
    assert meter.compute_received_percent == (10 + 20 + 30 + 40 + 0) / 5


async def test_a_driver_that_fails_makes_it_unknown_and_is_no_sample(world: World) -> None:
    await world.look()
    meter = await world.look({GPU: "GPU is lost"})
    assert meter is not None
    assert (meter.memory_used_mib, meter.sm_percent) == (None, None)
    assert meter.trouble == f"GPU {GPU}: GPU is lost"
    assert meter.compute_received_percent == 20.0, "of what is known of the last minute"
    await world.sampler.save(world.clock.now)
    kept = world.kept()
    assert kept is not None
    assert (kept.samples, kept.peak_mib) == (1, 700)


async def test_session_is_unknown_after_a_long_gap(world: World) -> None:
    assert (await world.look()) is not None
    world.clock.now += 60
    await world.sampler.publish()
    told = METERS.read(world.data).of(1, world.clock.now + 1)
    assert told is not None
    assert told.now.memory_used_mib is None
    assert "nothing has been measured since" in str(told.now.trouble)


def lending(world: World, *lenders: int) -> None:
    """Have these sessions lend what is idle, as their limits files say."""
    for session_id in lenders:
        folder = world.isolation.folder(session_id)
        folder.mkdir(parents=True)
        own = DeviceLimit(
            GPU,
            2048,
            8192,
            300,
            25,
            ShareMode.MEMORY_COMPUTE,
            ((25 * session_id - 25, 25 * session_id),),
            session_id,
        )
        write(folder, Limits(session_id, "charge", (own,)))


async def test_lent_compute_is_published_and_saved(world: World) -> None:
    lending(world, 1, 2)
    world.scheduler.sessions = (session(1), session(2), session(3))
    # Session 1 computes, 2 rests, 3 is strict and rests as well.
    busy: Use = {GPU: DeviceUse((process(10, 700, 75.0), process(20, 10, 0.0)))}
    resting: Use = {GPU: DeviceUse((process(10, 700, 25.0), process(20, 10, 0.0)))}
    meter = await world.look(busy)
    assert meter is not None
    assert (meter.compute_borrowed_percent, meter.compute_lent_percent) == (50.0, 0.0)
    assert (meter.memory_used_mib, meter.memory_context_mib) == (700, 300)
    meter = await world.look(resting)
    assert meter is not None
    assert (meter.compute_borrowed_percent, meter.compute_received_percent) == (25.0, 50.0)
    told = {i: METERS.read(world.data).of(i, world.clock.now) for i in (2, 3)}
    # It borrowed from session 2 and from free capacity, which are equal.
    assert told[2] is not None
    assert told[2].now.compute_lent_percent == 12.5
    assert told[3] is not None
    assert (told[3].now.compute_borrowed_percent, told[3].now.compute_lent_percent) == (None, None)
    world.sampler = world.another()
    await world.sampler.save(world.clock.now)
    world.scheduler.sessions = ()
    await world.look()
    kept = world.meters.of([1, 2, 3])
    assert mean_lent(kept[1]) == Lent(75.0, 50.0, 0.0), "the second look was lost with the Hub"
    assert mean_lent(kept[3]) is None


async def test_lent_compute_is_unknown_with_an_unknown_neighbour(world: World) -> None:
    lending(world, 1)
    world.scheduler.sessions = (session(1), session(2))
    meter = await world.look({GPU: DeviceUse((process(10, 700, 75.0), process(20, 10, None)))})
    assert meter is not None
    assert (meter.compute_borrowed_percent, meter.compute_lent_percent) == (None, None)


# --- What is kept ---


async def test_what_was_counted_is_kept_once_a_minute_and_at_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    whose: list[list[int]] = []
    save = Meters.save

    def counted(self: Meters, measured: Sequence[SessionMeasurements]) -> None:
        writes.append(world.clock.now)
        whose.append([one.session_id for one in measured])
        save(self, measured)

    monkeypatch.setattr(Meters, "save", counted)
    await world.look(times=14)
    assert writes == [1010, 1070, 1130]
    world.scheduler.sessions = ()
    await world.look()
    assert writes[-1] == 1150
    await world.look(times=6)
    assert whose == [[1], [1], [1], [1], []], "once, and not again"
    kept = world.kept()
    assert kept is not None
    assert (kept.samples, kept.covered_s, kept.peak_mib, kept.gpu_millionths) == (14, 140, 700, 250_000)
    assert (kept.p95_mib, kept.sm_p95_percent, kept.limit_mib) == (700, 20, 2048)


async def test_a_hub_that_is_killed_loses_a_minute_at_most_and_goes_on(world: World) -> None:
    await world.look(
        {GPU: DeviceUse((process(10, 1500, 20.0),))}, {GPU: DeviceUse((process(10, 700, 20.0),))}, times=9
    )
    world.sampler = world.another()
    await world.look()
    world.scheduler.sessions = ()
    await world.look()
    kept = world.kept()
    assert kept is not None
    assert kept.peak_mib == 1500
    # Of nine looks the last two were lost with the Hub; one came after.
    assert kept.samples == 7 + 1


async def test_a_database_that_is_away_loses_nothing_of_a_session_that_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.look(times=3)
    world.scheduler.sessions = ()
    with monkeypatch.context() as away:

        def fails(self: Meters, measured: Sequence[SessionMeasurements]) -> None:
            raise StoreUnavailable("the database is away")

        away.setattr(Meters, "save", fails)
        with pytest.raises(StoreUnavailable):
            await world.look()
    await world.look(times=6)
    kept = world.kept()
    assert kept is not None
    assert kept.samples == 3


async def test_energy_is_counted_between_looks_and_not_over_gaps(tmp_path: Path) -> None:
    world = World(tmp_path, session(1, Share(GPU, 2000, 8192, 100)))

    def use(energy_mj: int | None) -> Use:
        return {GPU: DeviceUse((), energy_mj=energy_mj)}

    for energy in (1000, 1400, 1500):
        await world.look(use(energy))
    world.clock.now += 3600
    await world.look(use(900_000))
    await world.look(use(900_050))
    # The driver was loaded again.
    await world.look(use(10))
    await world.look(use(30))
    await world.sampler.save(world.clock.now)
    kept = world.kept()
    assert kept is not None
    assert (kept.energy_mj, kept.energy_estimated) == (500 + 50 + 20, False)


async def test_energy_of_a_session_begins_with_its_second_look(tmp_path: Path) -> None:
    other = session(2, Share(GPU, 1500, 6144, 75))
    world = World(tmp_path, other)
    for energy in (1000, 3000, 7000):
        await world.look({GPU: DeviceUse((), energy_mj=energy)})
        # It began between the first two snapshots, so its part of their energy is unknown.
        world.scheduler.sessions = (session(1), other)
    await world.sampler.save(world.clock.now)
    kept = world.meters.of([1, 2])
    assert {i: (m.energy_mj, m.energy_estimated) for i, m in kept.items()} == {
        1: (1000, True),
        2: (4500, True),
    }
