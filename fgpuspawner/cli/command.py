"""What the commands share: their class and common options, and opening the installation that a command is about.

A command for users needs no installation, so the functions that open one import what they need themselves.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fgpu_scheduler import FGPUError
from fgpuspawner.text.tables import printable

if TYPE_CHECKING:
    from fgpu_scheduler import Store
    from fgpuspawner.settings import FGPU

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells report it."""
CONFIG, CONFIG_OF_SETUP = "jupyterhub_config.py", "/etc/jupyterhub/jupyterhub_config.py"
"""The Hub's configuration unless a file is named: in the working folder, or else as `fgpu setup` writes it."""
FILE = click.Path()


class UsageError(FGPUError):
    """The command was used wrongly."""

    code = "usage"


class Report(list[str]):
    """The lines that a command prints, the value that it prints with ``--json``, and its exit status.

    ``found=None`` prints the lines as JSON.
    """

    def __init__(self, lines: Iterable[str] = (), found: object = None, *, status: int = 0) -> None:
        super().__init__(lines)
        self.found = found
        self.status = status


class Command(click.Command):
    """A command: its function returns lines or a `Report`. It takes at most one of the ``exclusive`` options."""

    def __init__(self, *args: Any, speaks_json: bool = True, exclusive: tuple[str, ...] = (), **more: Any):
        super().__init__(*args, **more)
        self.exclusive = exclusive
        if speaks_json:
            what = "print JSON, of errors too"
            self.params.append(click.Option(["--json"], is_flag=True, expose_value=False, help=what))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        typed = click.core.ParameterSource.COMMANDLINE
        given = [f"--{n.replace('_', '-')}" for n in self.exclusive if ctx.get_parameter_source(n) is typed]
        if len(given) > 1:
            ctx.fail(f"{' and '.join(given)} exclude each other, give one")
        return left


class Group(click.Group):
    """A command that has commands of its own. Used without one it is an error of one line, not its help."""

    command_class = Command

    def __init__(self, name: str | None = None, **more: Any) -> None:
        super().__init__(name, no_args_is_help=False, **more)


command = functools.partial(click.command, cls=Command)


def in_json() -> bool:
    """Return whether the command prints JSON."""
    return bool(click.get_current_context().obj)


def default_config() -> str:
    return CONFIG_OF_SETUP if not Path(CONFIG).is_file() and Path(CONFIG_OF_SETUP).is_file() else CONFIG


_CONFIG_HELP = f"the Hub's configuration; default: {CONFIG}, or else {CONFIG_OF_SETUP}"
config_option = click.option("--config", metavar="FILE", type=FILE, default=default_config, help=_CONFIG_HELP)


def config_or_db_options(does: Any) -> Any:
    """Add the options that name an installation: its Hub's configuration, or its database."""
    what = "the scheduler's database, instead of a configuration"
    does = click.option("--db", metavar="URL", help=what)(does)
    return click.option("--config", metavar="FILE", type=FILE, help=_CONFIG_HELP)(does)


@contextlib.contextmanager
def read_only(url: str, **more: Any) -> Iterator[Store]:
    """Open a scheduler's database for reading."""
    from fgpu_scheduler import Store

    with contextlib.closing(Store(url, **more)) as store:
        store.connect_readonly()
        yield store


@contextlib.contextmanager
def writable(settings: FGPU) -> Iterator[Store]:
    """Open an installation's database for reading and writing, while its Hub may run."""
    from fgpu_scheduler import Store

    with contextlib.closing(Store(settings.database_url())) as store:
        store.connect()
        yield store


def read_secret(path: str, what: str) -> str:
    """Return the one secret that a file holds."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            raise UsageError(f"others can read {path}, which has a {what} in it: chmod 600 {path}")
        return file.read(4096).strip()


def one_line(message: str) -> str:
    """Return a message as one printable line, without the passwords of URLs."""
    # Python writes an error of the system as: [Errno 2] No such file or directory: 'NAME'
    message = re.sub(r"\[Errno \d+\] ([^:']+): '([^']*)'", r"\2: \1", message)
    return printable(re.sub(r"://[^\s/]*@", "://***@", " ".join(message.split())))


def who() -> str:
    """Return the name of the user who runs this, for the audit log."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "fgpu"
