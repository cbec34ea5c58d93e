"""The command ``fgpu report``: what a support request needs, in one file and without secrets.

Of the configuration it shows the plain values of settings that are known to hold no secret, and only the names of the
others. Then it hides this installation's secrets and users in every line.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from traitlets.config import Config

from fgpu_scheduler import FGPUError, StoreUnavailable
from fgpuspawner.cli import check
from fgpuspawner.cli.command import FILE, command, config_option, read_only
from fgpuspawner.cli.hub_config import load_config, quiet
from fgpuspawner.cli.units import HUB, PROXY
from fgpuspawner.settings import FGPU, without_engine
from fgpuspawner.text.tables import printable

PACKAGES = [
    "fgpuspawner",
    "jupyterhub",
    "dockerspawner",
    "jupyterhub-kubespawner",
    "SQLAlchemy",
    "psycopg",
    "tornado",
]
SHOWN = {
    "JupyterHub": set(
        [
            "allow_named_servers",
            "authenticator_class",
            "base_url",
            "bind_url",
            "cleanup_servers",
            "db_url",
            "hub_bind_url",
            "hub_ip",
            "hub_port",
            "named_server_limit_per_user",
            "spawner_class",
            "subdomain_host",
        ]
    ),
    "ConfigurableHTTPProxy": {"api_url", "should_start"},
}
"""The settings of each section that the report shows; of ``c.FGPU`` it shows all plain values. With a list of what to
hide, a secret in an unknown setting would be shown."""
SECRET = re.compile(
    r"secret|token|password|passwd|passphrase|credential|private|cookie|auth|api_?key|crypt_key",
    re.IGNORECASE,
)
"""Settings, variables and files with these words in their names hold secrets."""
HIDDEN = "[hidden]"
IN_URL = re.compile(r"://[^\s/@]*@")
QUERY = re.compile(r"\?[^\s\"')]+")
SAID = re.compile(
    r"(?i)\b(authorization|bearer|token|secret|password|passwd|cookie|key|code|state)(\W{1,4}(?:token |bearer )?)\S+"
)
LONG = re.compile(r"(?<![\w.-])(?=[\w+-]*\d)(?=[\w+-]*[A-Za-z])[\w+-]{20,}={0,2}")
"""Words with letters and digits that are as long as a token."""
OF_USERS = re.compile(
    r"(/users?/|Session \d+ \(|\((?=[^\s()@]+@)|[Ll]ogin for |[Uu]ser(?:name)? |logged (?:in|out): )([^\s/()@,:;]+)"
)
"""User names in the Hub's log, including those that the databases no longer know."""
GPU_ID = re.compile(r"^(GPU|MIG)-[0-9a-fA-F-]+$|^GPU-simulated")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LINES = 200
LOGS = "logs"
LOG = "make-run.log"
"""Where ``make run`` keeps what all of its programs say, in its data folder."""
LONGEST_SECRET_FILE = 4096
SHORTEST_SECRET = 6
"""A shorter text may be part of any word."""


@command("report")
@click.argument("file", type=FILE)
@click.option("--users", "named", is_flag=True, help="with the names of users")
@config_option
def report_command(file: str, named: bool, config: str) -> list[str]:
    """Write what a support request needs into one new FILE: versions, check, settings, queue, logs. No secrets."""
    parts: dict[str, list[str]] = {"versions": _versions()}
    found, settings, known = Config(), None, {v for n, v in os.environ.items() if SECRET.search(n)}
    users: set[str] = set()
    try:
        with without_engine(), quiet():
            found = load_config(config)
            settings = FGPU.from_config(found).checked()
    except FGPUError as e:
        parts["configuration cannot be used"] = [str(e)]
    known |= set(_of_config(found))
    # Last, as it loads the configuration as the Hub does.
    parts["check"] = _said(lambda: check.examined(config))
    parts["settings"] = list(_settings(found))
    if settings is not None:
        data = settings.data_path()
        known |= set(_of_files(data))
        database = settings.database_url()
        parts["queue"] = _said(lambda: _queue(database))
        parts[LOGS] = _said(lambda: _logs(data))
        if not named:
            try:
                users = _users(database, str(found.JupyterHub.db_url))
            except (FGPUError, SQLAlchemyError, ImportError):
                parts[LOGS] = [
                    "left out: who the users are cannot be read, and so not be hidden; see --users"
                ]
    hide = Hiding(known, users, named=named)
    lines = [
        line
        for title, own in parts.items()
        for line in (f"== {title}", *(hide(line, is_log=title == LOGS) for line in own), "")
    ]
    # A new file, that only its owner reads until they have.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as written:
        written.write("\n".join(lines))
    return [f"OK: {file}, {len(lines)} lines: {', '.join(parts)}", "  read it before you send it"]


