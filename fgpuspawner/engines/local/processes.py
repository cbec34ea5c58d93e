"""The processes of local sessions, identified by variables in their environment.

Every process of a session inherits variables with its installation, session and attempt. By them processes are found
after a restart, and leftovers of dead servers are ended. The server's process number is stored on disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from fgpu_scheduler import Observed, Session
from fgpuspawner.isolation.report import LARGEST_BYTES, Answer
from fgpuspawner.logs import cut_back

INSTALLATION = "FGPU_INSTALLATION"
SESSION = "FGPU_SESSION_ID"
ATTEMPT = "FGPU_ATTEMPT"
HANDLE = re.compile(r"([0-9]{1,18})-([0-9]{1,9})@([a-z0-9-]{1,40})")
LOG_TAIL_BYTES = 4096
MARKED_WITHIN_S = 1.0
LOGS_KEPT_S = 14 * 24 * 3600
MOST_LOGS = 1000
"""Number of ended servers' logs that are kept, newest first."""
MOST_LOG_BYTES = 20 << 20
"""For one server's log, as for a container's."""


class Processes:
    """The processes of one installation. Everything blocks."""

    def __init__(self, *, installation: str, folder: Path, stop_timeout_s: float) -> None:
        self.installation = installation
        self._folder = folder
        self._stop_timeout_s = stop_timeout_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def handle(self, session: Session) -> str:
        """Return the name of the session's current attempt: ``session-attempt@node``."""
        assert session.placement is not None
        return f"{session.id}-{session.attempt}@{session.placement.node_id}"

    def log_path(self, session: Session) -> Path:
        return self._folder / "logs" / f"{session.id}-{session.attempt}.log"

    def start(self, session: Session, cmd: list[str], env: dict[str, str], home: Path) -> None:
        """Start the session's server in a new process session, and store its process number."""
        handle = self.handle(session)
        marks = {INSTALLATION: self.installation, SESSION: str(session.id), ATTEMPT: handle}
        self._prune_logs()
        for folder in (self._folder / "run", self._folder / "logs", home):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log_path(session).unlink(missing_ok=True)
        # Append: the file may be truncated while it is written.
        with self.log_path(session).open("ab") as output:
            child = subprocess.Popen(
                cmd,
                env=env | marks,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[handle] = child
        self._note(handle).write_text(str(child.pid))
        # At first a process's environment cannot be read, and it would not be recognised.
        deadline = time.monotonic() + MARKED_WITHIN_S
        while child.poll() is None and self._server(handle) is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def _prune_logs(self) -> None:
        live = {note.name.partition("@")[0] for note in (self._folder / "run").glob("*")}
        ended: list[tuple[float, Path]] = []
        for path in (self._folder / "logs").glob("*.log"):
            if path.stem not in live:
                with contextlib.suppress(FileNotFoundError):
                    ended.append((path.stat().st_mtime, path))
        oldest = time.time() - LOGS_KEPT_S
        for number, (written, path) in enumerate(sorted(ended, reverse=True)):
            if written < oldest or number >= MOST_LOGS:
                path.unlink(missing_ok=True)

    def cut_logs_back(self) -> None:
        for path in (self._folder / "logs").glob("*.log"):
            # A log that is removed at this moment needs no truncation.
            with contextlib.suppress(FileNotFoundError):
                cut_back(path, most_bytes=MOST_LOG_BYTES)

    def forget_ended(self) -> None:
        """Remove the stored numbers of servers that ended while no Hub was running."""
        marked = self._marked()
        for note in (self._folder / "run").glob("*"):
            if note.name not in marked:
                note.unlink(missing_ok=True)

    def _note(self, handle: str) -> Path:
        return self._folder / "run" / handle

    def _marked(self) -> dict[str, list[psutil.Process]]:
        """Return every live process with this installation's variables, or descended from one, by handle."""
        found: dict[str, list[psutil.Process]] = {}
        unmarked: dict[int, tuple[psutil.Process, int]] = {}
        handles: dict[int, str] = {}
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                env = process.environ()
                if env.get(INSTALLATION) == self.installation:
                    handles[process.pid] = env.get(ATTEMPT, "")
                    found.setdefault(handles[process.pid], []).append(process)
                else:
                    unmarked[process.pid] = process, process.ppid()
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                # It ended, or it belongs to another user and so not to us.
                continue
        for process, parent in unmarked.values():
            # A child started without the environment.
            for _ in range(len(unmarked)):
                if parent not in unmarked:
                    break
                parent = unmarked[parent][1]
            if parent in handles:
                found[handles[parent]].append(process)
        return found

    def _server(self, handle: str) -> psutil.Process | None:
        child = self._children.get(handle)
        if child is not None and child.poll() is not None:
            return None
        try:
            process = psutil.Process(int(self._note(handle).read_text()))
            # The number may be reused by another process; the variable cannot.
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(ATTEMPT) == handle:
                return process
        except (OSError, ValueError, psutil.Error):
            pass
        return None

    def exit_status(self, session: Session) -> tuple[int | None, bytes] | None:
        """Return the exit status and last output of an ended server, None while it lives.

        A negative status is a signal; None is unknown, for a process that this Hub did not start.
        """
        handle = self.handle(session)
        child = self._children.get(handle)
        # A dying process has no environment and no status yet: our own children live until they have a status.
        status = child.poll() if child is not None else None
        if status is None and (child is not None or self._server(handle) is not None):
            return None
        return status, self.log_tail(session, LOG_TAIL_BYTES)

    def log_tail(self, session: Session, most_bytes: int) -> bytes:
        """Return the end of what the session's server has printed; empty if there is nothing."""
        try:
            with self.log_path(session).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
                return file.read(most_bytes)
        except OSError:
            return b""

    def environment(self, session: Session, port: int) -> dict[str, str] | None:
        """Return the environment of the session's process that listens on the port, or None."""
        handle = self.handle(session)
        server = self._server(handle)
        if server is None:
            return None
        # Usually the started process; if that is a script that waits, one of its children.
        if (env := _environment_if_it_listens(server, port)) is not None:
            return env
        found = (_environment_if_it_listens(process, port) for process in self._marked().get(handle, ()))
        return next((env for env in found if env is not None), None)

    def observe(self) -> list[Observed]:
        """Return one entry for each attempt of a session with processes."""
        found = []
        for handle in self._marked():
            match = HANDLE.fullmatch(handle)
            if match is None:
                continue
            alive = self._server(handle) is not None or not self._note(handle).exists()
            numbers, words = (int(match[1]), int(match[2])), "the session's server process ended"
            found.append(Observed(match[3], *numbers, handle, alive=alive, message=words))
        return found

    def sessions_of(self, pids: Sequence[int]) -> dict[int, int]:
        """Return the session of each process that has our variables or descends from a process that has them."""
        found = {}
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for one in (process, *process.parents()):
                    match = HANDLE.fullmatch(self._mark(one))
                    if match is not None:
                        found[pid] = int(match[1])
                        break
        return found

    def _mark(self, process: psutil.Process) -> str:
        try:
            env = process.environ()
        except (psutil.Error, OSError):
            return ""
        return env.get(ATTEMPT, "") if env.get(INSTALLATION) == self.installation else ""

    def remove_session(self, session: Session, *, now: bool) -> bool:
        """End every process of every attempt of this session; return whether all are gone."""
        prefix = f"{session.id}-"
        handles = {h for h in self._marked() if h.startswith(prefix)} | {self.handle(session)}
        return self.remove(sorted(handles), now=now)

    def remove(self, handles: Sequence[str], *, now: bool) -> bool:
        """End every process of these attempts; return whether all are gone.

        First the server is asked to end, then what is left of it and its children is asked, then killed.
        """
        servers = [s for h in handles if (s := self._server(h)) is not None]
        if servers and not now:
            _signal(servers, signal.SIGTERM)
            psutil.wait_procs(servers, timeout=self._stop_timeout_s)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            marked = self._marked()
            left = [p for h in handles for p in marked.get(h, ())]
            if not left:
                break
            _signal(left, signal.SIGKILL if now else sign)
            psutil.wait_procs(left, timeout=3)
        marked = self._marked()
        for handle in handles:
            child = self._children.get(handle)
            if child is not None and child.poll() is not None:
                self._children.pop(handle, None)
            if not marked.get(handle):
                self._note(handle).unlink(missing_ok=True)
        return not any(marked.get(h) for h in handles)


def _environment_if_it_listens(process: psutil.Process, port: int) -> dict[str, str] | None:
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return process.environ()
    return None


def run_beside(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Answer:
    """Run a program with an environment and return its output, little more than a probe prints."""
    child = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdout is not None
    killer = threading.Timer(timeout_s, child.kill)
    killer.start()
    try:
        with child.stdout:
            output = child.stdout.read(LARGEST_BYTES + 1)
        if len(output) > LARGEST_BYTES:
            child.kill()
        return Answer(output, child.wait())
    finally:
        killer.cancel()


def _signal(processes: Sequence[psutil.Process], sign: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(sign)
        except psutil.NoSuchProcess:
            continue
