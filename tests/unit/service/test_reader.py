"""The service's reads of the store, and its errors."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from traitlets.config import Config
from worlds import Build, node

from fgpu_scheduler import (
    Banner,
    Caps,
    Notice,
    Outlook,
    Request,
    RequestForecast,
    Snapshot,
    Store,
    StoreUnavailable,
    SystemClock,
)
from fgpu_scheduler.service.reader import OUTLOOK_FOR_S
from fgpuspawner.engines.base import Capabilities
from fgpuspawner.form.offer import LaunchRequest, Offer
from fgpuspawner.form.options import parse
from fgpuspawner.images.live import Images
from fgpuspawner.service.model import World
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.reader import ANY_IMAGE, Reader
from fgpuspawner.settings import FGPU


@pytest.fixture
def settings(tmp_path: Path) -> FGPU:
    return FGPU.from_config(Config({"FGPU": {"data_dir": str(tmp_path), "groups": {"default": {}}}}))


@pytest.fixture
def store(settings: FGPU) -> Iterator[Store]:
    found = Store(settings.database_url())
    found.open()
    yield found
    found.close()


@pytest.fixture
def reader_of(settings: FGPU, tmp_path: Path) -> Callable[[Store], Reader]:
    """Makes a reader of a store, without a catalogue."""

    def make(store: Store) -> Reader:
        images = Images(tmp_path / "images.toml", store, must_be_good=False)
        return Reader(store, settings, images, SystemClock(), Capabilities("local processes"))

    return make


@pytest.fixture
async def reader(store: Store, reader_of: Callable[[Store], Reader]) -> AsyncIterator[Reader]:
    """A reader of the store, connected."""
    found = reader_of(store)
    found._not_connected = ""
    yield found
    await found.close()


async def test_reads_work_once_the_database_is_there(
    settings: FGPU, reader_of: Callable[[Store], Reader]
) -> None:
    reader = reader_of(Store(settings.database_url()))
    connecting = asyncio.create_task(reader.connect())
    try:
        with pytest.raises(StoreUnavailable, match="not connected yet"):
            await reader.world()
        hubs = Store(settings.database_url())
        hubs.open()
        hubs.close()
        await asyncio.wait_for(connecting, 60)
        assert (await reader.world()).snapshot.sessions == ()
    finally:
        connecting.cancel()
        await reader.close()


async def test_write_during_a_reading_is_read_again(
    store: Store, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    read = reader._read_world

    def slow(ahead: Outlook) -> World:
        found = read(ahead)
        begun.set()
        assert go_on.wait(30)
        return found

    monkeypatch.setattr(reader, "_read_world", slow)
    try:
        reading = asyncio.create_task(reader.world())
        assert await asyncio.to_thread(begun.wait, 30)
        await reader.change(lambda store, now_s: Banner(store).put(Notice("repair"), by="root", now_s=now_s))
        go_on.set()
        assert (await reading).banner is None
        # No version of the store tells of it.
        shown = await reader.world()
        assert shown.banner is not None
    finally:
        go_on.set()


async def test_waiting_callers_share_one_reading(
    store: Store, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = 0
    read = reader._read_world
    # Others write all the time: no reading is of the newest version once it is made.
    versions = itertools.count(1)

    def counted(ahead: Outlook) -> World:
        nonlocal readings
        readings += 1
        return read(ahead)

    monkeypatch.setattr(reader._queue, "version", lambda: next(versions))
    monkeypatch.setattr(reader, "_read_world", counted)
    await asyncio.gather(*(reader.world() for _ in range(40)))
    together = readings
    await reader.world()
    assert readings == together + 1, "who asks later is told what is then"
    assert together <= 2, "the first had begun when most of them asked"


async def test_long_reports_block_no_reads_and_time_out(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    begun = []

    def long(_: Store) -> str:
        begun.append(threading.current_thread())
        assert go_on.wait(60)
        return "made"

    try:
        reports = [asyncio.create_task(reader.report(long)) for _ in range(8)]
        assert (await asyncio.wait_for(reader.world(), 30)).snapshot.sessions == ()
        assert len(begun) <= 1, "one at a time"
        go_on.set()
        assert set(await asyncio.wait_for(asyncio.gather(*reports), 30)) == {"made"}
        go_on.clear()
        monkeypatch.setattr("fgpuspawner.service.reader.REPORT_WITHIN_S", 0.2)
        with pytest.raises(TimeoutError):
            await reader.report(long)
    finally:
        go_on.set()


async def test_largest_amount_agrees_between_pages_and_forecast(reader: Reader) -> None:
    # One core is left: a whole GPU would have 1.2, and half of one 0.6.
    world = Build(replace(node(), cpu_milli=2500)).running("bob", 1500).world()
    offer = reader._any_offer(world.snapshot, "default")
    told = await reader.forecast(parse({"fgpu": "1"}, offer), offer, world)
    assert (told.startable_now, told.largest_now_milli, told.beside_other) == (0, 500, (600, 4096))
    assert reader._largest_now(world.snapshot, "default") == told.largest_now_milli


def of(user: str) -> tuple[LaunchRequest, Offer]:
    """Return a request of this user, and their offer."""
    wanted = LaunchRequest(user, "", ANY_IMAGE.slug, "default", 1000, 1000, 1024)
    return wanted, Offer((ANY_IMAGE,), ("default",), (), Caps(fgpu_step_milli=100), wanted)


async def test_questions_of_the_form_share_one_outlook(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Outlook] = []
    outlook = reader._queue.outlook

    def kept(snapshot: Snapshot) -> Outlook:
        made.append(outlook(snapshot))
        return made[-1]

    monkeypatch.setattr(reader._queue, "outlook", kept)
    world = Build(node()).running("bob", 1000).world()
    await asyncio.gather(*(reader.forecast(*of(user), world) for user in ("alice", "carol", "dave")))
    assert len(made) == 1
    later = replace(world.snapshot, now_s=world.snapshot.now_s + OUTLOOK_FOR_S + 1)
    await reader.forecast(*of("alice"), replace(world, snapshot=later))
    assert len(made) == 2
    # An empty queue says nothing of what waits since.
    changed = replace(later, version=later.version + 1)
    await reader.forecast(*of("alice"), replace(world, snapshot=changed))
    assert len(made) == 3


async def test_many_forecasts_of_one_user_do_not_block_others(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    thought_of: list[str] = []
    go_on = threading.Event()

    def slow(asked: Request, *_: object) -> RequestForecast:
        thought_of.append(asked.user)
        assert asked.user != "mallory" or go_on.wait(30)
        return RequestForecast(1, None, 0, "now", "starts now", None)

    monkeypatch.setattr(reader._queue, "forecast", slow)
    world = await reader.state()
    floods = [asyncio.create_task(reader.forecast(*of("mallory"), world)) for _ in range(200)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            seen = (await reader.world()).snapshot
            assert replace(seen, now_s=world.snapshot.now_s) == world.snapshot
            assert (await reader.forecast(*of("alice"), world)).text == "starts now"
        assert thought_of == ["mallory", "alice"]
        go_on.set()
        await asyncio.gather(*floods)
    finally:
        go_on.set()


async def test_slow_forecast_is_not_a_database_failure(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(asked: Request, *_: object) -> RequestForecast:
        assert go_on.wait(600)
        return RequestForecast(1, None, 0, "now", "starts now", None)

    monkeypatch.setattr(reader._queue, "forecast", slow)
    world = await reader.state()
    monkeypatch.setattr("fgpuspawner.service.reader.ANSWER_WITHIN_S", 0.05)
    try:
        with pytest.raises(Problem) as found:
            await reader.forecast(*of("alice"), world)
        assert (found.value.status, found.value.code) == (503, "forecast_takes_long")
    finally:
        go_on.set()
