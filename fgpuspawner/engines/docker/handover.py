"""A session's identity, given to its container over standard input.

What a container is made with is in ``docker inspect``, in ``/proc/1/environ``, and in every image that is made of it.
So a container of an image that can wait (label ``fgpu.handover``) is made without its command line and the part of its
environment that says who it is. It gets both, with its token, in one line through the engine's attach call: whoever may
make that call controls the engine anyway. labextension/jupyterlab_fgpu/start.py is the other side.
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

LABEL, VERSION = HANDOVER, HANDOVER_VERSION
PROGRAM = "fgpu-start"
SERVER = "jupyterhub-singleuser"
WITHIN_S = 60
"""A container that hears nothing for so long ends: its Hub has."""

TOLD_WITHIN_S = 20

AT_START = ("PATH", "LD_*", "PYTHON*", "MALLOC_*", "GLIBC_TUNABLES", "LANG", "LC_*", "NVIDIA_*")
"""What must be there when a process starts, or when the engine makes the container. Nothing of it is secret."""


@dataclass(frozen=True, slots=True)
class Handover:
    """What a container is told once it runs."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)

    @property
    def is_server(self) -> bool:
        """Whether it is JupyterHub's own server that is to run."""
        return posixpath.basename(self.argv[0]) == SERVER

    def line(self) -> bytes:
        """Return it as the container reads it."""
        said = {"version": VERSION, "argv": list(self.argv), "environment": dict(self.environment)}
        return json.dumps(said).encode("ascii") + b"\n"


def can_take(image: Mapping[str, Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a container of this image, made with these arguments of docker-py, takes its identity so.

    An image that is made of one of ours has its label. With another entrypoint nobody would read what it is told.
    """
    config = image.get("Config") or {}
    return (
        (config.get("Labels") or {}).get(LABEL) == str(VERSION)
        and _is_tini(config.get("Entrypoint"))
        and kwargs.get("entrypoint") is None
        and not kwargs.get("tty")
        and bool(kwargs.get("command"))
    )


def _is_tini(entrypoint: object) -> bool:
    return (
        isinstance(entrypoint, list)
        and [posixpath.basename(str(entrypoint[0])), *entrypoint[1:]] == ["tini", "--"]
        if entrypoint
        else False
    )


def split(kwargs: Mapping[str, Any], *, public: Collection[str]) -> tuple[dict[str, Any], Handover]:
    """Return the arguments for a container that waits, and what it is told then.

    ``public`` names variables that stay with the container: what it is told of its slice, and what isolation sets.
    """
    environment: Mapping[str, str | None] = kwargs.get("environment") or {}
    stays = {name: value for name, value in environment.items() if _stays(name, value, public)}
    command = kwargs["command"]
    argv = tuple(shlex.split(command) if isinstance(command, str) else map(str, command))
    told = {name: value for name, value in environment.items() if name not in stays and value is not None}
    made = {**kwargs, "environment": stays, "command": waiting(argv, within_s=WITHIN_S), "stdin_open": True}
    return made, Handover(argv, told)


def _stays(name: str, value: str | None, public: Collection[str]) -> bool:
    # None takes away what the image sets: nothing can be taken away later.
    return value is None or name in public or any(fnmatch.fnmatchcase(name, p) for p in AT_START)


def waiting(argv: tuple[str, ...], *, within_s: int | None) -> list[str]:
    """Return the command of a container that waits for an identity with this command line; None: for ever."""
    preload = ["--preload"] if posixpath.basename(argv[0]) == SERVER else []
    return [PROGRAM, *preload, *([] if within_s is None else ["--within", str(within_s)])]


def tell(client: docker.APIClient, container: str, handover: Handover) -> None:
    """Tell a running container who it is. Blocks until the engine has it.

    That it also arrived is seen by what the container then does: the engine ends the connection only with the container.

    Raises:
        DockerException, OSError: the engine does not take it.
    """
    attached = client.attach_socket(container, {"stdin": 1, "stream": 1, "stdout": 0, "stderr": 0, "logs": 0})
    # A unix or TCP engine's is wrapped for reading; one over ssh is a channel.
    channel = getattr(attached, "_sock", attached)
    try:
        channel.settimeout(TOLD_WITHIN_S)
        channel.sendall(handover.line())
        if hasattr(channel, "shutdown_write"):
            channel.shutdown_write()
        else:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_WR)
    finally:
        attached.close()
