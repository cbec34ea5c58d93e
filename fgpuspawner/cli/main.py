"""The command ``fgpu``: sessions for users, and the state and configuration of an installation for administrators.

Every error is one line on standard error, with status 1, or 2 where the command was used wrongly. With ``--json``
the error is also on standard output, in the words of the API. Only ``fgpu node``, ``fgpu images``, ``fgpu quota`` and
``fgpu restore`` write to a database. The command shows no password.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, shell_complete

from fgpu_scheduler import FGPUError
from fgpuspawner import __version__
from fgpuspawner.cli.command import INTERRUPTED, Group, Report, UsageError, one_line

COMPLETES = "_FGPU_COMPLETE"
"""The variable that a shell sets to ask for completions."""

SECTIONS = {
    "Your sessions": {
        "run": ("sessions", "start sessions, or queue them"),
        "list": ("sessions", "your sessions"),
        "show": ("sessions", "everything about one session"),
        "logs": ("sessions", "what a session has printed"),
        "rename": ("sessions", "give a session another name"),
        "park": ("sessions", "give a session's GPU to others; its kernels and variables stay"),
        "wake": ("sessions", "ask for the GPU of a parked session"),
        "grow": ("sessions", "give a running session more of its GPU, or less"),
        "end": ("sessions", "end a session, or cancel its request"),
        "forecast": ("sessions", "when a request would start"),
        "completion": ("completion", "completion for bash, zsh or fish"),
    },
    "For administrators": {
        "setup": ("setup.command", "set up a Hub on this machine, or take it back"),
        "status": ("status", "Hub, capacity, sessions and queue"),
        "check": ("check", "try a Hub's configuration"),
        "report": ("report", "what a support request needs, in one file"),
        "firewall": ("machines", "close this machine to sessions in containers"),
        "node": ("machines", "take a machine or a GPU out of use, and back"),
        "backup": ("backup", "write an installation's data into one file"),
        "restore": ("backup", "put back what a backup holds"),
        "images": ("images", "the images that sessions start from"),
        "kube": ("kube", "what sessions on Kubernetes need"),
        "replay": ("replay", "what another policy or quota would have done"),
        "quota": ("csv_files", "all quotas as a CSV file"),
        "members": ("csv_files", "the members of JupyterHub's groups as a CSV file"),
        "audit": ("sessions", "who did what"),
    },
}
"""Every command with the module that has it, and its line in the help. A module is imported when its command runs."""

COMMANDS = {name: module for own in SECTIONS.values() for name, (module, _) in own.items()}


class Commands(Group):
    """The commands of `SECTIONS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"fgpuspawner.cli.{COMMANDS[cmd_name]}")
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, own in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, what) for name, (_, what) in own.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        known = [(name, what) for own in SECTIONS.values() for name, (_, what) in own.items()]
        found = [CompletionItem(name, help=what) for name, what in known if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=Commands)
@click.version_option(__version__, message="fgpu %(version)s")
def cli() -> None:
    """Start and end your GPU sessions, or look after an installation.

    \b
    Start a session with half an fGPU and wait until it runs; give its GPU back while you think:
      fgpu run --image pytorch --fgpu 0.5 --wait
      fgpu park 12

    For your sessions set FGPU_HUB_URL (the Hub's address) and JUPYTERHUB_API_TOKEN (from the page Tokens).
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    if COMPLETES in os.environ:
        sys.exit(shell_complete(cli, {}, "fgpu", COMPLETES, os.environ[COMPLETES]))
    words = sys.argv[1:] if arguments is None else list(arguments)
    in_json = "--json" in words
    try:
        with cli.make_context("fgpu", words, obj=in_json) as context:
            report = cli.invoke(context)
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.UsageError as e:
        where = e.ctx.command_path if e.ctx else "fgpu"
        return _fail(UsageError(f"{e.format_message().rstrip('.')}; see {where} --help"), 2, in_json=in_json)
    except (FGPUError, OSError) as e:
        return _fail(e, 2 if isinstance(e, UsageError) else 1, in_json=in_json)
    except (KeyboardInterrupt, click.Abort):
        # `click.prompt` turns Ctrl-C and the end of the input into Abort.
        return _fail(Interrupted("interrupted"), INTERRUPTED, in_json=in_json)
    except Exception as e:
        said = _said_by_the_database(e)
        if said is None:
            raise
        return _fail(FGPUError(f"the scheduler's database cannot be read: {said}"), 1, in_json=in_json)
    return _print(report, in_json=in_json)


class Interrupted(FGPUError):
    """Ctrl-C ended the command."""

    code = "interrupted"


def _print(report: Sequence[str], *, in_json: bool) -> int:
    found: Any = report.found if isinstance(report, Report) else None
    lines = [json.dumps({"lines": report} if found is None else found, indent=2)] if in_json else report
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # A reader such as ``| head`` has closed the pipe; Python would report that again at exit.
        sys.stdout = None
    return report.status if isinstance(report, Report) else 0


def _said_by_the_database(error: Exception) -> str | None:
    # Only the driver's own words: the rest of the text can hold the statement and the URL.
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy.exc import SQLAlchemyError

    return str(getattr(error, "orig", None) or "see the Hub") if isinstance(error, SQLAlchemyError) else None


def _fail(error: Exception, status: int, *, in_json: bool) -> int:
    line = one_line(str(error))
    if in_json:
        code, field = getattr(error, "code", "error"), getattr(error, "field", None)
        print(json.dumps({"error": {"code": code, "field": field, "message": line}}, indent=2), flush=True)
    print(f"fgpu: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
