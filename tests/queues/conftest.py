"""The queue under the contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from queue_lab import MOST_WAITING, Clock, Lab
from store_worlds import database, opened

from fgpu_scheduler.core.admission import Caps
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.service.scheduler import Deadlines, Scheduler


@pytest.fixture(params=["sqlite", "postgresql"])
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    """A started queue."""
    with ExitStack() as stack:
        url = stack.enter_context(database(request.param, tmp_path))
        caps = Caps(fgpu_step_milli=100, max_count=5, max_pending_per_user=MOST_WAITING)
        deadlines = Deadlines(resume_grace_s=1, reconcile_every_s=0.02)
        lab = Lab(
            lambda engine: Scheduler(
                stack.enter_context(opened(url)),
                policy=Policy(),
                caps=caps,
                launcher=engine,
                deadlines=deadlines,
                clock=Clock(),
            )
        )
        await lab.start()
        yield lab
        await lab.queue.stop()
