"""`make run` after it was killed, and with ports in use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hubprocess import ROOT, free_ports
from makerun import running

pytestmark = pytest.mark.timeout(600)


def test_next_run_cleans_up_after_a_killed_one(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        hub, proxy = run.hub(), run.proxy()
        run.kill()
        assert hub.is_running()
        assert proxy.is_running()
        run.start()
        psutil.wait_procs([hub, proxy], timeout=30)
        assert not hub.is_running()
        assert not proxy.is_running()
        # A second run beside it is refused and does no harm.
        env = {**os.environ, "PORT": str(run.port), "FGPU_DATA": str(run.data)}
        second = subprocess.run(
            [sys.executable, "scripts/run.py"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert second.returncode == 1
        assert "runs already (process " in second.stderr
        assert run.hub().is_running()


def test_used_port_is_reported_with_its_program(tmp_path: Path) -> None:
    port = free_ports(4)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port + 2))
        other.listen()
        env = {**os.environ, "PORT": str(port), "FGPU_DATA": str(tmp_path / "data")}
        refused = subprocess.run(
            [sys.executable, "scripts/run.py"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
    assert refused.returncode == 1
    name = psutil.Process().name()
    assert refused.stderr == (
        f"Port {port + 2} is used by {name} (process {os.getpid()}); use others: make run PORT=9000\n"
    )
