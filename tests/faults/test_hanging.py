"""What hangs holds up nothing else, and is not told to those who come when it is over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import (
    ForecastHistory,
    Observed,
    Session,
    SessionState,
    StaleVersion,
    Store,
    StoreUnavailable,
)
from fgpu_scheduler.service import store_thread
from lab import NODE, Lab, Standing


class Hanging(Standing):
    """A launcher with containers that do not go."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: set[str] = set()

    async def remove(self, observed: Observed) -> bool:
        self.tried.add(observed.handle)
        if observed.handle.startswith("hangs"):
            await asyncio.Event().wait()
        return await super().remove(observed)


class Slow(Store):
    """A store that can be made to answer late, and then with a failure; or to have a step that takes long."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asked, self.fails = threading.Event(), threading.Event()
        self.is_away = self.is_slow = self.is_silent = False
        self.signs, self.goes_on = threading.Semaphore(0), threading.Event()

    def submit(self, *args: Any, **kwargs: Any) -> tuple[Session, ...]:
        if self.is_slow:
            assert self.goes_on.wait(60)
        return super().submit(*args, **kwargs)

    def version(self) -> int:
        if self.is_silent and not self.goes_on.is_set():
            raise StoreUnavailable("server closed the connection unexpectedly")
        found = super().version()
        self.signs.release()
        return found

    def experience(self, *args: Any, **kwargs: Any) -> ForecastHistory:
        if self.is_away:
            self.asked.set()
            assert self.fails.wait(60)
            raise StoreUnavailable("server closed the connection unexpectedly")
        return super().experience(*args, **kwargs)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    """A lab of one GPU, on that store and with that launcher."""
    store = Slow(f"sqlite:///{tmp_path / 'fgpu.sqlite'}")
    store.open()
    made = Lab(store)
    made.launcher = Hanging()
    made.scheduler = made._made()
    await made.scheduler.start([NODE])
    yield made
    await made.scheduler.stop()
    store.close()


async def test_hanging_ghost_delays_no_other(lab: Lab) -> None:
    assert isinstance(lab.launcher, Hanging)
    # One after the other: the next comes while the one before is being removed.
    for number in range(3):
        lab.launcher.things.append(Observed("a", 100 + number, 1, f"hangs-{number}", True))
        async with asyncio.timeout(60):
            while f"hangs-{number}" not in lab.launcher.tried:
                await lab.rounds(1)
    lab.launcher.things.append(Observed("a", 110, 1, "goes", True))
    async with asyncio.timeout(60):
        while any(o.handle == "goes" for o in lab.launcher.things):
            await lab.rounds(1)
    assert len(lab.launcher.things) == 3


async def test_failed_forecast_is_not_given_to_the_next_request(
    lab: Lab,
) -> None:
    store = lab.store
    assert isinstance(store, Slow)
    await lab.run(await lab.ask("alice"))
    waits = await lab.ask("bob")
    await lab.rounds()
    store.is_away = True
    asks = asyncio.ensure_future(lab.scheduler.outlook())
    assert await asyncio.to_thread(store.asked.wait, 60)
    asks.cancel()
    await asyncio.wait([asks])
    store.is_away = False
    store.fails.set()
    await lab.rounds()
    assert (await lab.forecast(waits)).session_id == waits
    lab.waiting[waits].cancel()


@pytest.mark.timeout(60)
async def test_outdated_forecast_does_not_stop_the_loop(lab: Lab) -> None:
    await lab.run(await lab.ask("alice"))
    await lab.ask("bob")
    await lab.scheduler.outlook()
    # In that turn of the loop it is done, and what follows from it comes in the next.
    just_done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    just_done.set_result(lab.scheduler._forecasts._outlook)
    waits = await lab.ask("carol")
    lab.scheduler._forecasts._running = just_done
    assert (await lab.forecast(waits)).position == 2
    for waiting in lab.waiting.values():
        waiting.cancel()


@pytest.mark.timeout(60)
async def test_repeatedly_refused_plan_does_not_block_the_store(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(decided: object, *, now_s: int) -> tuple[Session, ...]:
        raise StaleVersion("it does not fit where it was placed")

    with monkeypatch.context() as patched:
        patched.setattr(lab.store, "commit", refuses)
        waits = await lab.ask("alice")
        await lab.rounds()
        assert await lab.state(waits) is SessionState.PENDING
    lab.scheduler.wake()
    await lab.run(waits)


async def test_long_step_is_no_outage(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_thread, "SLOW_AFTER_S", 0.01)
    store = lab.store
    assert isinstance(store, Slow)
    store.is_slow = True
    waits = asyncio.ensure_future(lab.ask("alice"))
    await asyncio.to_thread(store.signs.acquire, timeout=60)
    await asyncio.to_thread(store.signs.acquire, timeout=60)
    assert not lab.scheduler.database_is_away
    store.is_silent = True
    async with asyncio.timeout(60):
        async for _ in lab.scheduler.changes(at_least_every_s=0.05):
            if lab.scheduler.database_is_away:
                break
    assert not waits.done()
    store.goes_on.set()
    await lab.run(await waits)
    assert not lab.scheduler.database_is_away
