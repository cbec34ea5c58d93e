"""Forwards the engine's socket on another machine through the system's ``ssh``, with its keys and configuration."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlparse

from fgpu_scheduler import FGPUError
from fgpuspawner.settings.nodes import host_of

SOCKET = "/var/run/docker.sock"
UP_WITHIN_S = 10.0
LONGEST_WORDS = 300


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
        assert self._folder is not None, "not open"
        return self._folder / "docker.sock"

    def _start(self) -> None:
        # In a folder that only this user can read.
        self._folder = Path(tempfile.mkdtemp(prefix="fgpu-ssh-"))
        command = ["ssh", "-T", "-x", "-a", *self._port]
        for option in (
            "BatchMode=yes",
            "ConnectTimeout=8",
            "ExitOnForwardFailure=yes",
            # A machine that vanishes is noticed within seconds.
            "ServerAliveInterval=3",
            "ServerAliveCountMax=3",
        ):
            command += ["-o", option]
        # `cat` ends when its input closes, so it ends with this process in any case.
        command += ["-L", f"{self._path}:{self._socket}", "--", self._destination, "cat"]
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
                    words = self._last_words() or f"it ended with status {ended}"
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

    def _last_words(self) -> str:
        assert self._folder is not None, "not open"
        lines = (self._folder / "log").read_text(errors="replace").split("\n")
        return " ".join(line.strip() for line in lines if line.strip())[-LONGEST_WORDS:]

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
