"""Starts Hubs from a process that has imported what a Hub imports, which is most of what the start of one costs.

Run as a program this file is that process: for each line of JSON that it reads it forks a child, which becomes what
``python -m jupyterhub`` is, or the service. It answers with a line for each: its process id, and later how it ended.
A Hub's own service is forked too, before the Hub has anything of its own; it waits for the Hub to start it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

IMPORTED = (
    "jupyterhub.app",
    "jupyterhub.authenticators.shared",
    "fgpuspawner.config",
    "fgpuspawner.engines.docker.spawner",
    "fgpuspawner.engines.local.spawner",
)
"""Nothing of the service's own: JupyterHub's part of it reads the environment as it is imported."""
ENTRY_POINTS = ("jupyterhub.authenticators", "jupyterhub.proxies", "jupyterhub.spawners")
"""Groups of classes that JupyterHub loads as it starts, all of them: half of what is left of the start of one."""
PROMPTLY = (0.1, 2, 0.2, 10, 0.1)
"""How JupyterHub waits for what it has started: first and longest pause in seconds are the first and the third."""
SERVICE, SERVICE_NAME = "fgpuspawner.service", "fgpu-service"
"""A module, and what the process that it runs in is called."""


class Started:
    """A Hub's process. It has what tests use of a `subprocess.Popen`."""

    def __init__(self, starter: Starter, pid: int) -> None:
        self.pid = pid
        self._starter = starter

    @property
    def returncode(self) -> int | None:
        """How it ended, if known."""
        return self._starter.ended.get(self.pid)

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        self._starter.hear(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return how it ended as soon as it has."""
        deadline = time.monotonic() + timeout
        while (status := self.returncode) is None:
            if not self._starter.hear(max(0, deadline - time.monotonic())):
                raise subprocess.TimeoutExpired("jupyterhub", timeout)
        return status

    def kill(self) -> None:
        """SIGKILL it, unless it has ended."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM it, unless it has ended."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Starter:
    """The process that forks, and what it has told. It ends with the process that uses it."""

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        self._pids: list[int] = []
        self._unread = b""
        self._program = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd="/"
        )

    @property
    def pid(self) -> int:
        """The parent of all that it starts."""
        return self._program.pid

    def start(self, module: str, *words: str, folder: Path, env: dict[str, str], log: Path) -> Started:
        """Start a module as a program in a folder, in a session of its own."""
        asked = {"module": module, "words": words, "folder": str(folder), "env": env, "log": str(log)}
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(asked).encode() + b"\n")
        while not self._pids:
            assert self.hear(120), "nothing was forked"
        return Started(self, self._pids.pop())

    def hear(self, within_s: float) -> bool:
        """Read its output; False if there is none within this number of seconds."""
        output = self._program.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if not selector.select(within_s):
                return False
        told = os.read(output.fileno(), 1 << 16)
        assert told, "the process that starts Hubs has ended"
        *lines, self._unread = (self._unread + told).split(b"\n")
        for line in lines:
            pid, *status = map(int, line.split())
            if status:
                self.ended[pid] = status[0]
            else:
                # The kernel gives numbers again: one that had it before may have ended.
                self.ended.pop(pid, None)
                self._pids.append(pid)
        return True


@cache
def starter() -> Starter:
    """The one of this process, made when the first Hub is started."""
    return Starter()


def serve() -> dict[str, Any] | None:
    """Fork a child for each line until the input ends; in each child, return what its line says."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    unread = b""
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                tell(key.data, os.waitstatus_to_exitcode(status))
                continue
            read = os.read(0, 1 << 20)
            if not read:
                return None
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    return dict(json.loads(line))
                tell(pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)


def tell(*numbers: int) -> None:
    """Write a line of numbers."""
    os.write(1, " ".join(map(str, numbers)).encode() + b"\n")


def become(asked: dict[str, Any]) -> None:
    """Be the program that was asked for."""
    os.setsid()
    os.chdir(asked["folder"])
    if "log" in asked:
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for theirs, ours in ((null, 0), (log, 1), (log, 2)):
            os.dup2(theirs, ours)
    os.closerange(3, 256)
    if asked["module"] == "jupyterhub" and (service := as_a_service()) is not None:
        asked = service
        os.setsid()
        os.chdir(asked["folder"])
    if asked["module"] == "jupyterhub":
        # Else it finds its proxy a second after that has begun to answer: its pauses grow up to 5 s.
        sys.modules["jupyterhub.utils"].exponential_backoff.__defaults__ = PROMPTLY
    os.environ.clear()
    os.environ.update(asked["env"])
    if kubeconfig := sys.modules.get("kubernetes_asyncio.config.kube_config"):
        # It reads the environment as it is imported.
        kubeconfig.KUBE_CONFIG_DEFAULT_LOCATION = os.environ.get("KUBECONFIG", "~/.kube/config")
    sys.argv = [asked["module"], *asked["words"]]
    sys.path[0] = ""
    runpy.run_module(asked["module"], run_name="__main__")


def as_a_service() -> dict[str, Any] | None:
    """Fork, and return None; in the child return what the Hub asked for when it started its service."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        sys.modules["jupyterhub.services.service"].Popen = partial(Waiting, [(pid, ours)])  # type: ignore[attr-defined]
        return None
    os.close(ours)
    with os.fdopen(theirs) as pipe:
        # Nothing once the Hub has ended.
        said = pipe.read()
    if not said:
        os._exit(0)
    # Its command line is that of this file.
    Path("/proc/self/comm").write_text(SERVICE_NAME)
    return dict(json.loads(said))


class Waiting(subprocess.Popen[bytes]):
    """What the Hub starts: the process that waits to be its service, the first time; else as ever."""

    def __init__(self, waiting: list[tuple[int, int]], *words: Any, **more: Any) -> None:
        self._waiting = waiting
        super().__init__(*words, **more)

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *more: Any,
    ) -> None:
        if args != [sys.executable, "-m", SERVICE] or preexec_fn is not None or not self._waiting:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
            return
        self.pid, pipe = self._waiting.pop()
        self._child_created = True
        with os.fdopen(pipe, "w") as told:
            json.dump({"module": SERVICE, "words": [], "folder": cwd or os.getcwd(), "env": env}, told)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    for group in ENTRY_POINTS:
        for found in entry_points(group=group):
            # JupyterHub does the same for authenticators with missing packages.
            with suppress(Exception):
                found.load()
    sys.modules["sqlalchemy.orm"].configure_mappers()
    # What is there stays for good: no child has to look at it again, or to copy it.
    gc.freeze()
    child = serve()
    if child is not None:
        become(child)
