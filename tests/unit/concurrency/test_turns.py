"""Turns: a limited number of requests of each caller run at a time."""

from __future__ import annotations

import asyncio

import pytest

from fgpuspawner.concurrency.turns import TooMany, Turns


async def ask(turns: Turns, who: str, log: list[str], go_on: asyncio.Event) -> None:
    await turns.take(who)
    log.append(who)
    try:
        await go_on.wait()
    finally:
        turns.leave(who)


async def test_requests_of_one_caller_do_not_delay_others() -> None:
    turns, log, go_on = Turns(at_a_time=2, most=100), list[str](), asyncio.Event()
    many = [asyncio.create_task(ask(turns, "mallory", log, go_on)) for _ in range(50)]
    await asyncio.sleep(0)
    alice = asyncio.create_task(ask(turns, "alice", log, go_on))
    await asyncio.sleep(0)
    assert log == ["mallory", "mallory", "alice"]
    go_on.set()
    await asyncio.gather(alice, *many)
    assert log.count("mallory") == 50


async def test_requests_beyond_the_limit_are_refused() -> None:
    turns, log, go_on = Turns(at_a_time=1, most=3), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(ask(turns, "mallory", log, go_on)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TooMany):
        await turns.take("mallory")
    # One that waits, and the one that is worked on.
    for task in tasks[1::-1]:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert log == ["mallory"] * 2, "the third has its turn"
    go_on.set()
    await tasks[2]
    await turns.take("mallory")
    turns.leave("mallory")


async def test_callers_without_requests_are_forgotten() -> None:
    turns = Turns(at_a_time=1, most=3)
    for number in range(10):
        await turns.take(f"user-{number}")
        turns.leave(f"user-{number}")
    assert turns._lines == {}
