"""What the commands share: how one is added, which installation it is about, and opening that.

A command of users needs nothing of an installation: what opens one is loaded where it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fgpuspawner.cli.usage import CONFIG, CONFIG_OF_SETUP, UsageError, default_config
from fgpuspawner.text.tables import printable

if TYPE_CHECKING:
    from traitlets.config import Config

    from fgpu_scheduler import Policy, Store
    from fgpuspawner.settings import FGPU

INTERRUPTED = 130
"""The status of what Ctrl-C has ended, as shells tell it."""


class Report(list[str]):
    """Lines that are all printed, and the exit status after them."""

    def __init__(self, lines: Iterable[str], *, status: int = 0) -> None:
        super().__init__(lines)
        self.status = status


class JsonReport(Report):
    """One value as JSON, in place of lines."""

    def __init__(self, found: object, *, status: int = 0) -> None:
        super().__init__([json.dumps(found, indent=2)], status=status)


def add_command(
    commands: Any,
    run: Callable[..., list[str]],
    name: str,
    what: str,
    about: str = "",
    *,
    speaks_json: bool = True,
    **more: Any,
) -> argparse.ArgumentParser:
    """Add one command, run by this: ``what`` it does in the list of all, and in its own help where ``about`` is not.

    With ``--json`` it returns a `JsonReport`; the lines of one that returns others are printed as JSON.
    """
    about = about or f"{what[0].upper()}{what[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=about)
    if speaks_json:
        parser.add_argument("--json", action="store_true", help="print JSON, of errors too")
    parser.set_defaults(run=run, **more)
    return parser


def add_commands(commands: Any, name: str, what: str, about: str, *, metavar: str = "WHAT") -> Any:
    """Add a command that has commands of its own, and return what these are added to."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=about)
    return parser.add_subparsers(dest="what", metavar=metavar, required=True, parser_class=type(parser))


def add_config(parser: argparse.ArgumentParser, what: str = "default: ") -> None:
    """Add the option that names the Hub's configuration."""
    words = f"{what}{CONFIG}, or else {CONFIG_OF_SETUP}"
    parser.add_argument("--config", metavar="FILE", default=default_config(), help=words)


def add_config_or_db(parser: argparse.ArgumentParser) -> None:
    """Add the options that name an installation: its Hub's configuration, or its database."""
    where = parser.add_mutually_exclusive_group()
    words = f"the Hub's configuration; default: {CONFIG}, or else {CONFIG_OF_SETUP}"
    where.add_argument("--config", metavar="FILE", help=words)
    where.add_argument("--db", metavar="URL", help="the scheduler's database, instead of a configuration")


def loaded(path: str) -> tuple[Config, FGPU]:
    """Return a Hub's configuration and its settings, checked; no engine is asked, and so none has to run.

    Raises:
        UsageError, BadSettings: there is no such file, or it cannot work.
    """
    from fgpuspawner.cli.hub_config import load_config
    from fgpuspawner.settings import FGPU
    from fgpuspawner.settings.offline import without_engine

    with without_engine():
        config = load_config(path)
        return config, FGPU.from_config(config).checked()


def named(given: argparse.Namespace) -> tuple[str, Policy, FGPU | None]:
    """Return the database's URL and the policy of the installation that is named; the settings where these are known."""
    from fgpu_scheduler import Policy

    if given.db:
        return given.db, Policy(), None
    _, settings = loaded(given.config or default_config())
    return settings.database_url(), settings.policy(), settings


@contextlib.contextmanager
def read_only(url: str, **more: Any) -> Iterator[Store]:
    """Open a scheduler's database for reading.

    Raises:
        StoreUnavailable: it cannot be read, or no Hub has used it so far.
    """
    from fgpu_scheduler import Store

    with contextlib.closing(Store(url, **more)) as store:
        store.connect_readonly()
        yield store


@contextlib.contextmanager
def writable(settings: FGPU) -> Iterator[Store]:
    """Open an installation's database for reading and writing, beside its Hub.

    Raises:
        StoreUnavailable: it cannot be used, or no Hub has used it so far.
    """
    from fgpu_scheduler import Store

    with contextlib.closing(Store(settings.database_url())) as store:
        store.connect()
        yield store


def read_secret(path: str, what: str) -> str:
    """Return the one secret that a file holds.

    Raises:
        UsageError: others can read it.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            raise UsageError(f"others can read {path}, which has a {what} in it: chmod 600 {path}")
        return file.read(4096).strip()


def one_line(message: str) -> str:
    """Return what is wrong as one line: whatever the words are and wherever they are from, no URL has a password."""
    # Python's own form of what the system says: [Errno 2] No such file or directory: 'NAME'
    message = re.sub(r"\[Errno \d+\] ([^:']+): '([^']*)'", r"\2: \1", message)
    return printable(re.sub(r"://[^\s/]*@", "://***@", " ".join(message.split())))


def who() -> str:
    """Return who runs this, for the record."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "fgpu"
