"""Whether a real Jupyter server that is asked what its kernels do takes that for activity."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fgpuspawner.hub.idle import ask_server_idle
from hubprocess import free_ports, until


@pytest.fixture(params=[True, False], ids=["with our extension", "without"])
def extended(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def server(tmp_path: Path, extended: bool) -> Iterator[str]:
    port = free_ports(1)
    command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", f"--port={port}"]
    own = [
        "--IdentityProvider.token=sesame",
        f"--ServerApp.root_dir={tmp_path}",
        f"--ServerApp.jpserver_extensions={{'jupyterlab_fgpu': {extended}}}",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, *own], cwd=tmp_path, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait()


def test_idle_question_is_no_activity(server: str, extended: bool) -> None:
    first = until(lambda: asyncio.run(ask_server_idle(server, "sesame")), what="the server answers")
    assert first is not None
    assert first.notes_input is extended
    until(lambda: time.time() >= first.since_s + 2)
    assert asyncio.run(ask_server_idle(server, "sesame")) == first
    assert asyncio.run(ask_server_idle(server, "sesame")) == first