class Hiding:
    """Hides known secrets, what looks like a secret, and names of users in a line."""

    def __init__(self, secrets: Iterable[str], users: Iterable[str], *, named: bool = False) -> None:
        self._named = named
        # The longest first: one may be part of another.
        known = sorted((s for s in secrets if len(s) >= SHORTEST_SECRET), key=lambda s: (-len(s), s))
        self._secrets = re.compile("|".join(map(re.escape, known))) if known else None
        names = sorted(users, key=lambda s: (-len(s), s))
        self._numbers = {name: f"user-{n}" for n, name in enumerate(sorted(names), 1)}
        self._names = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)") if names else None

    def __call__(self, line: str, *, is_log: bool = False) -> str:
        line = printable(COLOURS.sub("", line))
        if self._secrets is not None:
            line = self._secrets.sub(HIDDEN, line)
        line = QUERY.sub(f"?{HIDDEN}", IN_URL.sub(f"://{HIDDEN}@", line))
        line = SAID.sub(rf"\1\2{HIDDEN}", line)
        line = LONG.sub(lambda found: found[0] if GPU_ID.match(found[0]) else HIDDEN, line)
        if is_log and not self._named:
            line = OF_USERS.sub(lambda found: found[1] + self._numbers.get(found[2], "somebody"), line)
        if self._names is not None:
            line = self._names.sub(lambda found: self._numbers[found[1]], line)
        return line


def _said(ask: Any) -> list[str]:
    try:
        with quiet():
            return list(ask())
    except (FGPUError, SQLAlchemyError, OSError) as e:
        return [f"{type(e).__name__}: {' '.join(str(e).split())}"]


def _versions() -> list[str]:
    lines = [f"Python {platform.python_version()}, {platform.platform()}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name}: not installed")
    return lines


def _settings(config: Config) -> Iterator[str]:
    for section in sorted(config):
        for name, value in sorted(config[section].items()):
            may = section == "FGPU" or name in SHOWN.get(section, ())
            plain = value is None or isinstance(value, bool | int | float | str | type)
            words = "set"
            if may and plain and not SECRET.search(name.replace("authenticator", "")):
                words = value.__name__ if isinstance(value, type) else repr(value)
            elif may and isinstance(value, list | dict | tuple | set):
                words = f"{len(value)} entries"
            yield f"c.{section}.{name} = {words}"


def _queue(database: str) -> list[str]:
    with read_only(database) as store:
        found = store.snapshot(int(time.time()))
    counts = Counter(("nodes", n.state.value) for n in found.nodes)
    counts += Counter((f"group {s.request.resource_group}", s.state.value) for s in found.sessions)
    lines = [f"{what}: {number} {state}" for (what, state), number in sorted(counts.items())]
    return lines if found.sessions else [*lines, "no sessions"]


def _logs(data: Path) -> list[str]:
    if (data / LOG).is_file():
        return (data / LOG).read_text(errors="replace").splitlines()[-LINES:]
    words = f"journalctl --output=cat --no-pager --lines={LINES} --unit={HUB} --unit={PROXY}"
    done = subprocess.run(words.split(), capture_output=True, text=True, errors="replace", check=False)
    return (done.stdout or done.stderr).splitlines()


# -- secrets and users ---------------------------------------------------------------------------------


def _of_config(value: object, *, secret: bool = False) -> Iterator[str]:
    """Yield a configuration's values with names that match `SECRET`, at any depth, and the passwords in its URLs."""
    if isinstance(value, str | bytes):
        words = value.decode(errors="replace") if isinstance(value, bytes) else value
        if secret:
            yield words
        yield from _of_url(words)
    elif isinstance(value, dict):
        for name, more in value.items():
            # A session's environment may hold any secret.
            yield from _of_config(
                more, secret=secret or name == "environment" or bool(SECRET.search(str(name)))
            )
    elif isinstance(value, list | tuple | set | frozenset):
        for more in value:
            yield from _of_config(more, secret=secret)


def _of_url(words: str) -> Iterator[str]:
    if "://" not in words:
        return
    try:
        url = make_url(words)
    except (SQLAlchemyError, ValueError):
        return
    if url.password:
        yield str(url.password)
    for values in url.query.values():
        yield from (values,) if isinstance(values, str) else values


def _of_files(data: Path) -> Iterator[str]:
    for path in data.iterdir() if data.is_dir() else ():
        if SECRET.search(path.name) and path.is_file() and path.stat().st_size <= LONGEST_SECRET_FILE:
            yield from path.read_text(errors="replace").split()


def _users(database: str, hub: str) -> set[str]:
    try:
        with read_only(database) as store:
            found = {s.request.user for s in store.snapshot(int(time.time())).sessions}
    except StoreUnavailable as e:
        if not str(e).endswith(check.NOT_YET):
            raise
        found = set()
    engine = create_engine(hub)
    try:
        with engine.connect() as connection:
            return found | {str(name) for (name,) in connection.execute(text("SELECT name FROM users"))}
    finally:
        engine.dispose()
