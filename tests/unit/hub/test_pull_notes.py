"""The progress of pulls is written for the service while there are pulls, and only when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fgpuspawner.concurrency.background import Background
from fgpuspawner.hub import image_pulls as module
from fgpuspawner.hub.image_pulls import PullProgressFile
from fgpuspawner.images.pull_state import Phase, Progress, PullState, read_pulls

BEGUN = PullState(Phase.FETCHING)
HALF = PullState(Phase.FETCHING, Progress(bytes_done=1 << 20, bytes_total=2 << 20))


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    found = Background(logging.getLogger("fgpu"))
    yield found
    await found.close()


async def test_progress_of_pulls_is_written_and_emptied_at_the_end(
    tmp_path: Path, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.01)
    states = {7: BEGUN}
    PullProgressFile(tmp_path, lambda: dict(states)).begin(background)

    def told() -> Any:
        return read_pulls(tmp_path, now_s=time.time())

    await eventually(lambda: told() == {7: BEGUN})
    states[7] = HALF
    await eventually(lambda: told() == {7: HALF})
    del states[7]
    await eventually(lambda: told() == {})


async def test_what_the_last_run_told_is_not_told_any_more(tmp_path: Path) -> None:
    module.write_pulls(tmp_path, {7: HALF}, now_s=time.time())
    PullProgressFile(tmp_path, dict)
    assert read_pulls(tmp_path, now_s=time.time()) == {}


async def test_unchanged_progress_is_not_written_each_time(
    tmp_path: Path, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(module, "STALE_AFTER_S", 3600)
    written: list[Any] = []
    looks: list[int] = []

    def states() -> dict[int, PullState]:
        looks.append(1)
        return {1: HALF}

    notes = PullProgressFile(tmp_path, states)
    monkeypatch.setattr(module, "write_pulls", lambda _, states, **__: written.append(dict(states)))
    notes.begin(background)
    await eventually(lambda: len(looks) > 50)
    assert len(written) == 1
    # Who reads it takes what is old for what a Hub has left that has ended.
    monkeypatch.setattr(module, "STALE_AFTER_S", 0)
    await eventually(lambda: len(written) > 2)


async def test_progress_is_written_again_after_a_full_disk(
    tmp_path: Path, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.001)
    notes = PullProgressFile(tmp_path, lambda: {1: HALF})
    full, write = [OSError(28, "No space left on device")] * 2, module.write_pulls

    def fails_at_first(*args: Any, **given: Any) -> None:
        if full:
            raise full.pop()
        write(*args, **given)

    monkeypatch.setattr(module, "write_pulls", fails_at_first)
    notes.begin(background)
    await eventually(lambda: read_pulls(tmp_path, now_s=time.time()) == {1: HALF})
