"""A local server has ended once its status is known, and not an instant earlier."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fgpu_scheduler import Placement, Request, Session, SessionState
from fgpuspawner.engines.local.processes import Processes


def test_a_server_in_its_last_instant_lives_until_its_status_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(installation="abc", folder=tmp_path, stop_timeout_s=1)
    asked = Request("ann", "", "python", "default", 500, 100, 256)
    session = Session(1, asked, SessionState.RUNNING, 0, attempt=1, placement=Placement("local", ()))
    child = subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE)
    processes._children[processes.handle(session)] = child
    # So it looks while a process ends: there is no environment any more by which it would be known.
    monkeypatch.setattr(processes, "_server", lambda handle: None)
    assert processes.exit_status(session) is None
    child.communicate(b"\n")
    assert processes.exit_status(session) == (3, "")
