"""The answers that ``fgpu setup`` gets from options, from questions, or from its last run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fgpu_scheduler import parse_milli
from fgpuspawner.cli.command import UsageError

RUNTIMES = ("docker", "local")
TLS = ("proxy", "caddy", "nginx", "none")
LOGINS = ("pam", "password")
PORT, PLAIN_PORT = 443, 8000

_NAME = r"[a-z_][a-z0-9_.-]{0,31}"
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
        """The groups that the Hub's unit is in: of the engine, and of what passwords are checked with."""
        return ["docker"] * (self.runtime == "docker") + ["shadow"] * (self.login == "pam")

    def checked(self) -> Answers:
        """Return these answers."""
        _matches("--user", self.user, _NAME, "a name of a-z, 0-9, _ and -, such as fgpu")
        if self.user == "root":
            raise UsageError("--user is root: the Hub needs a user of its own, such as fgpu")
        for option, names in (("--admin", self.admins), ("--group", self.groups)):
            for name in names:
                _matches(option, name, _NAME, "a name of a-z, 0-9, _, . and -")
        for image in self.images:
            _matches("--image", image, r"[a-z0-9][a-z0-9.-]{0,39}", "a recipe, such as base or pytorch")
        for option, path in (("--data", self.data), ("--cert", self.cert), ("--key", self.key)):
            if path or option == "--data":
                _matches(
                    option,
                    path,
                    _FOLDER,
                    "a whole path of letters, digits, '.', '_', '+' and '-', without spaces",
                )
        if ".." in Path(self.data).parts or len(Path(self.data).parts) < 3:
            raise UsageError(f"--data is {self.data!r}: use a folder of its own, such as /var/lib/fgpu")
        parse_milli(self.unit, field="--unit")
        if not re.fullmatch(r"auto|[0-9]{1,3}", self.simulated):
            raise UsageError(f"--simulated is {self.simulated!r}: use a number, or auto")
        self._check_network()
        return self

    def _check_network(self) -> None:
        used = [self.public_port, *self.ports]
        if len(set(used)) < len(used) or not all(1 <= port <= 65535 for port in used):
            words = ", ".join(map(str, used))
            raise UsageError(f"--port and --ports come to {words}: use four different ones up to 65535")
        if self.runtime == "local" and self.tls != "none":
            raise UsageError(
                f"--tls is {self.tls}: local sessions are one user's, so others must not reach them; use --tls none, "
                "or --runtime docker"
            )
        if self.tls == "none":
            return
        _matches("--host", self.host, _HOST, "the name by which browsers find the Hub, such as hub.example")
        for option, path in (("--cert", self.cert), ("--key", self.key)):
            if not path and self.tls != "caddy":
                raise UsageError(
                    f"{option} is missing: name the file, or use --tls caddy, which gets a certificate"
                )


def _matches(option: str, value: str, pattern: str, use: str) -> None:
    if not re.fullmatch(pattern, value):
        raise UsageError(f"{option} is {value!r}: use {use}" if value else f"{option} is missing: use {use}")


def from_json(known: Mapping[str, Any]) -> Answers:
    """Return the answers of a record; what it does not know, or what we do not know of it, is left at the default."""
    names = {f.name for f in fields(Answers)}
    given: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in known.items() if n in names
    }
    return Answers(**given)


def ask(answers: Answers, question: Callable[[str], str]) -> Answers:
    """Return the answers after the few questions that have no good default; Enter keeps what is in brackets."""

    def one(words: str, known: str, among: tuple[str, ...] = ()) -> str:
        while True:
            choice = f" ({', '.join(among)})" if among else ""
            said = question(f"{words}{choice} [{known}]: ").strip() or known
            if not among or said in among:
                return said

    runtime = one("What sessions run in", answers.runtime, RUNTIMES)
    tls = one("Who encrypts", answers.tls if runtime == "docker" else "none", TLS)
    answers = replace(answers, runtime=runtime, tls=tls)
    if tls != "none":
        answers = replace(answers, host=one("Name of the Hub in browsers", answers.host))
    if tls in ("proxy", "nginx"):
        answers = replace(answers, cert=one("File of the certificate", answers.cert))
        answers = replace(answers, key=one("File of its key", answers.key))
    login = one("How people log in: accounts of this machine, or one password", answers.login, LOGINS)
    admins = one("Administrators, with spaces between them", " ".join(answers.admins))
    return replace(answers, login=login, admins=tuple(admins.split()))
