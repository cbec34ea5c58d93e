"""The queues under the contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from memory_queue import MemoryQueue
from queue_lab import MOST_WAITING, Clock, FakeEngine, Lab
from store_worlds import database, opened

from fgpu_scheduler.core.admission import Caps
from fgpu_scheduler.core.model import Session
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.queue import Queue
from fgpu_scheduler.service.scheduler import Deadlines, Scheduler


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def make_queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[FakeEngine], Queue]]:
    """A function that makes a queue with the state that the last one left."""
    with ExitStack() as stack:
        if request.param == "memory":
            kept: dict[int, Session] = {}
            yield lambda _: MemoryQueue(kept, MOST_WAITING, Clock().now_s)
            return
        url = stack.enter_context(database(request.param, tmp_path))
        caps = Caps(fgpu_step_milli=100, max_count=5, max_pending_per_user=MOST_WAITING)
        deadlines = Deadlines(resume_grace_s=1, reconcile_every_s=0.02)
        yield lambda engine: Scheduler(
            stack.enter_context(opened(url)),
            policy=Policy(),
            caps=caps,
            launcher=engine,
            deadlines=deadlines,
            clock=Clock(),
        )


@pytest.fixture
async def lab(make_queue: Callable[[FakeEngine], Queue]) -> AsyncIterator[Lab]:
    """A started queue."""
    lab = Lab(make_queue)
    await lab.start()
    yield lab
    await lab.queue.stop()
