"""A local server has ended once its status is known, and not an instant earlier."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fgpu_scheduler import Placement, Request, Session, SessionState
from fgpuspawner.engines.local.processes import Processes


def running(number: int) -> Session:
    asked = Request("ann", "", "python", "default", 500, 100, 256)
    return Session(number, asked, SessionState.RUNNING, 0, attempt=1, placement=Placement("local", ()))


def test_a_server_in_its_last_instant_lives_until_its_status_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(installation="abc", folder=tmp_path, stop_timeout_s=1)
    session = running(1)
    child = subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE)
    processes._children[processes.handle(session)] = child
    # So it looks while a process ends: there is no environment any more by which it would be known.
    monkeypatch.setattr(processes, "_server", lambda handle: None)
    assert processes.exit_status(session) is None
    child.communicate(b"\n")
    assert processes.exit_status(session) == (3, "")


def test_notes_of_servers_that_ended_without_a_hub_go_and_those_of_others_stay(tmp_path: Path) -> None:
    former = Processes(installation="abc", folder=tmp_path, stop_timeout_s=1)
    lives, ended = running(1), running(2)
    for session in (lives, ended):
        former.start(session, ["sleep", "600"], {"PATH": os.environ["PATH"]}, tmp_path / "home")
    killed = former._children[former.handle(ended)]
    killed.kill()
    killed.wait()
    processes = Processes(installation="abc", folder=tmp_path, stop_timeout_s=1)
    processes.forget_ended()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [processes.handle(lives)]
    assert former.remove_session(lives, now=True)
