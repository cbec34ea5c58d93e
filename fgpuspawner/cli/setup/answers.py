"""The answers that ``fgpu setup`` gets from options, from questions, or from its last run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from fgpu_scheduler import parse_milli
from fgpuspawner.cli.command import UsageError

RUNTIMES = ("docker", "local")
TLS = ("proxy", "caddy", "nginx", "none")
LOGINS = ("pam", "password")
PORT, PLAIN_PORT = 443, 8000

_NAME = r"[a-z_][a-z0-9_.-]{0,31}"
_IMAGE = r"[a-z0-9][a-z0-9.-]{0,39}"
_FOLDER = r"(/[A-Za-z0-9._+-]+)+"
_HOST = r"(?=.{1,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers that describe an installation. All of them are safe in units and in Python code."""

    host: str = ""
    tls: str = "proxy"
    cert: str = ""
    key: str = ""
    subdomains: bool = False
    login: str = "pam"
    groups: tuple[str, ...] = ()
    admins: tuple[str, ...] = ()
    runtime: str = "docker"
    unit: str = "2"
    simulated: str = "0"
    images: tuple[str, ...] = ("base",)
    user: str = "fgpu"
    data: str = "/var/lib/fgpu"
    port: int = 0
    ports: tuple[int, int, int] = (8001, 8081, 10880)
    """Ports that only this machine and its sessions reach: the proxy's API, the Hub, the service."""

    @property
    def public_port(self) -> int:
        """The port of the proxy."""
        return self.port or (PORT if self.tls == "proxy" else PLAIN_PORT)

    @property
    def url(self) -> str:
        """What browsers are given."""
        if self.tls == "none":
            return f"http://127.0.0.1:{self.public_port}"
        port = f":{self.public_port}" if self.tls == "proxy" and self.public_port != PORT else ""
        return f"https://{self.host}{port}"

    @property
    def in_var_lib(self) -> bool:
        """Return whether systemd makes the data folder, for the Hub's user alone."""
        return self.data.startswith("/var/lib/")

    @property
    def groups_of_hub(self) -> list[str]:
        """The groups of the Hub's unit: to use the engine, and to check passwords."""
        return ["docker"] * (self.runtime == "docker") + ["shadow"] * (self.login == "pam")

    def checked(self) -> Answers:
        """Return these answers, or raise UsageError with one line that names a wrong one and what would work."""
        if self.runtime == "local" and self.tls != "none":
            raise UsageError(
                f"--tls is {self.tls}: local sessions are one user's, so others must not reach them; use --tls none, "
                "or --runtime docker"
            )
        path = "a whole path of letters, digits, '.', '_', '+' and '-', without spaces"
        host = "the name by which browsers find the Hub, such as hub.example"
        files = [one for one in (("--cert", self.cert), ("--key", self.key)) if one[1]]
        for option, value, pattern, use in (
            ("--user", self.user, _NAME, "a name of a-z, 0-9, _ and -, such as fgpu"),
            *(("--admin", name, _NAME, "a name of a-z, 0-9, _, . and -") for name in self.admins),
            *(("--group", name, _NAME, "a name of a-z, 0-9, _, . and -") for name in self.groups),
            *(("--image", name, _IMAGE, "a recipe, such as base or pytorch") for name in self.images),
            *((option, value, _FOLDER, path) for option, value in (("--data", self.data), *files)),
            ("--simulated", self.simulated, r"auto|[0-9]{1,3}", "a number, or auto"),
            *([] if self.tls == "none" else [("--host", self.host, _HOST, host)]),
        ):
            if not re.fullmatch(pattern, value):
                raise UsageError(f"{option} is {repr(value) if value else 'missing'}: use {use}")
        if self.user == "root":
            raise UsageError("--user is root: the Hub needs a user of its own, such as fgpu")
        if ".." in Path(self.data).parts or len(Path(self.data).parts) < 3:
            raise UsageError(f"--data is {self.data!r}: use a folder of its own, such as /var/lib/fgpu")
        parse_milli(self.unit, field="--unit")
        used = [self.public_port, *self.ports]
        if len(set(used)) < len(used) or not all(1 <= port <= 65535 for port in used):
            words = ", ".join(map(str, used))
            raise UsageError(f"--port and --ports come to {words}: use four different ones up to 65535")
        for option, file in (("--cert", self.cert), ("--key", self.key)):
            if not file and self.tls in ("proxy", "nginx"):
                raise UsageError(
                    f"{option} is missing: name the file, or use --tls caddy, which gets a certificate"
                )
        return self


def from_json(known: Mapping[str, Any]) -> Answers:
    """Return the answers of a record; unknown names are ignored, and missing ones have their defaults."""
    names = {f.name for f in fields(Answers)}
    given: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in known.items() if n in names
    }
    return Answers(**given)


def ask(answers: Answers) -> Answers:
    """Ask on the terminal what has no good default; Enter keeps the value in brackets."""
    runtime = click.prompt("What sessions run in", answers.runtime, type=click.Choice(RUNTIMES))
    tls = click.prompt("Who encrypts", answers.tls if runtime == "docker" else "none", type=click.Choice(TLS))
    answers = replace(answers, runtime=runtime, tls=tls)
    if tls != "none":
        answers = replace(answers, host=click.prompt("Name of the Hub in browsers", answers.host))
    if tls in ("proxy", "nginx"):
        answers = replace(answers, cert=click.prompt("File of the certificate", answers.cert))
        answers = replace(answers, key=click.prompt("File of its key", answers.key))
    words = "How people log in: accounts of this machine, or one password"
    login = click.prompt(words, answers.login, type=click.Choice(LOGINS))
    admins = click.prompt("Administrators, with spaces between them", " ".join(answers.admins))
    return replace(answers, login=login, admins=tuple(admins.split()))
