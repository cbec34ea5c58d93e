"""A session's identity, sent to its container over standard input.

What a container is created with is visible in ``docker inspect``, in ``/proc/1/environ`` and in every image that is
made of it. So a container of an image with the label ``fgpu.handover`` is created without its command line and
identity. It gets both, with its token, in one line through the engine's attach call, which only those who control the
engine can make. labextension/jupyterlab_fgpu/start.py is the other side.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import posixpath
import shlex
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import docker

from fgpuspawner.images.labels import HANDOVER, HANDOVER_VERSION

PROGRAM = "fgpu-start"
SERVER = "jupyterhub-singleuser"
WITHIN_S = 60
"""A container that gets no identity in this time ends: its Hub is gone."""

SENT_WITHIN_S = 20
AT_START = ("PATH", "LD_*", "PYTHON*", "MALLOC_*", "GLIBC_TUNABLES", "LANG", "LC_*", "NVIDIA_*")
"""Variables that must be there when a process starts or a container is created; none is secret."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The command line and variables that a container gets once it runs."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)

    @property
    def is_server(self) -> bool:
        return posixpath.basename(self.argv[0]) == SERVER

    def line(self) -> bytes:
        said = {"version": HANDOVER_VERSION, "argv": list(self.argv), "environment": dict(self.environment)}
        return json.dumps(said).encode("ascii") + b"\n"


def can_take(image: Mapping[str, Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a container of this image, with these arguments of docker-py, takes its identity in this way.

    Derived images inherit the label; with another entrypoint nothing would read the line.
    """
    config = image.get("Config") or {}
    return (
        (config.get("Labels") or {}).get(HANDOVER) == str(HANDOVER_VERSION)
        and _is_tini(config.get("Entrypoint"))
        and kwargs.get("entrypoint") is None
        and not kwargs.get("tty")
        and bool(kwargs.get("command"))
    )


def _is_tini(entrypoint: object) -> bool:
    match entrypoint:
        case [program, "--"]:
            return posixpath.basename(str(program)) == "tini"
    return False


def split(kwargs: Mapping[str, Any], *, public: Collection[str]) -> tuple[dict[str, Any], Handover]:
    """Return the arguments for a waiting container, and what to send it.

    ``public`` names variables that stay with the container: the description of its slice, and what isolation sets.
    """
    environment: Mapping[str, str | None] = kwargs.get("environment") or {}
    stays = {
        name: value
        for name, value in environment.items()
        # None unsets a variable of the image; that cannot be done later.
        if value is None or name in public or any(fnmatch.fnmatchcase(name, p) for p in AT_START)
    }
    command = kwargs["command"]
    argv = tuple(shlex.split(command) if isinstance(command, str) else map(str, command))
    sent = {name: value for name, value in environment.items() if name not in stays and value is not None}
    made = {**kwargs, "environment": stays, "command": waiting(argv, within_s=WITHIN_S), "stdin_open": True}
    return made, Handover(argv, sent)


def waiting(argv: tuple[str, ...], *, within_s: int | None) -> list[str]:
    """Return the command of a container that waits for an identity; ``within_s=None`` waits without end."""
    preload = ["--preload"] if posixpath.basename(argv[0]) == SERVER else []
    return [PROGRAM, *preload, *([] if within_s is None else ["--within", str(within_s)])]


def send(client: docker.APIClient, container: str, identity: Handover) -> None:
    """Send a running container its identity. Blocks until the engine has taken it.

    The engine keeps the connection until the container ends, so the arrival shows only in what the container does.

    Raises:
        DockerException, OSError: the engine does not take it.
    """
    attached = client.attach_socket(container, {"stdin": 1, "stream": 1, "stdout": 0, "stderr": 0, "logs": 0})
    # The socket of a unix or TCP engine is wrapped; one over ssh is a channel.
    channel = getattr(attached, "_sock", attached)
    try:
        channel.settimeout(SENT_WITHIN_S)
        channel.sendall(identity.line())
        if hasattr(channel, "shutdown_write"):
            channel.shutdown_write()
        else:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_WR)
    finally:
        attached.close()
