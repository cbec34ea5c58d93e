"""The meter's looks: what is told of a session and kept, and that what is not known is never told as nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import (
    Device,
    Measured,
    Meters,
    Node,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
    Store,
    StoreUnavailable,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.isolation import machine
from fgpuspawner.isolation.drivers import Drivers
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse, NvmlReader, NvmlUnknown, ProcessUse
from fgpuspawner.meter import sampler as sampler_module
from fgpuspawner.meter.model import KEPT_S, Meter, Point, read_meters
from fgpuspawner.meter.sampler import Sampler, points_with
from fgpuspawner.settings import FGPU

MIB = 2**20
GPU, OTHER = "GPU-1f", "GPU-2a"
DEVICES = {uuid: Device(uuid, "lab", i, "GPU", 8192, 2000, True) for i, uuid in enumerate((GPU, OTHER))}
QUARTER = Share(GPU, 500, 2048, 25)


def process(pid: int, mib: int | None, sm: float | None = 0.0, *, inner: int | None = None) -> ProcessUse:
    return ProcessUse(pid, None if mib is None else mib * MIB, sm, inner or pid, "python3")


def session(session_id: int, *shares: Share, state: SessionState = SessionState.RUNNING) -> Session:
    asked = Request("alice", "", "python", "default", 500, 1000, 2048)
    return Session(session_id, asked, state, 0, placement=Placement("lab", shares or (QUARTER,)))


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


def test_a_clock_that_was_set_back_begins_anew() -> None:
    assert points_with((Point(5000, 1, 1.0),), Point(100, 2, 2.0)) == (Point(100, 2, 2.0),)


# --- Looking ---


class Clock:
    now = 1000

    def now_s(self) -> int:
        return self.now


class Scheduler:
    def __init__(self, *sessions: Session) -> None:
        self.sessions = sessions

    async def live(self) -> tuple[Session, ...]:
        return self.sessions


class OneMachine:
    """An engine's processes, of which those of a session begin with its number."""

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        return {pid: pid // 10 for pid in pids if pid < 100}

    def gpu_reader(self, node_id: str) -> NvmlReader:
        raise EngineSilent(f"node {node_id} is not another machine")


Use = Mapping[str, DeviceUse | NvmlUnknown]


class Reader(NvmlReader):
    """Tells what a test lays out, one look after another, and the last again; remembers what it was asked."""

    script: list[Use | Exception]
    asked: list[Mapping[str, int]]

    async def meter(self, uuids: object, since_us: Mapping[str, int]) -> Any:
        Reader.asked.append(dict(since_us))
        found = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(found, Exception):
            raise found
        return found


LAB = Node("lab", "default", 1000, 1024, (DEVICES[GPU],))


class World:
    """A node with one GPU of 2 fGPU, and a meter that looks every 10 s."""

    def __init__(
        self,
        folder: Path,
        *sessions: Session,
        has: tuple[Node, ...] = (LAB,),
        engine: OneMachine | None = None,
        reader: type[NvmlReader] = Reader,
        **given: Any,
    ) -> None:
        self.data = folder
        self.clock = Clock()
        self.scheduler = Scheduler(*sessions)
        self.store = Store("sqlite://")
        self.store.open()
        self.meters = Meters(self.store)
        settings = FGPU(data_dir=str(folder), isolation="none", **given)
        self.isolation = Isolation(settings, has)
        self.isolation.open(own_root=False, installation="abc")
        self.drivers = Drivers(self.isolation, engine or OneMachine(), make_reader=reader)
        library = machine.folder_of(folder, "lab") / "libnvidia-ml.so.1"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        self.sampler = self.another()

    def another(self) -> Sampler:
        """Return the meter of a Hub that was started again."""
        return Sampler(
            self.isolation,
            self.scheduler,
            self.drivers,
            self.meters,
            self.clock,
            data=self.data,
            every_s=10,
        )

    async def look(self, *script: Use | Exception, times: int = 1) -> Meter | None:
        """Look, 10 s after the look before; return what is told of session 1."""
        if script:
            Reader.script = list(script)
        for _ in range(times):
            self.clock.now += 10
            await self.sampler.look()
        told = read_meters(self.data).of(1, self.clock.now)
        return told.now if told else None

    def kept(self) -> Measured | None:
        return self.meters.of([1]).get(1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    Reader.script, Reader.asked = [{GPU: DeviceUse((process(10, 700, 20.0),), 77)}], []
    return World(tmp_path, session(1))


async def test_a_look_tells_what_a_session_holds_beside_what_it_may(world: World) -> None:
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


async def test_a_look_asks_for_what_came_after_the_last_samples(world: World) -> None:
    await world.look(times=2)
    assert [asked.get(GPU, 0) for asked in Reader.asked] == [0, 77]


@pytest.mark.parametrize(
    "failure", [NvmlUnknown("no answer within 30 s"), {GPU: NvmlUnknown("GPU is lost")}, ValueError("a bug")]
)
async def test_a_driver_that_fails_makes_it_unknown_and_is_no_sample(
    world: World, failure: Use | Exception
) -> None:
    await world.look()
    meter = await world.look(failure)
    assert meter is not None
    assert (meter.memory_used_mib, meter.sm_percent) == (None, None)
    assert str(meter.trouble).startswith(f"GPU {GPU}: ")
    assert meter.compute_received_percent == 20.0, "of what is known of the last minute"
    await world.sampler.save(world.clock.now)
    kept = world.kept()
    assert kept is not None
    assert (kept.samples, kept.peak_mib) == (1, 700)


async def test_a_machine_that_hangs_is_not_asked_twice_and_is_seen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "LONGEST_LOOK_S", 0.05)
    Reader.script, Reader.asked = [{GPU: DeviceUse((process(10, 700, 20.0),))}], []
    goes_on = asyncio.Event()

    class Hangs(Reader):
        async def meter(self, uuids: object, since_us: Mapping[str, int]) -> Any:
            answer = await super().meter(uuids, since_us)
            await goes_on.wait()
            return answer

    world = World(tmp_path, session(1), reader=Hangs)
    first, second = await world.look(), await world.look()
    assert first is not None
    assert second is not None
    assert "has not answered within" in str(first.trouble)
    assert "has not answered yet" in str(second.trouble)
    assert len(Reader.asked) == 1
    goes_on.set()
    await asyncio.gather(*world.sampler._looking.values())
    again = await world.look()
    assert again is not None
    assert (again.memory_used_mib, again.trouble) == (700, None)


async def test_another_machine_that_hangs_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "LONGEST_LOOK_S", 0.05)

    class Away(OneMachine):
        def gpu_reader(self, node_id: str) -> NvmlReader:
            class Hangs(NvmlReader):
                async def meter(self, uuids: object, since_us: Mapping[str, int]) -> Any:
                    await asyncio.Event().wait()

            return Hangs(node_id)

        def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
            assert node_id is None, "nothing was seen there"
            return super().sessions_of(pids)

    there = Device(OTHER, "away", 0, "A100", 8192, 2000, False)
    Reader.script, Reader.asked = [{GPU: DeviceUse((process(10, 700, 20.0),))}], []
    world = World(
        tmp_path,
        session(1),
        session(2, Share(OTHER, 500, 2048, 25)),
        has=(LAB, Node("away", "default", 1000, 1024, (there,))),
        engine=Away(),
        hub_address="10.0.0.1",
        nodes=[{"name": "lab"}, {"name": "away", "engine": "ssh://away"}],
    )
    first = await world.look()
    assert first is not None
    assert (first.memory_used_mib, first.trouble) == (700, None)
    told = read_meters(tmp_path).of(2, world.clock.now)
    assert told is not None
    assert told.now.memory_used_mib is None
    assert "has not answered within" in str(told.now.trouble)


