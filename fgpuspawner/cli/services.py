"""The command ``fgpu services``: the processes of an installation, under systemd or under ``make run``.

What is the administrator's own, such as a database's server or an engine, is told and left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import requests

from fgpu_scheduler import BadSettings, FGPUError
from fgpuspawner.cli.command import JsonReport, Report, add_command, add_config, loaded, read_only
from fgpuspawner.cli.hub_config import quiet
from fgpuspawner.hub.moved import noted_urls
from fgpuspawner.settings.room import MIB
from fgpuspawner.text.tables import printable, table
from fgpuspawner.text.times import instant

HUB, PROXY, SERVICE, DATABASE, ENGINE = "hub", "proxy", "service", "database", "engine"
OURS = (HUB, PROXY, SERVICE)
UNITS = {HUB: "jupyterhub.service", PROXY: "jupyterhub-proxy.service"}
"""As docs/operations.md has them."""
SERVICE_PROGRAM = "fgpuspawner.service"
NOTED, LOG = "make-run.json", "make-run.log"
"""What ``make run`` (scripts/run.py) keeps in its data folder: which processes are its own, and what they say."""
AGAIN_WITHIN_S = 60.0
LINES, MOST_LINES = 20, 2000
LOOKED_THROUGH = 256 * 1024
ERRORS = re.compile(r'^\[[EC] |\berror\b|"level": "CRITICAL"', re.IGNORECASE)
SAID_BY = {
    PROXY: re.compile(r"\[ConfigProxy\]"),
    SERVICE: re.compile(r'^(\[[A-Z] \S+ [\d:]+ [\w.]+\]|\{"process": "service")'),
}
"""Whose line of a log of several it is; what nobody else says is the Hub's."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Found:
    """One of the services, as it is; what is None is not known."""

    name: str
    state: str
    since_s: int | None = None
    memory_mib: int | None = None
    last_error: str | None = None


class Manager(Protocol):
    """What keeps Hub and proxy running."""

    def processes(self) -> Mapping[str, int]:
        """Return the process ids of those that run, by name."""

    def act(self, action: str, name: str) -> None:
        """Start, stop or restart Hub or proxy.

        Raises:
            BadSettings: it cannot be; one line that says what to do instead.
        """

    def lines(self, names: Sequence[str], *, follow: bool, most: int = LINES) -> Iterable[str]:
        """Yield the last lines of their logs, and with ``follow`` those that come."""


