"""The command ``fgpu completion``, and what is offered where somebody presses Tab.

Each press starts ``fgpu`` itself, which finds in the environment that it is to complete a line: so what is offered is
what this version takes. Sessions, images and groups are asked of the Hub, where there is a token, for two seconds at
most; whatever fails, nothing is offered and nothing is said.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from typing import Any

from fgpuspawner.cli.command import add_command

SHELLS = ("bash", "zsh", "fish")
ASKED = "_ARGCOMPLETE"
"""What the shell sets where it asks for completions."""
WITHIN_S = 2.0

Offered = dict[str, str]
"""What can be typed, each with words about it; bash shows none."""


def add_to(commands: Any) -> None:
    about = (
        "Print the lines with which a shell completes fgpu's commands, options, sessions and images. "
        'bash, in ~/.bashrc: eval "$(fgpu completion bash)"; zsh, in ~/.zshrc after compinit: '
        'eval "$(fgpu completion zsh)"; fish: fgpu completion fish > ~/.config/fish/completions/fgpu.fish'
    )
    parser = add_command(commands, run, "completion", "completion for bash, zsh or fish", about)
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(given: argparse.Namespace) -> list[str]:
    """Return the lines for a shell."""
    from argcomplete.shell_integration import shellcode

    return shellcode(["fgpu"], shell=given.shell).strip("\n").splitlines()


def complete(make_parser: Callable[[list[str]], argparse.ArgumentParser]) -> None:
    """Tell the shell that asks what can be typed, and end; the parser made is that of the words typed so far."""
    import argcomplete

    line = os.environ.get("COMP_LINE", "")
    try:
        words = shlex.split(line)[1:]
    except ValueError:
        # A quote is still open.
        words = line.split()[1:]
    # Where no command is typed yet no module of one is loaded.
    argcomplete.autocomplete(make_parser(words or [""]), always_complete_options=False)


def offers(action: argparse.Action, what: Callable[[Any], Offered]) -> None:
    """Have what the Hub says offered as the value of an option or argument; ``what`` is given its API."""

    def completer(prefix: str, parsed_args: argparse.Namespace, **_: object) -> Offered:
        # Whatever it is: somebody is typing.
        with contextlib.suppress(Exception), _at_most(WITHIN_S):
            from fgpuspawner.cli.api import Api

            return what(Api.from_environment(getattr(parsed_args, "token_file", None)))
        return {}

    action.completer = completer  # type: ignore[attr-defined]


def sessions(api: Any) -> Offered:
    """Return the caller's live sessions by number."""
    found = api.service_call("GET", "sessions")["sessions"]
    return {str(s["id"]): f"{s['display_name']}, {s['image']}, {s['state']}" for s in found}


def images(api: Any) -> Offered:
    """Return the images that the caller may start."""
    return {image["slug"]: image["name"] for image in api.service_call("GET", "images")["images"]}


def groups(api: Any) -> Offered:
    """Return the resource groups that the caller may use."""
    return dict.fromkeys(api.service_call("GET", "me")["groups"], "resource group")


def administered(api: Any) -> Offered:
    """Return the resource groups that the caller administers."""
    return dict.fromkeys(api.service_call("GET", "me")["administers"], "resource group")


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, whatever it waits for."""

    def late(_signal: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