async def test_whose_processes_are_not_known_is_not_nobodys(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: OneMachine, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        raise EngineSilent("the Docker engine does not say whose processes use the GPUs")

    monkeypatch.setattr(OneMachine, "sessions_of", silent)
    meter = await world.look()
    assert meter is not None
    assert meter.memory_used_mib is None


async def test_a_simulated_gpu_without_a_driver_says_so(world: World) -> None:
    (machine.folder_of(world.data, "lab") / "libnvidia-ml.so.1").unlink()
    meter = await world.look()
    assert meter is not None
    assert meter.memory_used_mib is None
    assert meter.trouble == f"GPU {GPU}: it is simulated, and nothing simulates its driver"


# --- What is kept ---


async def test_what_was_counted_is_kept_once_a_minute_and_at_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    whose: list[list[int]] = []
    save = Meters.save

    def counted(self: Meters, measured: Sequence[Measured]) -> None:
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

        def fails(self: Meters, measured: Sequence[Measured]) -> None:
            raise StoreUnavailable("the database is away")

        away.setattr(Meters, "save", fails)
        with pytest.raises(StoreUnavailable):
            await world.look()
    await world.look(times=6)
    kept = world.kept()
    assert kept is not None
    assert kept.samples == 3


async def test_energy_is_counted_between_looks_and_not_over_gaps(tmp_path: Path) -> None:
    Reader.script, Reader.asked = [], []
    world = World(tmp_path, session(1, Share(GPU, 2000, 8192, 100)))

    def use(energy_mj: int | None) -> Use:
        return {GPU: DeviceUse((), energy_mj=energy_mj)}

    for energy in (1000, 1400, 1500):
        await world.look(use(energy))
    world.clock.now += 3600
    await world.look(use(900_000))
    await world.look(use(900_050))
    # The driver was loaded anew.
    await world.look(use(10))
    await world.look(use(30))
    await world.sampler.save(world.clock.now)
    kept = world.kept()
    assert kept is not None
    assert (kept.energy_mj, kept.energy_estimated) == (500 + 50 + 20, False)


async def test_energy_of_a_session_begins_with_its_second_look(tmp_path: Path) -> None:
    Reader.script, Reader.asked = [], []
    other = session(2, Share(GPU, 1500, 6144, 75))
    world = World(tmp_path, other)
    for energy in (1000, 3000, 7000):
        await world.look({GPU: DeviceUse((), energy_mj=energy)})
        # It began somewhere between the first two looks: of these nobody knows what is its own.
        world.scheduler.sessions = (session(1), other)
    await world.sampler.save(world.clock.now)
    kept = world.meters.of([1, 2])
    assert {i: (m.energy_mj, m.energy_estimated) for i, m in kept.items()} == {
        1: (1000, True),
        2: (4500, True),
    }


async def test_the_meter_goes_on_after_a_look_that_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    done = asyncio.Event()

    async def failing(self: Sampler) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            done.set()
        raise StoreUnavailable("away") if looks == 1 else ValueError("a bug")

    monkeypatch.setattr(Sampler, "look", failing)
    world.sampler._every_s = 0
    background = Background(logging.getLogger("fgpu.meter"))
    world.sampler.begin(background)
    async with asyncio.timeout(60):
        await done.wait()
    await background.close()
