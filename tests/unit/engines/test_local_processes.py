"""A local server has ended once its status is known, and not an instant earlier."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from pathlib import Path

import pytest

from fgpu_scheduler import Placement, Request, Session, SessionState
from fgpuspawner.engines.local.processes import LOGS_KEPT_S, MOST_LOGS, Processes

INSTALLATION = secrets.token_hex(6)
"""Sessions of one installation are found on the whole machine, also by tests that run at the same time."""


def running(number: int) -> Session:
    asked = Request("ann", "", "python", "default", 500, 100, 256)
    return Session(number, asked, SessionState.RUNNING, 0, attempt=1, placement=Placement("local", ()))


def test_dying_server_lives_until_its_status_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(installation=INSTALLATION, folder=tmp_path, stop_timeout_s=1)
    session = running(1)
    child = subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE)
    processes._children[processes.handle(session)] = child
    # While a process ends it has no environment, so it is not recognised.
    monkeypatch.setattr(processes, "_server", lambda handle: None)
    assert processes.exit_status(session) is None
    child.communicate(b"\n")
    assert processes.exit_status(session) == (3, b"")


def test_stored_numbers_of_ended_servers_are_removed(tmp_path: Path) -> None:
    former = Processes(installation=INSTALLATION, folder=tmp_path, stop_timeout_s=1)
    lives, ended = running(1), running(2)
    for session in (lives, ended):
        former.start(session, ["sleep", "600"], {"PATH": os.environ["PATH"]}, tmp_path / "home")
    killed = former._children[former.handle(ended)]
    killed.kill()
    killed.wait()
    processes = Processes(installation=INSTALLATION, folder=tmp_path, stop_timeout_s=1)
    processes.forget_ended()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [processes.handle(lives)]
    assert former.remove_session(lives, now=True)


def test_endless_output_keeps_its_newest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most_bytes = 256 << 10
    monkeypatch.setattr("fgpuspawner.engines.local.processes.MOST_LOG_BYTES", most_bytes)
    processes = Processes(installation=INSTALLATION, folder=tmp_path, stop_timeout_s=1)
    session, told = running(1), tmp_path / "told"
    os.mkfifo(told)
    lines = most_bytes // 10 + 1000
    # It prints ten bytes a line, waits to be told, and prints one more.
    program = f"seq -f %09.0f {lines}; read word < {told}; echo 'the last word'"
    processes.start(session, ["sh", "-c", program], {"PATH": os.environ["PATH"]}, tmp_path / "home")
    log = processes.log_path(session)
    ends = time.monotonic() + 60
    while log.stat().st_size < 10 * lines:
        assert time.monotonic() < ends, "it prints"
        time.sleep(0.01)
    processes.cut_logs_back()
    told.write_text("go\n")
    processes._children[processes.handle(session)].wait(30)
    found = log.read_text().splitlines()
    assert log.stat().st_blocks * 512 <= most_bytes // 2 + 8192, "no hole is left where the cut lines were"
    assert found[-2:] == [f"{lines:09}", "the last word"]
    assert found[0] == f"{lines - len(found) + 2:09}", "whole lines, without a gap"
    processes.cut_logs_back()
    assert log.read_text().splitlines() == found, "one that is small enough stays"
    assert processes.exit_status(session) == (0, log.read_bytes()[-4096:])


def test_old_logs_of_ended_servers_are_removed(
    tmp_path: Path,
) -> None:
    processes = Processes(installation=INSTALLATION, folder=tmp_path, stop_timeout_s=1)
    lives, logs, now = running(1), tmp_path / "logs", time.time()
    processes.start(lives, ["sleep", "600"], {"PATH": os.environ["PATH"]}, tmp_path / "home")
    for number in range(2, MOST_LOGS + 4):
        log = logs / f"{number}-1.log"
        log.touch()
        os.utime(log, (now - 10_000 + number,) * 2)
    os.utime(processes.log_path(lives), (now - 2 * LOGS_KEPT_S,) * 2)
    os.utime(logs / "500-1.log", (now - LOGS_KEPT_S - 60,) * 2)
    last = running(9999)
    processes.start(last, ["true"], {"PATH": os.environ["PATH"]}, tmp_path / "home")
    processes._children[processes.handle(last)].wait(30)
    gone = {2, 500}
    kept = {f"{n}-1.log" for n in (1, *range(2, MOST_LOGS + 4), 9999) if n not in gone}
    assert {path.name for path in logs.iterdir()} == kept
    # A busy kernel may take longer than one call waits.
    assert any(processes.remove_session(lives, now=True) for _ in range(10))
