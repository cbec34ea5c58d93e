"""A forecast that takes seconds, for ten thousand pending requests, delays no other work and is no outage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from fgpu_scheduler import FirstForecasts, ForecastHistory, Policy, Snapshot, Store
from fgpu_scheduler.core.forecast import Outlook, outlook
from fgpu_scheduler.service import forecasts, store_thread
from lab import BEGAN_S, HOUR_S, NODE, Lab


class Long:
    """Forecasts when it is let, and counts."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        self.made = 0

    def __call__(
        self, snapshot: Snapshot, policy: Policy, experience: Callable[[str], ForecastHistory]
    ) -> Outlook:
        self.made += 1
        self.begun.release()
        assert self.go_on.wait(60)
        return outlook(snapshot, policy, experience)


async def test_long_forecast_does_not_delay_submissions_starts_and_ends(monkeypatch: Any) -> None:
    long = Long()
    monkeypatch.setattr(forecasts, "outlook", long)
    monkeypatch.setattr(store_thread, "SLOW_AFTER_S", 0.05)
    # It is not shown beyond its time, which depends on how long this machine took.
    monkeypatch.setattr(forecasts, "FORECAST_REST", 0)
    store = Store("sqlite://")
    store.open()
    lab = Lab(store)
    await lab.scheduler.start([NODE])
    first = await lab.ask("alice")
    await lab.run(first)
    waits = await lab.ask("bob")
    asking = asyncio.ensure_future(lab.scheduler.outlook())
    assert await asyncio.to_thread(long.begun.acquire, timeout=60)
    async with asyncio.timeout(60):
        await lab.end(first)
        await lab.run(waits)
        last = await lab.ask("carla")
        await asyncio.sleep(0.1)
    assert not asking.done()
    assert not lab.scheduler.database_is_away
    long.go_on.set()
    assert set((await asking).forecasts) == {waits}
    assert set((await lab.scheduler.outlook()).forecasts) == {last}
    lab.waiting[last].cancel()
    await lab.scheduler.stop()
    store.close()


async def test_expensive_forecast_is_reused_for_a_while(monkeypatch: Any) -> None:
    long = Long()
    long.go_on.set()
    monkeypatch.setattr(forecasts, "outlook", long)
    monkeypatch.setattr(forecasts, "QUICK_FORECAST_S", 0.0)
    monkeypatch.setattr(forecasts, "FORECAST_REST", 10**6)
    store = Store("sqlite://")
    store.open()
    lab = Lab(store)
    await lab.scheduler.start([NODE])
    await lab.run(await lab.ask("alice"))
    waits = [await lab.ask("bob")]
    await lab.scheduler.outlook()
    assert lab.scheduler.forecasts_behind_s() == 0
    for user in ("carla", "dora", "emil"):
        waits.append(await lab.ask(user))
        assert set((await lab.scheduler.outlook()).forecasts) == {waits[0]}
        lab.clock.at_s += 6
    assert long.made == 1
    assert lab.scheduler.forecasts_behind_s() == 18
    for session_id in waits:
        lab.waiting[session_id].cancel()
    await lab.scheduler.stop()
    store.close()


async def test_first_forecasts_are_stored_once() -> None:
    store = Store("sqlite://")
    store.open()
    lab = Lab(store)
    await lab.scheduler.start([NODE])
    first = await lab.ask("alice", time_limit_s=HOUR_S)
    await lab.run(first)
    waits = await lab.ask("bob", time_limit_s=HOUR_S)
    (told,) = (await lab.scheduler.outlook()).forecasts.values()
    lab.clock.at_s += 600
    await lab.ask("carla", time_limit_s=HOUR_S)
    await lab.scheduler.outlook()
    await lab.end(first)
    await lab.run(waits)
    (found,) = FirstForecasts(store).newest()
    assert (found.told_at_s, found.shown, found.at_s) == (BEGAN_S, told.shown, BEGAN_S + 600)
    assert found.shown.late_at_s == BEGAN_S + HOUR_S
    for task in lab.waiting.values():
        task.cancel()
    await lab.scheduler.stop()
    store.close()
