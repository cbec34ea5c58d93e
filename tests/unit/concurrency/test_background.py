"""Background tasks outlive whatever a step raises, say each reason once, and end with their owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from fgpu_scheduler import FGPUError
from fgpuspawner.concurrency.background import Background, Failures, until_it_works

log = logging.getLogger("test.background")


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    found = Background(log)
    yield found
    await found.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    with caplog.at_level(logging.INFO, log.name):
        yield lambda: [(r.levelname, r.getMessage()) for r in caplog.records if r.name == log.name]


def failing_with(
    *ways: BaseException | None,
) -> tuple[Callable[[], Awaitable[None]], asyncio.Event]:
    """Return a step that fails so, one time after another, and what is set when it has done all of it."""
    left, done = list(ways), asyncio.Event()

    async def step() -> None:
        if not left:
            done.set()
        elif (way := left.pop(0)) is not None:
            raise way

    return step, done


async def test_failing_step_is_repeated_and_logged_once(
    background: Background, said: Callable[[], list[tuple[str, str]]]
) -> None:
    away, bug = FGPUError("the database is away"), KeyError("x")
    step, done = failing_with(away, away, bug, None, away, asyncio.CancelledError())
    background.every(0.001, step, failed="It cannot be done")
    async with asyncio.timeout(60):
        await done.wait()
    assert said() == [
        ("WARNING", "It cannot be done: the database is away"),
        ("ERROR", "It cannot be done: KeyError('x')"),
        ("WARNING", "It cannot be done: the database is away"),
        ("ERROR", "It cannot be done: CancelledError()"),
    ]


async def test_event_ends_a_pause_early(
    background: Background,
) -> None:
    wake, steps, may_end = asyncio.Event(), [], asyncio.Event()

    async def step() -> None:
        steps.append(len(steps))
        await may_end.wait()

    background.every(3600, step, failed="", wake=wake)
    async with asyncio.timeout(60):
        while not steps:  # noqa: ASYNC110
            await asyncio.sleep(0)
        wake.set()
        may_end.set()
        while len(steps) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        wake.set()
        while len(steps) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_pause_after_a_failure_differs(background: Background) -> None:
    step, done = failing_with(FGPUError("no"), FGPUError("no"))
    background.every(3600, step, failed="", again_after_s=0.001)
    async with asyncio.timeout(60):
        await done.wait()


async def test_exception_of_a_task_is_logged(
    background: Background, said: Callable[[], list[tuple[str, str]]]
) -> None:
    async def fails() -> None:
        raise FGPUError("no more room")

    task = background.run(fails(), failed="It is not looked after any more")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert said() == [("WARNING", "It is not looked after any more: no more room")]


async def test_close_ends_all_tasks(background: Background) -> None:
    begun: list[asyncio.Task[None]] = []

    async def for_ever() -> None:
        await asyncio.Event().wait()

    async def begins_another() -> None:
        try:
            await for_ever()
        finally:
            begun.append(background.run(for_ever(), failed=""))

    first = background.run(begins_another(), failed="")
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await background.close()
    assert [task.cancelled() for task in (first, *begun)] == [True, True]


async def test_step_is_tried_until_it_works() -> None:
    ways: list[Exception] = [FGPUError("away"), ValueError("bug")]

    async def step() -> str:
        if ways:
            raise ways.pop()
        return "done"

    async with asyncio.timeout(60):
        assert await until_it_works(step, every_s=0.001, failures=Failures(log, "")) == "done"
