"""Addresses of Docker daemons, and the tunnels to those that are reached over ssh."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from fgpu_scheduler import BadSettings, FGPUError
from fgpuspawner.settings.nodes import address_of, are_found_by_driver, host_of


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a daemon, and the nodes on its machine.

    ``url`` is empty for this machine's own. ``tls`` has the paths ``ca``, ``cert`` and ``key``. ``host`` is where the
    Hub reaches published ports; None where it reaches the containers directly.
    """

    url: str
    node_ids: tuple[str, ...]
    tls: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    has_gpus_to_find: bool = False

    def __str__(self) -> str:
        return f"the Docker engine of {' and '.join(self.node_ids) or 'this machine'}"

    @property
    def is_elsewhere(self) -> bool:
        return self.host is not None


def addresses(nodes: Sequence[Mapping[str, Any]]) -> tuple[Address, ...]:
    """Return the daemons of the configured nodes, this machine's own first.

    Raises:
        BadSettings: two nodes describe one daemon differently.
    """
    found: dict[str, Address] = {"": Address("", ())}
    for spec in nodes or [{"name": "local"}]:
        url = str(spec.get("engine", ""))
        to_find = bool(url) and are_found_by_driver(spec)
        own = Address(url, (str(spec["name"]),), dict(spec.get("tls") or {}), address_of(spec), to_find)
        other = found.get(url)
        if other is None or not other.node_ids:
            found[url] = own
        elif (other.tls, other.host) != (own.tls, own.host):
            raise BadSettings(
                f"c.FGPU.nodes: {other.node_ids[0]!r} and {own.node_ids[0]!r} are on one engine; give both the same "
                "tls and address"
            )
        else:
            found[url] = replace(
                own,
                node_ids=(*other.node_ids, *own.node_ids),
                has_gpus_to_find=to_find or other.has_gpus_to_find,
            )
    return tuple(address for address in found.values() if address.node_ids)


SOCKET = "/var/run/docker.sock"
UP_WITHIN_S = 10.0
LONGEST_WORDS = 300
SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=8",
    "ExitOnForwardFailure=yes",
    # A machine that vanishes is noticed within seconds.
    "ServerAliveInterval=3",
    "ServerAliveCountMax=3",
)


class TunnelFailed(FGPUError):
    """``ssh`` did not forward the socket; the message has its last output."""

    code = "tunnel_failed"


class Tunnel:
    """One ``ssh`` process, from `open` until it or this process ends. Every call blocks."""

    def __init__(self, url: str) -> None:
        parsed = urlparse(url)
        user = f"{parsed.username}@" if parsed.username else ""
        self._destination = f"{user}{host_of(url)}"
        self._port = ["-p", str(parsed.port)] if parsed.port else []
        self._socket = parsed.path if parsed.path not in ("", "/") else SOCKET
        self._opening = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def open(self) -> str:
        """Return the URL of the forwarded socket; restart ``ssh`` if it has ended.

        Raises:
            TunnelFailed: the socket cannot be forwarded.
        """
        with self._opening:
            if self._child is None or self._child.poll() is not None or not self._answers():
                self._close()
                self._start()
            return f"unix://{self._path}"

    def close(self) -> None:
        with self._opening:
            self._close()

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return self._folder / "docker.sock"

    def _start(self) -> None:
        # In a folder that only this user can read.
        self._folder = Path(tempfile.mkdtemp(prefix="fgpu-ssh-"))
        options = [word for option in SSH_OPTIONS for word in ("-o", option)]
        forwarded = f"{self._path}:{self._socket}"
        # `cat` ends when its input closes, so it ends with this process in any case.
        command = ["ssh", "-Txa", *self._port, *options, "-L", forwarded, "--", self._destination, "cat"]
        with (self._folder / "log").open("wb") as log:
            try:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as e:
                raise TunnelFailed(f"ssh cannot be run: {e}") from e
        until = time.monotonic() + UP_WITHIN_S
        while not self._answers():
            ended = self._child.poll()
            if ended is not None or time.monotonic() > until:
                if ended is None:
                    words = f"no engine answers at {self._socket} there"
                else:
                    lines = (self._folder / "log").read_text(errors="replace").split()
                    words = " ".join(lines)[-LONGEST_WORDS:] or f"it ended with status {ended}"
                self._close()
                raise TunnelFailed(f"ssh to {self._destination}: {words}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        if self._folder is None or not self._path.exists():
            return False
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(UP_WITHIN_S)
            try:
                asked.connect(str(self._path))
                asked.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in asked.recv(64)
            except OSError:
                return False

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            child.kill()
            child.wait()
            with contextlib.suppress(OSError):
                child.stdin.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
