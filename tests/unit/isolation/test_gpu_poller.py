"""Snapshots of the GPUs at random times, in threads that neither a busy Hub nor another machine delays."""

from __future__ import annotations

import asyncio
import logging
import statistics
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
from sessions import GPU, OTHER, session

from fgpu_scheduler import (
    Device,
    Node,
    Session,
    SessionState,
    Share,
    StoreUnavailable,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.isolation.gpu_poller import LONGEST_PAUSE, Drivers, GpuPoller, GpuSnapshot, pause_s
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import machine_folder
from fgpuspawner.isolation.nvml_reader import DeviceUse, NvmlReader, NvmlUnknown, ProcessUse
from fgpuspawner.settings import FGPU

AWAY = session(2, Share(OTHER, 500, 2048, 25), node="away")
USE = DeviceUse((ProcessUse(10, 700, 20.0, 30, 1, "python3"),), seen_us=77)


def test_pauses_are_exponential_with_the_configured_mean() -> None:
    pauses = [pause_s(10) for _ in range(20_000)]
    assert 9 < statistics.mean(pauses) < 10.5
    assert max(pauses) <= LONGEST_PAUSE * 10
    # Who has waited for 10 s waits as long again as anybody else.
    rest = [p - 10 for p in pauses if p > 10]
    assert abs(statistics.median(rest) - statistics.median(pauses)) < 1


class Reader(NvmlReader):
    """Says the same at each look, and when; one that hangs answers when it may."""

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self.asked: list[tuple[float, Mapping[str, int]]] = []
        self.says: Mapping[str, DeviceUse | str] | Exception = {GPU: USE, OTHER: USE}
        self.may_answer = threading.Event()
        self.may_answer.set()

    def device_uses(self, uuids: object, since_us: Mapping[str, int]) -> Mapping[str, DeviceUse | str]:
        self.asked.append((time.monotonic(), dict(since_us)))
        self.may_answer.wait(60)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def until(self, more: int) -> None:
        """Wait until it was asked this many times more."""
        wanted, deadline = len(self.asked) + more, time.monotonic() + 60
        while len(self.asked) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Machines:
    """An engine with another machine; the processes of a session begin with its number."""

    def __init__(self) -> None:
        self.there = Reader("there")
        self.silent = False
        self.ended: set[int] = set()

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        if self.silent:
            raise EngineSilent("the Docker engine does not say whose processes use the GPUs")
        return {pid: pid // 10 for pid in pids if pid not in self.ended}

    def gpu_reader(self, node_id: str) -> NvmlReader:
        return self.there


class World:
    """A machine with a simulated GPU, another with a real one, and what was seen of them."""

    def __init__(self, folder: Path) -> None:
        nodes = [{"name": "lab"}, {"name": "away", "engine": "ssh://away"}]
        settings = FGPU(data_dir=str(folder), isolation="none", nodes=nodes, hub_address="10.0.0.1")
        isolation = Isolation(
            settings,
            (
                Node(
                    "lab", "default", 1000, 1024, (Device(GPU, "lab", 0, "Simulated GPU", 8192, 2000, True),)
                ),
                Node("away", "default", 1000, 1024, (Device(OTHER, "away", 0, "A100", 8192, 2000, False),)),
            ),
        )
        isolation.open(own_root=True, installation="abc")
        self.library = machine_folder(folder, "lab") / "libnvidia-ml.so.1"
        self.library.parent.mkdir(parents=True, exist_ok=True)
        self.library.touch()
        self.here, self.machines = Reader("here"), Machines()
        drivers = Drivers(isolation, self.machines, make_reader=lambda library: self.here)
        self.live: list[Session] = [session()]
        self.fails: Exception | None = None
        self.poller = GpuPoller(drivers, self.live_now, every_s=0.01)
        self.seen: list[tuple[GpuSnapshot, Sequence[Session]]] = []
        self.more = asyncio.Event()

    async def live_now(self) -> Sequence[Session]:
        if self.fails is not None:
            raise self.fails
        return tuple(self.live)

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        self.seen.append((snapshot, live))
        self.more.set()

    async def next(self, node_id: str | None = None) -> GpuSnapshot:
        """Return a look that comes from now on."""
        begun = len(self.seen)
        async with asyncio.timeout(60):
            while True:
                for snapshot, _ in self.seen[begun:]:
                    if snapshot.source.node_id == node_id:
                        return snapshot
                self.more.clear()
                await self.more.wait()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    background = Background(logging.getLogger("fgpu.poller"))
    made.poller.begin(background, (made.observe,))
    yield made
    made.poller.close()
    for reader in (made.here, made.machines.there):
        reader.may_answer.set()
    for thread in made.poller._threads.values():
        await asyncio.to_thread(thread.join)
    await background.close()


async def test_snapshot_has_processes_owners_and_new_samples(world: World) -> None:
    snapshot = await world.next()
    assert (snapshot.devices, snapshot.owners) == ({GPU: USE, OTHER: USE}, {10: 1})
    await world.next()
    assert [since.get(GPU) for _, since in world.here.asked[:2]] == [None, 77]
    assert world.machines.there.asked == [], "no session runs there"


async def test_ended_process_keeps_its_owner_for_one_snapshot(world: World) -> None:
    await world.next()
    world.machines.ended = {10}
    await world.next()
    assert (await world.next()).owners == {10: 1}


async def test_busy_hub_delays_no_snapshot_and_gets_all(world: World) -> None:
    await world.next()
    begun = time.monotonic()
    # This blocks the event loop.
    world.here.until(20)
    ended = time.monotonic()
    during = [at for at, _ in world.here.asked if begun < at < ended]
    await world.next()
    told = [snapshot.at_s for snapshot, _ in world.seen if begun < snapshot.at_s <= ended + 1]
    assert len(told) >= len(during) >= 20


async def test_hanging_machine_does_not_block_others(world: World) -> None:
    world.machines.there.may_answer.clear()
    world.live.append(AWAY)
    for _ in range(3):
        await world.next()
    assert len(world.machines.there.asked) <= 1, "and is not asked twice"
    world.machines.there.may_answer.set()
    assert (await world.next("away")).devices[OTHER] == USE


@pytest.mark.parametrize("failure", [NvmlUnknown("no answer within 30 s"), ValueError("a bug")])
async def test_failing_driver_gives_a_reason_per_device(world: World, failure: Exception) -> None:
    world.here.says = failure
    await world.next()
    snapshot = await world.next()
    assert str(failure) in str(snapshot.devices[GPU])
    world.here.says = {GPU: USE}
    await world.next()
    assert (await world.next()).devices == {GPU: USE}


async def test_unknown_owners_make_the_devices_unknown(world: World) -> None:
    world.machines.silent = True
    await world.next()
    assert "does not say whose processes" in str((await world.next()).devices[GPU])


async def test_simulated_gpus_without_a_driver_are_not_asked_for(world: World) -> None:
    world.library.unlink()
    await world.next()
    asked = len(world.here.asked)
    assert (await world.next()).devices == {GPU: "it is simulated, and nothing simulates its driver"}
    assert len(world.here.asked) == asked


async def test_idle_machine_is_not_polled(world: World) -> None:
    world.live = [session(state=SessionState.PREPARING), AWAY]
    await world.next("away")
    await world.next("away")
    asked = len(world.here.asked)
    await world.next("away")
    assert len(world.here.asked) == asked


async def test_snapshots_are_delivered_after_a_database_outage(world: World) -> None:
    await world.next()
    world.fails = StoreUnavailable("away")
    begun = time.monotonic()
    await asyncio.to_thread(world.here.until, 3)
    missed = [at for at, _ in world.here.asked if at > begun][:2]
    world.fails = None
    await world.next()
    told = [snapshot.at_s for snapshot, _ in world.seen]
    assert all(any(abs(at - one) < 0.5 for one in told) for at in missed)


async def test_requested_snapshot_is_taken_early(world: World) -> None:
    """Though the next look by chance is far off."""
    await world.next()
    world.poller._every_s = 10_000.0
    world.poller.take_within(world.seen[-1][0].source, 0.0)
    begun = len(world.here.asked)
    world.poller.take_within(world.seen[-1][0].source, 0.2)
    asked_at_s = time.monotonic()
    await asyncio.to_thread(world.here.until, 1)
    while world.here.asked[-1][0] < asked_at_s + 0.2:
        await world.next()
    assert len(world.here.asked) <= begun + 2
