"""Health requests of monitors share one database check, so they do not delay other writes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from fgpu_scheduler import StoreUnavailable
from fgpuspawner.hub import hub_handlers
from fgpuspawner.hub.hub_handlers import DatabaseCheck


class Lock:
    """A database check that blocks until `go_on` is set, and can fail."""

    def __init__(self) -> None:
        self.asked = 0
        self.go_on = threading.Event()
        self.fails = False

    def check(self) -> None:
        self.asked += 1
        assert self.go_on.wait(60)
        if self.fails:
            raise StoreUnavailable("it is away")


async def test_a_thousand_health_requests_at_once_take_one_database_check() -> None:
    lock = Lock()
    writable = DatabaseCheck(lock.check)
    asking = [asyncio.ensure_future(writable.now()) for _ in range(1000)]
    await asyncio.sleep(0)
    lock.go_on.set()
    assert await asyncio.gather(*asking) == [True] * 1000
    # A client that never stops asking.
    assert await writable.now()
    assert lock.asked == 1


async def test_health_follows_the_database_after_a_second(monkeypatch: Any) -> None:
    monkeypatch.setattr(hub_handlers, "LOOK_AGAIN_S", 0.0)
    lock = Lock()
    lock.go_on.set()
    writable = DatabaseCheck(lock.check)
    assert await writable.now()
    lock.fails = True
    assert not await writable.now()
    lock.fails = False
    assert await writable.now()


async def test_hanging_database_is_reported_and_takes_one_thread(monkeypatch: Any) -> None:
    monkeypatch.setattr(hub_handlers, "LOOK_WITHIN_S", 0.05)
    lock = Lock()
    writable = DatabaseCheck(lock.check)
    assert await asyncio.gather(*(writable.now() for _ in range(100))) == [False] * 100
    assert lock.asked == 1
    lock.go_on.set()
