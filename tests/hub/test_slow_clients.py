"""Eight hundred clients that begin a request and never end it, at each door: everybody else is answered."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest
import requests
from slowclients import BODY, CLIENTS, HEADERS, USUAL, slow_clients

from hubprocess import HubProcess, until

pytestmark = pytest.mark.slow

WITHIN_S = 20.0
"""So long an answer may take, on a machine that is busy with other things."""


def test_slow_clients_keep_nobody_else_waiting_and_end_no_session(tmp_path: Path, many_files: None) -> None:
    hub = HubProcess(tmp_path, before=USUAL)
    try:
        hub.start()
        assert hub.process is not None
        hub.add_user("alice")
        assert hub.spawn("alice", options={"fgpu": "1", "cpu": "0.1", "memory_mib": 256}).status_code in (
            201,
            202,
        )
        until(lambda: hub.ready("alice"), what="alice's session runs")
        token = {"Authorization": f"token {hub.token}"}
        before = psutil.Process(hub.process.pid).num_fds()
        with contextlib.ExitStack() as stack:
            slow_clients(stack, hub.port, BODY.format(path="/hub/api/users"))
            slow_clients(stack, hub.port, HEADERS.format(path="/hub/api/users"))
            slow_clients(stack, hub.port + 1, BODY.format(path="/hub/api/users"))
            slow_clients(stack, hub.port + 3, HEADERS.format(path="/services/fgpu/health"))
            held = psutil.Process(hub.process.pid).num_fds
            until(lambda: held() > before + 2 * CLIENTS - 50, what="the Hub holds all of them")
            for _ in range(3):
                for path in (
                    "hub/health",
                    "services/fgpu/health",
                    "services/fgpu/api/v1/queue",
                    "hub/api/users/alice",
                ):
                    began = time.monotonic()
                    assert requests.get(f"{hub.url}/{path}", headers=token, timeout=60).status_code == 200
                    assert time.monotonic() - began < WITHIN_S, path
            hub.add_user("bob")
            assert hub.spawn("bob", options={"fgpu": "1", "cpu": "0.1", "memory_mib": 256}).status_code in (
                201,
                202,
            )
            until(lambda: hub.ready("bob"), what="bob's session runs")
            assert hub.ready("alice")
        until(lambda: held() < before + 50, what="their connections are let go")
    finally:
        hub.close()
