"""How a container ended or was refused, in words for its session's owner. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from docker.errors import APIError

from fgpu_scheduler import EndCause
from fgpuspawner.engines.base import LAST_WORDS, Ended
from fgpuspawner.engines.docker import handover
from fgpuspawner.settings.folders import SharedFolder

KILLED = 128 + signal.SIGKILL
NOT_FOUND = 127
"""Exit status of shells and programs like tini when a program is missing."""
NO_PROGRAM = re.compile(r'exec: "([^"]+)": (?:executable file not found|(?:stat .*)?no such file)')
NO_GPU_RUNTIME = "this server's Docker engine has no GPU runtime; ask an administrator to install it"
REFUSALS = {
    "could not select device driver": NO_GPU_RUNTIME,
    "unknown or invalid runtime": NO_GPU_RUNTIME,
    "Unknown runtime specified": NO_GPU_RUNTIME,
    "no space left on device": "the server's disk is full; ask an administrator",
    "no available IPv4 addresses": (
        "you have as many sessions as fit on your network; end one, or ask an administrator"
    ),
}
"""What engines of different versions say, and the words for the owner."""


def how_it_ended(container: Mapping[str, Any]) -> Ended:
    state = container["State"]
    code = int(state.get("ExitCode", 0))
    # The engine remembers an OOM kill of any process of the container, however long ago.
    if state.get("OOMKilled") and code == KILLED:
        limit = (container.get("HostConfig", {}).get("Memory") or 0) // 2**20
        words = f"the session used more than its {limit} MiB of memory and was ended"
        return Ended(code, EndCause.OOM, words)
    words = f"the session's server ended with status {code}"
    if state.get("Error"):
        words = f"the container ended with status {code}: {state['Error']}"
    if code == NOT_FOUND:
        program = ((container.get("Config") or {}).get("Cmd") or [""])[0]
        words = _no_server(program) or words
    return Ended(code, EndCause.EXITED, words)


def with_last_words(ended: Ended, tail: Sequence[str]) -> Ended:
    """Return how a session ended, with its server's last line if it failed."""
    if ended.status > 0 and tail and ended.cause is EndCause.EXITED:
        return replace(ended, message=f"{ended.message}{LAST_WORDS}{tail[-1][:200]}")
    return ended


def _no_server(program: str) -> str | None:
    """Return why a missing program ends a session, if it starts the server, which every image must have."""
    if program not in (handover.SERVER, handover.PROGRAM) and not program.startswith("/opt/fgpu/"):
        return None
    return (
        f"this image has no server environment: {program} is not in it, or cannot run; "
        "ask an administrator to build it with `fgpu images build` (docs/images.md), or choose another image"
    )


def refusal_words(error: APIError, shared: Sequence[SharedFolder] = ()) -> str:
    """Return an engine's refusal in words for the owner; ``shared`` are the session's shared folders."""
    text = str(error.explanation or error)
    for folder in shared:
        if text.strip().endswith(f"bind source path does not exist: {folder.path}"):
            return (
                f"folder {folder.name} is missing on this machine; start without it, or ask an administrator"
            )
    for refusal, words in REFUSALS.items():
        if refusal in text:
            return words
    missing = NO_PROGRAM.search(text)
    no_server = _no_server(missing[1]) if missing is not None else None
    return no_server or f"the container could not be started: {text[:300]}"
