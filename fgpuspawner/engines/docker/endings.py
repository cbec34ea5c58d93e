"""How a container ended or was refused, in words for its session's owner. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from docker.errors import APIError

from fgpu_scheduler import EndCause
from fgpuspawner.engines.base import Ended
from fgpuspawner.engines.docker import handover

KILLED = 128 + signal.SIGKILL
NOT_FOUND = 127
"""Exit status of shells and programs like tini when a program is missing."""


def how_it_ended(container: Mapping[str, Any]) -> Ended:
    state = container["State"]
    code = int(state.get("ExitCode", 0))
    # The engine remembers an OOM kill of any process of the container, however long ago.
    if state.get("OOMKilled") and code == KILLED:
        limit = (container.get("HostConfig", {}).get("Memory") or 0) // 2**20
        return Ended(
            code, EndCause.OOM, f"the session used more than its {limit} MiB of memory and was ended"
        )
    program = ((container.get("Config") or {}).get("Cmd") or [""])[0]
    if code == NOT_FOUND and is_of_server(program):
        return Ended(code, EndCause.EXITED, no_server(program))
    if state.get("Error"):
        return Ended(code, EndCause.EXITED, f"the container ended with status {code}: {state['Error']}")
    return Ended(code, EndCause.EXITED, f"the session's server ended with status {code}")


def as_text(line: str) -> str:
    """Return a line without terminal control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line.expandtabs())


def with_last_words(ended: Ended, tail: Sequence[str]) -> Ended:
    """Return how a session ended, with its server's last line if it failed."""
    if ended.status > 0 and tail and ended.cause is EndCause.EXITED:
        return replace(ended, message=f"{ended.message}; its last words: {tail[-1][:200]}")
    return ended


NO_GPU_RUNTIME = ("could not select device driver", "unknown or invalid runtime", "Unknown runtime specified")
"""How engines of different versions say that a GPU runtime is missing."""


NO_PROGRAM = re.compile(r'exec: "([^"]+)": (?:executable file not found|(?:stat .*)?no such file)')


def is_of_server(program: str) -> bool:
    """Return whether a program starts the session's server, which every image must have."""
    return program in (handover.SERVER, handover.PROGRAM) or program.startswith("/opt/fgpu/")


def no_server(program: str) -> str:
    return (
        f"this image has no server environment: {program} is not in it, or cannot run; "
        "ask an administrator to build it with `fgpu images build` (docs/images.md), or choose another image"
    )


def refusal_words(error: APIError) -> str:
    text = str(error.explanation or error)
    if any(words in text for words in NO_GPU_RUNTIME):
        return "this server's Docker engine has no GPU runtime; ask an administrator to install it"
    if "no space left on device" in text:
        return "the server's disk is full; ask an administrator"
    if "no available IPv4 addresses" in text:
        return "you have as many sessions as fit on your network; end one, or ask an administrator"
    missing = NO_PROGRAM.search(text)
    if missing is not None and is_of_server(missing[1]):
        return no_server(missing[1])
    return f"the container could not be started: {text[:300]}"
