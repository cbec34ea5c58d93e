"""What the tests of the command ``fgpu`` share: a filled database, a configuration, and running it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import (
    Device,
    EndCause,
    Node,
    Policy,
    Request,
    SessionState,
    Store,
    plan,
)
from fgpuspawner.cli import main as cli

S = SessionState
AT_S = 1_790_000_000
CONFIG = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.Authenticator.allow_all = True
configure(c, data_dir={data!r}, simulated_gpus="2", **{settings!r})
"""


def request(user: str, fgpu_milli: int, server_name: str = "") -> Request:
    return Request(user, server_name, "python", "default", fgpu_milli, 1000, 1024)


def node(node_id: str = "local", *, simulated: bool = True, gpus: int = 1, group: str = "default") -> Node:
    devices = tuple(
        Device(f"GPU-{node_id}-{n}", node_id, n, "Tesla T4", 8192, 2000, simulated) for n in range(gpus)
    )
    return Node(node_id, group, 8000, 16384, devices)


def filled(url: str, *nodes: Node) -> None:
    """Make a database in which one session runs, one launches, one ends, and two wait."""
    store = Store(url)
    store.open()
    store.set_nodes(nodes or (node(),), now_s=AT_S)

    def placed(asked: Request, at_s: int) -> int:
        (session,) = store.submit([asked], now_s=at_s)
        store.commit(plan(store.snapshot(at_s), Policy()), now_s=at_s)
        return session.id

    running = placed(request("alice", 500, "gpu-2"), AT_S)
    ending = placed(request("zoe", 500), AT_S)
    for session_id in (running, ending):
        store.move(session_id, S.PREPARING, now_s=AT_S + 1)
        store.move(session_id, S.RUNNING, now_s=AT_S + 2)
    store.move(ending, S.TERMINATING, now_s=AT_S + 3, cause=EndCause.USER)
    store.move(placed(request("bob", 500), AT_S + 4), S.PREPARING, now_s=AT_S + 5)
    store.submit([request("carol", 1000), request("dave", 1500, "big")], now_s=AT_S + 6)
    store.commit(plan(store.snapshot(AT_S + 6), Policy()), now_s=AT_S + 6)
    store.close()


class Fgpu:
    """The command ``fgpu``, run in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return the status, and what is on standard output and on standard error."""
        status = cli.main(arguments)
        out, err = self._capsys.readouterr()
        return status, out, err

    def failure(self, *arguments: str) -> tuple[int, str]:
        """Return the status and the one line of a command that fails."""
        status, out, err = self(*arguments)
        assert out == ""
        assert err.startswith("fgpu: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        return status, err.removeprefix("fgpu: ").removesuffix("\n")


def write_config(folder: Path, *, after: str = "", **settings: Any) -> str:
    path = folder / "jupyterhub_config.py"
    path.write_text(CONFIG.format(data=str(folder / "data"), settings=settings) + after)
    return str(path)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command itself."""
    return subprocess.run(
        [str(Path(sys.executable).parent / "fgpu"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if not k.startswith(("FGPU_", "JUPYTERHUB"))},
    )
