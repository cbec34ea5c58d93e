"""Checks before anything is written: each is a line with OK, WARN or FAIL, and what to do."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from fgpuspawner.cli.hub_traits import is_taken, wrong_certificate
from fgpuspawner.cli.setup.answers import Answers
from fgpuspawner.cli.setup.files import PASSWORDS, Programs
from fgpuspawner.cli.setup.machine import Machine

OK, WARN, FAIL = "OK", "WARN", "FAIL"
NODE = 20
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What the units do not see, or find empty."""
CHECK_S = 120
NOBODY = 61184
"""A user that owns no file: the first of those that systemd gives to a service for as long as it runs."""


def program(name: str, *folders: Path) -> Path | None:
    """Return where a program is: in these folders, or on PATH."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    return Path(found).absolute() if found else None


class CheckLine(NamedTuple):
    """One line of the checks."""

    level: str
    words: str


def look(machine: Machine, answers: Answers, programs: Programs, *, again: bool) -> list[CheckLine]:
    """Return the findings about a machine before its setup; ``again``: an earlier setup runs, and has its ports."""
    found = [_systemd(machine), _proxy(programs), *_places(machine, programs)]
    if answers.tls != "none":
        found += _name(answers)
    if machine.is_real and not again:
        found += _ports(answers)
    if answers.runtime == "docker" and machine.is_real:
        found.append(_docker(machine))
    if answers.login == "pam" and machine.is_real and machine.number("shadow", of="group") is None:
        found.append(
            CheckLine(FAIL, "there is no group shadow to check passwords with; use --login password")
        )
    return found


def _systemd(machine: Machine) -> CheckLine:
    if program("systemctl") is None or program("systemd-sysusers") is None:
        return CheckLine(FAIL, "there is no systemd: set the Hub up by hand (docs/operations.md)")
    if machine.is_real and not Path("/run/systemd/system").is_dir():
        return CheckLine(
            FAIL, "systemd does not run here: use a machine with it, or --root FOLDER to see the files"
        )
    if machine.is_real and os.geteuid() != 0:
        return CheckLine(FAIL, "you are not root: run it with sudo, or with --dry-run")
    return CheckLine(OK, "systemd")


def _proxy(programs: Programs) -> CheckLine:
    if not programs.proxy:
        return CheckLine(FAIL, "there is no configurable-http-proxy: npm install -g configurable-http-proxy")
    node = program("node", *map(Path, programs.proxy_path.split(os.pathsep))) or "node"
    said = Machine(Path("/")).tried(node, "--version").stdout.strip()
    version = re.match(r"v(\d+)\.", said)
    if version is None or int(version[1]) < NODE:
        return CheckLine(FAIL, f"Node is {said or 'not there'}: the proxy needs {NODE} or newer")
    return CheckLine(OK, f"{programs.proxy}, Node {said}")


def _places(machine: Machine, programs: Programs) -> list[CheckLine]:
    wrong = []
    for path in dict.fromkeys((programs.folder, str(Path(programs.proxy or "/").parent), sys.base_prefix)):
        hidden = next((h for h in HIDDEN if Path(path).is_relative_to(h)), None)
        closed = next((p for p in Path(path).parents if not p.stat().st_mode & stat.S_IXOTH), None)
        if hidden or closed:
            why = f"in {hidden}, which the units do not see" if hidden else f"closed to others by {closed}"
            level = FAIL if machine.is_real else WARN
            wrong.append(CheckLine(level, f"{path} is {why}: install into /opt, such as /opt/fgpu"))
    return wrong or [CheckLine(OK, programs.folder)]


def _name(answers: Answers) -> list[CheckLine]:
    found = [CheckLine(OK, f"{answers.host} has an address")]
    try:
        socket.getaddrinfo(answers.host, None)
    except OSError:
        found = [CheckLine(WARN, f"{answers.host} has no address here: browsers have to find it")]
    if answers.cert:
        why = wrong_certificate(answers.cert, answers.key)
        found.append(CheckLine(FAIL if why else OK, why or "certificate and key belong together"))
    return found


def _ports(answers: Answers) -> list[CheckLine]:
    taken = [
        CheckLine(FAIL, f"port {port} is used by another program: end it, or use --port or --ports")
        for port in (answers.public_port, answers.ports[0])
        if is_taken("127.0.0.1", port)
    ]
    return taken or [CheckLine(OK, f"port {answers.public_port} is free")]


def _docker(machine: Machine) -> CheckLine:
    done = machine.tried("docker", "version", "--format", "{{.Server.Version}}")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no words"])[-1]
        words = f"Docker does not answer: {said}; install docker.io or docker-ce, or use --runtime local"
        return CheckLine(FAIL, words)
    if machine.number("docker", of="group") is None:
        return CheckLine(FAIL, "there is no group docker for the Hub: groupadd --system docker")
    return CheckLine(OK, f"Docker {done.stdout.strip()}")


def of_the_configuration(
    machine: Machine, answers: Answers, text: str, secrets: dict[str, str]
) -> list[CheckLine]:
    """Return what `fgpu check` says of the configuration, before it is written where the Hub finds it.

    The check runs as the Hub's user, or as `NOBODY` before that user exists.
    """
    as_user: dict[str, Any] = {}
    if machine.is_real and not Path(answers.data).exists():
        groups = [g for name in answers.groups_of_hub if (g := machine.number(name, of="group")) is not None]
        as_user = {"user": NOBODY, "group": NOBODY, "extra_groups": groups}
    with tempfile.TemporaryDirectory(prefix="fgpu-setup-") as folder:
        config = Path(folder, "jupyterhub_config.py")
        config.write_text(text)
        for path in PASSWORDS:
            Path(folder, Path(path).name).write_text(secrets[path])
        for own in (Path(folder), *Path(folder).iterdir()) if as_user else ():
            os.chown(own, NOBODY, NOBODY)
        done = subprocess.run(
            [sys.executable, "-m", "fgpuspawner.cli.main", "check", "--config", config],
            cwd=folder,
            env={**os.environ, "CONFIGPROXY_AUTH_TOKEN": "not known here"},
            capture_output=True,
            text=True,
            check=False,
            timeout=CHECK_S,
            **as_user,
        )
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        wrong = [line.removeprefix("FAIL: ") for line in lines[1:] if line.startswith("FAIL: ")] or lines
        return [CheckLine(FAIL, f"fgpu check: {' '.join(wrong) or done.returncode}")]
    # Setup itself has Docker keep its containers.
    return [
        CheckLine(OK, "fgpu check"),
        *(CheckLine("", line) for line in lines[1:] if "live-restore" not in line),
    ]
