"""The command ``fgpu``: an installation's state and configuration for administrators, and their sessions for users.

Every error is one line on standard error: status 1 where something is wrong, 2 where the command was used
wrongly. With ``--json`` it is on standard output, too, as the API has it. Only ``fgpu node``, ``fgpu images``,
``fgpu quota`` and ``fgpu restore`` write to a database themselves. No password is shown.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fgpu_scheduler import FGPUError
from fgpuspawner import __version__
from fgpuspawner.cli.command import INTERRUPTED, JsonReport, Report, one_line
from fgpuspawner.cli.completion import ASKED as COMPLETES
from fgpuspawner.cli.completion import complete
from fgpuspawner.cli.usage import UsageError

COMMANDS = {
    "run": "sessions",
    "list": "sessions",
    "show": "sessions",
    "end": "sessions",
    "forecast": "sessions",
    "grow": "grow",
    "setup": "setup.command",
    "status": "status",
    "check": "check",
    "report": "report",
    "firewall": "firewall",
    "node": "node",
    "backup": "backup",
    "restore": "backup",
    "images": "images",
    "kube": "kube",
    "replay": "replay",
    "quota": "quota",
    "members": "members",
    "audit": "audit",
    "completion": "completion",
}
"""Each command, and the module of this package that adds it: of those of one module all stand together."""

ABOUT = """Start and end your GPU sessions (run, list, show, end, forecast, grow), or look after an installation (the
others)."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def make_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command; the docs are checked against it.

    With the ``words`` that are to be read it has the options of their command alone, and loads what that one needs.
    """
    parser = Parser(prog="fgpu", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"fgpu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    named = None if words is None else next((word for word in words if not word.startswith("-")), None)
    every = named is None and (words is None or "--version" not in words)
    loaded = set(COMMANDS.values()) if every else {COMMANDS.get(named or "")}
    for name, module in COMMANDS.items():
        if module not in loaded:
            commands.add_parser(name)
        elif name not in commands.choices:
            importlib.import_module(f"fgpuspawner.cli.{module}").add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    if COMPLETES in os.environ:
        complete(make_parser)
    words = sys.argv[1:] if arguments is None else list(arguments)
    in_json = "--json" in words
    try:
        given = make_parser(words).parse_args(words)
        lines = given.run(given)
        if in_json and not isinstance(lines, JsonReport):
            lines = JsonReport({"lines": lines}, status=lines.status if isinstance(lines, Report) else 0)
    except (FGPUError, OSError) as e:
        return _fail(e, str(e), 2 if isinstance(e, UsageError) else 1, in_json=in_json)
    except KeyboardInterrupt as e:
        return _fail(e, "interrupted", INTERRUPTED, in_json=in_json)
    except Exception as e:
        said = _said_by_the_database(e)
        if said is None:
            raise
        return _fail(e, f"the scheduler's database cannot be read: {said}", 1, in_json=in_json)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # Its reader (``| head``) has seen enough. Python would complain once more while it ends.
        sys.stdout = None
    return lines.status if isinstance(lines, Report) else 0


def _said_by_the_database(error: Exception) -> str | None:
    """Return what a database says that the store does not tell apart, such as of a damaged file; None of other errors.

    Only the driver's words: the rest of the text can hold the statement and the URL.
    """
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy.exc import SQLAlchemyError

    return str(getattr(error, "orig", None) or "see the Hub") if isinstance(error, SQLAlchemyError) else None


def _fail(error: BaseException, message: str, status: int, *, in_json: bool) -> int:
    line = one_line(message)
    if in_json:
        code = "interrupted" if status == INTERRUPTED else getattr(error, "code", "error")
        said = {"code": code, "field": getattr(error, "field", None), "message": line}
        print(json.dumps({"error": said}, indent=2), flush=True)
    print(f"fgpu: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
