"""The command ``fgpu``: an installation's state and configuration for administrators, and their sessions for users.

Every error is one line on standard error: status 1 where something is wrong, 2 where the command was used
wrongly. Only ``fgpu node``, ``fgpu images``, ``fgpu restore`` and ``fgpu move`` write to a database.
No password is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from sqlalchemy.exc import SQLAlchemyError

from fgpu_scheduler import FGPUError
from fgpuspawner import __version__
from fgpuspawner.cli import (
    backup,
    check,
    firewall,
    image_build,
    images,
    kube,
    move,
    node,
    private_images,
    replay,
    report,
    services,
    sessions,
    status,
    upgrade,
)
from fgpuspawner.cli.api import CallFailed
from fgpuspawner.cli.command import INTERRUPTED, Report, one_line
from fgpuspawner.cli.hub_config import UsageError
from fgpuspawner.cli.setup import command as setup


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; the docs are checked against it."""
    parser = Parser(prog="fgpu", description="GPU sessions, and the installation that they are of.")
    parser.add_argument("--version", action="version", version=f"fgpu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (setup, status, check, report, services, firewall, node, backup, move, upgrade):
        command.add_to(commands)
    own = images.add_to(commands)
    for more in (private_images, image_build):
        more.add_to(own)
    kube.add_to(commands)
    replay.add_to(commands)
    sessions.add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        given = make_parser().parse_args(arguments)
        lines = given.run(given)
    except UsageError as e:
        return _fail(str(e), 2)
    except SQLAlchemyError as e:
        # What the store does not tell apart, such as a damaged file. Only the driver's words: the rest
        # of the text can hold the statement and the URL.
        said = getattr(e, "orig", None) or "see the Hub"
        return _fail(f"the scheduler's database cannot be read: {said}", 1)
    except CallFailed as e:
        if given.json:
            print(json.dumps(e.as_json(), indent=2))
        return _fail(str(e), 1)
    except (FGPUError, OSError) as e:
        return _fail(str(e), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # Its reader (``| head``) has seen enough. Python would complain once more while it ends.
        sys.stdout = None
    return lines.status if isinstance(lines, Report) else 0


def _fail(message: str, status: int) -> int:
    print(f"fgpu: {one_line(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
