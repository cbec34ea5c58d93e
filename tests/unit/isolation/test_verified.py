"""The last verdict of each node, noted by as many launches as there are at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fgpu_scheduler import Placement, Request, Session, SessionState, Share
from fgpuspawner.isolation.choice import VERDICTS, note_verdict

NODES = 24


def test_launches_that_are_verified_at_once_lose_no_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    together = threading.Barrier(NODES)

    def note(number: int) -> None:
        placement = Placement(f"node-{number}", (Share("GPU-1f", 500, 2048, 25),))
        asked = Request("alice", "", "python", "default", 500, 1000, 1024)
        together.wait()
        note_verdict(
            tmp_path, Session(number, asked, SessionState.PREPARING, 0, placement=placement), "mps", []
        )

    with ThreadPoolExecutor(NODES) as threads:
        list(threads.map(note, range(NODES)))
    assert sorted(verdict.session_id for verdict in VERDICTS.read(tmp_path)) == list(range(NODES))
    assert not caplog.records
