"""Databases that stop answering for a while, each in a way that happens: stopped, frozen, locked, on a full disk."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from hubprocess import ROOT, free_ports


class OwnPostgres:
    """A PostgreSQL server of the test's own, which may be stopped: that of all the tests may not."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fgpu-postgres-"))
        self._folder.chmod(0o755)
        self._port = free_ports(1)
        self._started = False

    def start(self) -> str:
        """Start it, where it was before, and return the address of its database.

        Skips where there is none; one that was there and does not start again is a failure.
        """
        env = {k: v for k, v in os.environ.items() if k != "FGPU_TEST_POSTGRES_URL"}
        started = self._services("start", "--only", "postgres", "--postgres-port", str(self._port), env=env)
        _, _, url = started.stdout.strip().partition("=")
        if not url:
            say = pytest.fail if self._started else pytest.skip
            say(f"no PostgreSQL: {started.stderr.strip()}")
        self._started = True
        return url

    def stop(self) -> None:
        """Stop it, as for a restart: its connections are cut."""
        self._services("stop")

    def freeze(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        data = (self._folder / "postgres.data").read_text().strip()
        first = psutil.Process(int((Path(data) / "postmaster.pid").read_text().split()[0]))
        for process in (first, *first.children(recursive=True)):
            # Those of closed connections end by themselves.
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def close(self) -> None:
        """Stop it and remove all of it."""
        self.freeze(signal.SIGCONT)
        self.stop()
        data = Path((self._folder / "postgres.data").read_text().strip())
        shutil.rmtree(data.parent, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _services(
        self, action: str, *flags: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        words = [str(ROOT / "tests" / "services.sh"), action, "--dir", str(self._folder), *flags]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=300)


class Stopped:
    """PostgreSQL is stopped, and started again."""

    reads = False

    def __init__(self, folder: Path) -> None:
        self._server = OwnPostgres()
        self.url = self._server.start()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The time in which it does not answer."""
        self._server.stop()
        try:
            yield
        finally:
            self._server.start()

    def close(self) -> None:
        """Remove it."""
        self._server.close()


class Frozen(Stopped):
    """PostgreSQL takes connections and says nothing."""

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The time in which it does not answer."""
        self._server.freeze(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.freeze(signal.SIGCONT)


class Locked:
    """Another process holds SQLite's one lock for writing."""

    reads = True

    def __init__(self, folder: Path) -> None:
        self._path = folder / "locked.sqlite"
        self.url = f"sqlite:///{self._path}?timeout=1"

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The time in which nothing can be written."""
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=10)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")

    def close(self) -> None:
        """Nothing is left."""


class DiskFull:
    """The file system of SQLite's file is full. It is one of the test's own, in memory."""

    reads = True

    def __init__(self, folder: Path) -> None:
        self._mount = folder / f"disk-{secrets.token_hex(4)}"
        self._mount.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "fgpu-test", str(self._mount)]
        mounted = subprocess.run(words, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        self._path = self._mount / "full.sqlite"
        self.url = f"sqlite:///{self._path}"

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The time in which nothing can be written."""
        filler = self._mount / "filler"
        with filler.open("wb", buffering=0) as file:
            file.write(b"\0" * (12 * 2**20))
            # A log that is not empty has room for more without growing.
            with closing(sqlite3.connect(self._path, timeout=10)) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            try:
                while file.write(b"\0" * 4096):
                    pass
            except OSError:
                pass  # That is the fault.
        try:
            yield
        finally:
            filler.unlink()

    def close(self) -> None:
        """Take the file system away."""
        subprocess.run(["umount", "--lazy", str(self._mount)], check=True)


Outage = Stopped | Frozen | Locked | DiskFull
