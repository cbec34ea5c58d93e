"""The resume of waiting requests: in their order, and never more at a time than the Hub can take beside all else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fgpu_scheduler import Request, Session, SessionState
from fgpuspawner.concurrency.background import Background
from fgpuspawner.service import resume
from fgpuspawner.service.hub import HubAnswer
from fgpuspawner.service.resume import MOST_IN_FLIGHT, Resumer

COUNT = 3 * MOST_IN_FLIGHT


class Reader:
    """Three times as many sessions are held as are asked for at a time."""

    def __init__(self) -> None:
        request = Request("alice", "", "python", "default", 1000, 1000, 1024)
        self.held = {
            n: Session(n, replace(request, server_name=f"s{n}"), SessionState.PENDING, 0)
            for n in range(1, COUNT + 1)
        }

    async def read_queue(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def held_sessions(self) -> tuple[Session, ...]:
        return tuple(self.held.values())


class SlowHub:
    """Answers a start when it is let, and counts those that wait."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.waiting = self.most = 0
        self.go_on, self.full, self.all = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def start_server(self, user: str, server: str, **_: Any) -> HubAnswer:
        self.asked.append(server)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        if self.waiting == MOST_IN_FLIGHT:
            self.full.set()
        if len(set(self.asked)) == COUNT:
            self.all.set()
        await self.go_on.wait()
        self.waiting -= 1
        return HubAnswer(202, "")

    async def has_time(self) -> None:
        return None


class BusyHub(SlowHub):
    """A Hub that is busy while it handles a start."""

    def __init__(self) -> None:
        super().__init__()
        self.is_through = asyncio.Event()

    async def has_time(self) -> None:
        await self.is_through.wait()


async def test_busy_hub_gets_one_start_at_a_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(resume, "EVERY_S", 0.01)
    monkeypatch.setattr(resume, "ANSWER_WAIT_S", 0.0001)
    hub = BusyHub()
    resumer = Resumer(Reader(), hub, "token")  # type: ignore[arg-type]
    background = Background(logging.getLogger(__name__))
    resumer.begin(background)
    try:
        await asyncio.sleep(0.1)
        assert hub.asked == ["s1"]
        hub.is_through.set()
        async with asyncio.timeout(30):
            await hub.full.wait()
    finally:
        await background.close()
        await resumer.close()


async def test_slow_hub_gets_a_limited_number_of_starts(monkeypatch: Any) -> None:
    monkeypatch.setattr(resume, "EVERY_S", 0.01)
    monkeypatch.setattr(resume, "ANSWER_WAIT_S", 0.0001)
    reader, hub = Reader(), SlowHub()
    resumer = Resumer(reader, hub, "token")  # type: ignore[arg-type]
    background = Background(logging.getLogger(__name__))
    resumer.begin(background)
    try:
        async with asyncio.timeout(30):
            await hub.full.wait()
            # Further rounds start nothing.
            await asyncio.sleep(0.1)
            assert hub.waiting == MOST_IN_FLIGHT
            hub.go_on.set()
            await hub.all.wait()
        assert hub.most <= MOST_IN_FLIGHT
        assert list(dict.fromkeys(hub.asked)) == [f"s{n}" for n in range(1, COUNT + 1)]
    finally:
        await background.close()
        await resumer.close()
