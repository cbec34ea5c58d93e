"""`make run` as a person runs it: started, waited for by its banner, ended with Ctrl-C, and looked for afterwards."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fgpu_scheduler import Store
from hubprocess import ROOT, free_ports, until
from leftovers import remove_leftovers

BANNER = "fgpuspawner is running"
# The first time in a new checkout, it installs what it needs.
START_WITHIN_S = 300
END_WITHIN_S = 120
SAYS_AT_MOST = 25
"""Lines that a person reads, with those of the set-up."""
KEPT = {
    "admin-password",
    "disk.json",
    "gpu_health.json",
    "fgpu.sqlite",
    "home",
    "hub.lock",
    "hub-urls.json",
    "images.json",
    "installation",
    "installing.json",
    "isolation.json",
    "jupyterhub.sqlite",
    "jupyterhub_cookie_secret",
    "limits",
    "logs",
    "make-run.log",
    "meters.json",
    "packages",
    "password",
    "proxy-token",
    "pulls.json",
    "reserve",
    "run",
    "simulated",
    "tools",
    "verified.json",
}
"""What may be in the data folder afterwards: data."""

HEALTH_OF_WHAT_ENDED = re.compile(
    r"\[E [^\n]*check_services_health.*?AttributeError: 'NoneType' object has no attribute 'proto'", re.DOTALL
)
"""JupyterHub's own: while it ends it may look, as it does each minute, for the service that it has just ended."""


class MakeRun:
    """One `make run` on four ports and in a data folder of its own."""

    def __init__(self, folder: Path, *, runtime: str = "local", fgpu_per_gpu: str = "2") -> None:
        self.runtime = runtime
        self.fgpu_per_gpu = fgpu_per_gpu
        self.data = folder / "data"
        self.log = folder / "make-run.log"
        self.port = free_ports(4)
        self.url = f"http://127.0.0.1:{self.port}"
        self.installation = ""
        self._make: subprocess.Popen[bytes] | None = None
        self._homes: set[str] = set()
        self._asked = [
            f"PORT={self.port}",
            f"FGPU_DATA={self.data}",
            f"RUNTIME={runtime}",
            f"FGPU_PER_GPU={fgpu_per_gpu}",
            # Also where there is a GPU, these tests take a simulated one.
            "SIMULATED_GPUS=1",
        ]

    def start(self) -> MakeRun:
        """Start it in a process group of its own, and wait for the banner."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTERHUB", "FGPU_", "MAKE"))}
        with self.log.open("wb") as output:
            self._make = subprocess.Popen(
                ["make", "run", *self._asked],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(self._is_running, within_s=START_WITHIN_S, what="the banner of `make run`")
        store = Store(f"sqlite:///{self.data / 'fgpu.sqlite'}")
        try:
            store.connect_readonly()
            self.installation = store.installation_id
        finally:
            store.close()
        return self

    def _is_running(self) -> bool:
        assert self._make is not None
        if self._make.poll() is not None:
            raise AssertionError(f"`make run` ended with {self._make.returncode}:\n{self.said()[-4000:]}")
        return BANNER in self.said()

    def hub(self) -> psutil.Process:
        """Return the Hub's process."""
        return self._first("jupyterhub")

    def proxy(self) -> psutil.Process:
        """Return the proxy's process."""
        return self._first("--api-port")

    def _first(self, word: str) -> psutil.Process:
        """Return the oldest process of this command: its children look the same until they run another program."""
        found = []
        for process in self._own():
            with suppress(psutil.NoSuchProcess):
                if word in process.cmdline():
                    found.append(process)
        return min(found, key=lambda process: (process.create_time(), process.pid))

    def said(self) -> str:
        """Return its output."""
        return self.log.read_text(errors="replace")

    def hub_log(self) -> str:
        """Return the Hub's log."""
        return (self.data / "make-run.log").read_text(errors="replace")

    def password(self) -> str:
        """Return the log-in password of the banner."""
        found = re.search(r"log in with any name and +(\S+)", self.said())
        assert found is not None, self.said()
        assert found[1] == (self.data / "password").read_text()
        return found[1]

    def has_home(self, user: str) -> None:
        """Remove this user's volume after the test."""
        self._homes.add(user)

    def kill(self) -> None:
        """Kill `make` and its script, as a closed machine or a full memory does; the Hub and its proxy are left."""
        assert self._make is not None
        os.killpg(self._make.pid, signal.SIGKILL)
        self._make.wait(END_WITHIN_S)

    def end(self) -> None:
        """Press Ctrl-C, and look that nothing but data is left."""
        assert self._make is not None
        os.killpg(self._make.pid, signal.SIGINT)
        self._make.wait(END_WITHIN_S)
        # Its last ones end because it has: that takes a moment.
        psutil.wait_procs(self._own(), timeout=20)
        left = self._own()
        assert not left, f"left by `make run`: {left}"
        assert "Ending the Hub and all sessions" in self.said()
        assert len(self.said().splitlines()) < SAYS_AT_MOST, self.said()
        _, _, said = self.hub_log().rpartition("Received signal SIGTERM")
        said = HEALTH_OF_WHAT_ENDED.sub("", said)
        assert "Traceback" not in said, said
        for port in range(self.port, self.port + 4):
            with socket.socket() as s:
                assert s.connect_ex(("127.0.0.1", port)) != 0, f"somebody still answers on {port}"
        beside = {p.name for p in self.data.iterdir()} - KEPT
        assert not beside, f"left beside data: {beside}"
        for folder in ("run", "limits"):
            assert not list((self.data / folder).glob("*")), f"{folder} still speaks of sessions"
        if self.runtime == "docker":
            assert not self._containers(), "containers are left"

    def clean(self) -> None:
        """End and remove by force whatever a failed test has left, and the homes that were noted."""
        for process in self._own():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._make is not None:
            self._make.wait(10)
        if self.runtime == "docker":
            if self.installation:
                remove_leftovers(self.installation)
            for user in self._homes:
                _docker("volume", "rm", "-f", f"fgpu-home-{user}")

    def _containers(self) -> list[str]:
        if not self.installation:
            return []
        return _docker("ps", "-aq", "--filter", f"label=fgpu.installation={self.installation}").split()

    def _own(self) -> list[psutil.Process]:
        """Return the processes that know the data folder: every child of `make` does."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                known = [*process.cmdline(), *process.environ().values(), process.cwd()]
            except (psutil.Error, OSError):
                continue
            if any(str(self.data) in text for text in known):
                found.append(process)
        return found


@contextmanager
def running(folder: Path, **kwargs: str) -> Iterator[MakeRun]:
    """`make run` for the time of a test or a module; nothing of it may be left afterwards."""
    run = MakeRun(folder, **kwargs)
    try:
        yield run.start()
        run.end()
    finally:
        run.clean()


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