class MakeRun:
    """``make run``: it starts again what has ended, and ends all on Ctrl-C."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def processes(self) -> Mapping[str, int]:
        """Return the process ids of those that run, by name, and of the run itself."""
        try:
            noted = json.loads((self._data / NOTED).read_text())
        except (OSError, ValueError):
            return {}
        owner = self._data.stat().st_uid
        return {name: int(pid) for name, (pid, began) in noted.items() if _is(int(pid), began, owner)}

    def act(self, action: str, name: str) -> None:
        """Restart one; the others are for who runs `make`."""
        if action != "restart":
            words = {"start": "it starts again what has ended", "stop": "end all with Ctrl-C there"}
            raise BadSettings(f"{action} {name}: this installation runs by make run; {words[action]}")
        process = psutil.Process(self.processes()[name])
        # A Hub that is asked to end takes its sessions along, as Ctrl-C does. One that is killed leaves them.
        (process.kill if name == HUB else process.terminate)()

    def lines(self, names: Sequence[str], *, follow: bool, most: int = LINES) -> Iterable[str]:
        """Yield lines of the one log, of those that are asked for."""
        with (self._data / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOOKED_THROUGH))
            text = file.read().decode(errors="replace")
            yield from [line for line in text.splitlines() if _whose(line) in names][-most:]
            while follow:
                line = file.readline().decode(errors="replace").rstrip("\n")
                if not line:
                    time.sleep(0.5)
                    if file.tell() > os.fstat(file.fileno()).st_size:
                        # It was cut back. What is left of it was told already.
                        file.seek(0, os.SEEK_END)
                elif _whose(line) in names:
                    yield line


class Systemd:
    """systemd, with the units of docs/operations.md."""

    def processes(self) -> Mapping[str, int]:
        """Return the process ids of those that run, by name."""
        found = {
            name: main_pid(_systemctl("show", unit, "--property=LoadState,MainPID"))
            for name, unit in UNITS.items()
        }
        return {name: pid for name, pid in found.items() if pid}

    def act(self, action: str, name: str) -> None:
        """Have systemd do it."""
        _systemctl(action, UNITS[name])

    def lines(self, names: Sequence[str], *, follow: bool, most: int = LINES) -> Iterable[str]:
        """Yield lines of the journal; the service's are in the Hub's unit."""
        units = dict.fromkeys(UNITS.get(name, UNITS[HUB]) for name in names)
        words = ["journalctl", "--output=cat", "--no-pager", *(f"--unit={unit}" for unit in units)]
        words += ["--follow"] * follow + [f"--lines={most if follow else MOST_LINES}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="replace") as journal:
            assert journal.stdout is not None
            mine = (line.rstrip("\n") for line in journal.stdout if _whose(line) in names)
            yield from mine if follow else list(mine)[-most:]


def manager_of(data: Path) -> Manager:
    """Return what keeps the installation with this data folder running."""
    run = MakeRun(data)
    return run if "run" in run.processes() else Systemd()


def main_pid(shown: str) -> int:
    """Return the main process of a unit, as ``systemctl show`` tells it; 0 where it does not run.

    Raises:
        BadSettings: there is no such unit.
    """
    said = dict(line.partition("=")[::2] for line in shown.splitlines())
    if said.get("LoadState") != "loaded":
        raise BadSettings(f"systemd has no units {' and '.join(UNITS.values())}; docs/operations.md has them")
    pid = said.get("MainPID", "0")
    return int(pid) if pid.isdigit() else 0


def _systemctl(*words: str) -> str:
    try:
        ended = subprocess.run(["systemctl", *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise BadSettings("neither make run nor systemd runs this installation here") from None
    if ended.returncode:
        raise BadSettings(
            f"systemctl {' '.join(words)}: {' '.join(ended.stderr.split()) or ended.returncode}"
        )
    return ended.stdout


def _is(pid: int, began: float, owner: int) -> bool:
    """Return whether a process that was noted still runs: ids are given away again, and others can write notes."""
    try:
        process = psutil.Process(pid)
        is_live = process.status() != psutil.STATUS_ZOMBIE
        return is_live and process.create_time() == began and process.uids().real == owner
    except psutil.Error:
        return False


def _whose(line: str) -> str:
    plain = COLOURS.sub("", line)
    return next((name for name, said in SAID_BY.items() if said.search(plain)), HUB)


# -- the command --------------------------------------------------------------------------------------


def add_to(commands: Any) -> None:
    about = "Look at Hub, proxy, service, database and engine, and start, stop or restart what is of this installation."
    parser = add_command(commands, run, "services", "Hub, proxy, service, database, engine", about)
    parser.add_argument(
        "action",
        choices=("status", "start", "stop", "restart", "logs"),
        help="what to do; status changes nothing",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="hub, proxy, service; default: all that can be"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="of logs: go on with the lines that come")
    add_config(parser)


def run(given: argparse.Namespace) -> list[str]:
    """Do one action, and return what became of it."""
    names = tuple(dict.fromkeys(given.names))
    for name in names:
        if name not in (*OURS, DATABASE, ENGINE):
            raise BadSettings(
                f"{printable(name)}: no such service; choose of {', '.join((*OURS, DATABASE, ENGINE))}"
            )
        if name not in OURS and given.action != "status":
            raise BadSettings(
                f"{given.action} {name}: it is not this installation's own; use what you started it with"
            )
    # Imported here: it takes a second, and no other command of `fgpu` is to wait for it.
    from jupyterhub.app import JupyterHub

    # No check, and no engine is asked: this is wanted when something is wrong.
    with quiet():
        config, settings = loaded(given.config)
        app = JupyterHub(config=config)
        app.init_hub()
    manager = manager_of(settings.data_path())
    if given.action == "logs":
        shown = (
            printable(COLOURS.sub("", line)) for line in manager.lines(names or OURS, follow=given.follow)
        )
        if not given.follow:
            return list(shown)
        for line in shown:
            print(json.dumps({"line": line}) if given.json else line, flush=True)
    if given.action == "status":
        # Where it listens may be for the engine to say, which is not asked here: the Hub has noted what that was.
        match noted_urls(settings.data_path()):
            case [str(url), *_]:
                pass
            case _:
                url = app.hub.api_url
        health = f"{url.rstrip('/').removesuffix('/api')}/health"
        found = [f for f in status(manager, settings.database_url(), health) if not names or f.name in names]
        well = all(f.state in ("running", "answers", "ok") for f in found)
        if given.json:
            return JsonReport([asdict(f) for f in found], status=0 if well else 1)
        return Report(_table(found), status=0 if well else 1)
    return [_acted(manager, given.action, name) for name in names or (HUB, PROXY)]


def _acted(manager: Manager, action: str, name: str) -> str:
    before = _pids(manager)
    if name == SERVICE:
        if action != "restart":
            raise BadSettings(f"{action} service: the Hub starts and ends it; restart is possible")
        if SERVICE not in before:
            raise BadSettings("restart service: it does not run; the Hub starts it within 30 s")
        psutil.Process(before[SERVICE]).terminate()
    elif action == "restart" and name not in before and isinstance(manager, MakeRun):
        raise BadSettings(f"restart {name}: it does not run; make run starts it")
    else:
        manager.act(action, name)
    until = time.monotonic() + AGAIN_WITHIN_S
    while time.monotonic() < until:
        pid = _pids(manager).get(name)
        if (
            (pid is None)
            if action == "stop"
            else (pid is not None and (action == "start" or pid != before.get(name)))
        ):
            return f"{name}: {'stopped' if action == 'stop' else f'runs, process {pid}'}"
        time.sleep(0.2)
    raise FGPUError(f"{action} {name}: not within {AGAIN_WITHIN_S:.0f} s; see fgpu services logs {name}")


def _pids(manager: Manager) -> dict[str, int]:
    """Return the process ids of what runs, the service's too: it is the Hub's."""
    found = {name: pid for name, pid in manager.processes().items() if name in OURS}
    try:
        for child in psutil.Process(found[HUB]).children() if HUB in found else ():
            if SERVICE_PROGRAM in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found[SERVICE] = child.pid
    except psutil.Error:
        pass
    return found


def status(manager: Manager, database: str, health: str) -> list[Found]:
    """Return how each of the services is."""
    pids = _pids(manager)
    last = {name: None for name in OURS} | _last_errors(manager)
    found = []
    for name in OURS:
        try:
            process = psutil.Process(pids[name])
            since_s, memory_mib = int(process.create_time()), process.memory_info().rss // MIB
            found.append(Found(name, "running", since_s, memory_mib, last[name]))
        except (KeyError, psutil.Error):
            found.append(Found(name, "stopped", last_error=last[name]))
    try:
        with read_only(database):
            found.append(Found(DATABASE, "answers"))
    except FGPUError as e:
        found.append(Found(DATABASE, "does not answer", last_error=str(e)))
    try:
        told = requests.get(health, timeout=10).json()["engine"]
        found.append(Found(ENGINE, str(told)))
    except (requests.RequestException, ValueError, KeyError, TypeError):
        found.append(Found(ENGINE, "not known", last_error="the Hub, which asks it, does not answer"))
    return found


def _last_errors(manager: Manager) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    try:
        for line in manager.lines(OURS, follow=False, most=MOST_LINES):
            plain = COLOURS.sub("", line)
            if ERRORS.search(plain):
                found[_whose(line)] = plain
    except OSError:
        pass
    return found


def _table(found: Sequence[Found]) -> list[str]:
    rows = []
    for f in found:
        memory = "" if f.memory_mib is None else f"{f.memory_mib} MiB"
        since = "" if f.since_s is None else instant(f.since_s)
        rows.append((f.name, f.state, since, memory, printable(f.last_error or "")[:100]))
    return table(["service", "state", "since", "memory", "last error"], rows)
