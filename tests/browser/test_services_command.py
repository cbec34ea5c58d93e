"""`fgpu services` on an installation that `make run` has started: what it tells, and that sessions survive restarts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hubprocess import ROOT, until
from makerun import MakeRun

BIN = Path(sys.executable).parent
READER = "fgpuspawner.service.reader]"
CONFIG = ("--config", str(ROOT / "jupyterhub_config.py"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    run = MakeRun(tmp_path_factory.mktemp("services"))
    try:
        yield run.start()
        run.end()
    finally:
        run.clean()


def command(made: MakeRun, *words: str, status: int = 0, **more: str) -> str:
    """Run a program of this environment as the administrator of this installation does."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FGPU_", "JUPYTERHUB"))}
    env = {**clean, "FGPU_DATA": str(made.data), "PORT": str(made.port), "SIMULATED_GPUS": "1", **more}
    ended = subprocess.run(
        [str(BIN / words[0]), *words[1:]], env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stderr if status else ended.stdout


def services(made: MakeRun, *words: str, status: int = 0) -> str:
    return command(made, "fgpu", "services", *words, *CONFIG, status=status)


def found(made: MakeRun) -> dict[str, Any]:
    return {f["name"]: f for f in json.loads(services(made, "status", "--json"))}


def test_services_are_told_and_restarted_and_sessions_go_on(made: MakeRun) -> None:
    before = found(made)
    assert list(before) == ["hub", "proxy", "service", "database", "engine"]
    for name in ("hub", "proxy", "service"):
        assert before[name]["state"] == "running"
        assert before[name]["memory_mib"] > 10
    assert before["hub"]["since_s"] == int(made.hub().create_time())
    assert (before["database"]["state"], before["engine"]["state"]) == ("answers", "ok")

    token = command(made, "jupyterhub", "token", "admin", "-f", CONFIG[1]).splitlines()[-1]
    own = {"FGPU_HUB_URL": made.url, "JUPYTERHUB_API_TOKEN": token}
    (session,) = json.loads(command(made, "fgpu", "run", "--fgpu", "0.5", "--wait", "--json", **own))[
        "sessions"
    ]
    assert session["state"] == "RUNNING"
    processes = sessions_processes(made, session["id"])
    assert processes
    for name in ("hub", "proxy", "service"):
        old = made.hub() if name == "hub" else made.proxy() if name == "proxy" else None
        assert services(made, "restart", name).startswith(f"{name}: runs, process ")
        assert old is None or not old.is_running()
        until(
            lambda: running_again(made, own, session["id"]),
            what=f"the session is there after {name} was restarted",
        )
        assert sessions_processes(made, session["id"]) == processes
    assert all(f["state"] in ("running", "answers", "ok") for f in found(made).values())

    # Of one log, each has its own lines.
    said = {name: services(made, "logs", name) for name in ("hub", "service")}
    assert ("JupyterHub" in said["hub"], READER in said["hub"]) == (True, False)
    assert ("JupyterHub" in said["service"], READER in said["service"]) == (False, True)


def running_again(made: MakeRun, own: dict[str, str], session_id: int) -> bool:
    """Return whether the Hub answers, and says that the session runs."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FGPU_", "JUPYTERHUB"))}
    words = [str(BIN / "fgpu"), "show", str(session_id), "--json"]
    ended = subprocess.run(words, env={**clean, **own}, capture_output=True, text=True, timeout=300)
    return ended.returncode == 0 and json.loads(ended.stdout)["session"]["state"] == "RUNNING"


def sessions_processes(made: MakeRun, session_id: int) -> set[int]:
    """Return the processes of a session's server."""
    marks = {"FGPU_INSTALLATION": made.installation, "FGPU_SESSION_ID": str(session_id)}
    found = set()
    for process in psutil.process_iter():
        try:
            if "singleuser" in " ".join(process.cmdline()) and marks.items() <= process.environ().items():
                found.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("stop", "hub"), "stop hub: this installation runs by make run; end all with Ctrl-C there"),
        (
            ("start", "proxy"),
            "start proxy: this installation runs by make run; it starts again what has ended",
        ),
        (("stop", "service"), "stop service: the Hub starts and ends it; restart is possible"),
        (
            ("restart", "database"),
            "restart database: it is not this installation's own; use what you started it with",
        ),
        (("restart", "all"), "all: no such service; choose of hub, proxy, service, database, engine"),
    ],
    ids=lambda part: part[1] if isinstance(part, tuple) else "",
)
def test_what_cannot_be_done_is_one_line(made: MakeRun, words: tuple[str, ...], line: str) -> None:
    assert services(made, *words, status=1) == f"fgpu: {line}\n"
