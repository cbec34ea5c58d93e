"""The command ``fgpu completion``, and the values that the Hub offers when a user presses Tab.

Each press starts ``fgpu``, so a shell offers what this version takes. With a token in the environment it asks the Hub
for sessions, images and groups, for two seconds at most. After a failure it offers nothing and prints nothing.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from fgpuspawner.cli.command import command

WITHIN_S = 2.0


@command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> list[str]:
    """Print the lines with which a shell completes fgpu's commands, options, sessions and images.

    bash, in ~/.bashrc: eval "$(fgpu completion bash)"

    zsh, in ~/.zshrc after compinit: eval "$(fgpu completion zsh)"

    fish: fgpu completion fish > ~/.config/fish/completions/fgpu.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(ctx.find_root().command, {}, "fgpu", "_FGPU_COMPLETE").source().strip("\n").splitlines()


def offers(what: Callable[[Any], dict[str, str]]) -> Callable[..., list[CompletionItem]]:
    """Return a completer of what the Hub says; ``what`` gets its API, and returns each value with words about it."""

    def completer(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        with contextlib.suppress(Exception), _at_most(WITHIN_S):
            from fgpuspawner.cli.api import ApiClient

            found = what(ApiClient.from_environment(ctx.params.get("token_file")))
            return [CompletionItem(n, help=words) for n, words in found.items() if n.startswith(incomplete)]
        return []

    return completer


def sessions(api: Any) -> dict[str, str]:
    found = api.service_call("GET", "sessions")["sessions"]
    return {str(s["id"]): f"{s['display_name']}, {s['image']}, {s['state']}" for s in found}


def images(api: Any) -> dict[str, str]:
    return {image["slug"]: image["name"] for image in api.service_call("GET", "images")["images"]}


def groups(api: Any) -> dict[str, str]:
    return dict.fromkeys(api.service_call("GET", "me")["groups"], "resource group")


def administered(api: Any) -> dict[str, str]:
    return dict.fromkeys(api.service_call("GET", "me")["administers"], "resource group")


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:

    def late(_signal: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
