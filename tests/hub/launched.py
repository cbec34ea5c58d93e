"""What really runs, seen from outside the Hub: processes or containers, by session."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import psutil

from hubprocess import HubProcess


def launched(hub: HubProcess, kind: str) -> dict[int, int]:
    """Return how many live servers each session has. More than one is a fault; none may be one."""
    installation = hub.store.installation_id
    return _processes(installation) if kind == "local" else _containers(installation, hub.docker_hosts)


def _containers(installation: str, hosts: Sequence[str]) -> dict[int, int]:
    listed: list[str] = []
    filters = ["--filter", f"label=fgpu.installation={installation}"]
    for host in hosts:
        cli = ["docker", *(["-H", host] if host else [])]
        words = [*cli, "ps", *filters, "--format", '{{.Label "fgpu.session"}}']
        listed += subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return {int(i): listed.count(i) for i in listed}


def processes_of(hub: HubProcess, session_id: int) -> list[psutil.Process]:
    """Return the live processes of a session that runs as a local process."""
    marks = {"FGPU_INSTALLATION": hub.store.installation_id, "FGPU_SESSION_ID": str(session_id)}
    found = []
    for process in psutil.process_iter():
        try:
            if marks.items() <= process.environ().items():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _processes(installation: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for process in psutil.process_iter():
        try:
            if process.name() == "probe":
                continue  # It verifies a session beside its server, with the server's environment.
            env = process.environ()
            if env.get("FGPU_INSTALLATION") == installation and process.status() != psutil.STATUS_ZOMBIE:
                session = int(env["FGPU_SESSION_ID"])
                found[session] = found.get(session, 0) + 1
        except (psutil.Error, OSError):
            continue
    return found
