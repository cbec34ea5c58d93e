"""Sessions as local processes: for one person, or a demo. All of them run as the Hub's own system user.

Each process carries the installation, the session and the attempt in its environment, and so do its children.
By that mark they are found again after a restart, and what a dead server left behind is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import psutil
from jupyterhub.spawner import LocalProcessSpawner
from jupyterhub.utils import random_port
from traitlets import Integer, default
from traitlets.config import Config

from fgpu_scheduler import EndCause, Observed, Seen, Session
from fgpuspawner.images.catalogue import Image
from fgpuspawner.images.live import Images
from fgpuspawner.isolation.report import LARGEST_BYTES, Answer
from fgpuspawner.isolation.sealing import sealed_environment
from fgpuspawner.nodes import Machine
from fgpuspawner.queued import LaunchFailed, QueuedSpawner
from fgpuspawner.runtime import Runtime, SessionLauncher
from fgpuspawner.settings import FGPU, configured
from fgpuspawner.waiting import in_a_thread_of_its_own

INSTALLATION = "FGPU_INSTALLATION"
SESSION = "FGPU_SESSION_ID"
ATTEMPT = "FGPU_ATTEMPT"
HANDLE = re.compile(r"([0-9]{1,18})-([0-9]{1,9})@([a-z0-9-]{1,40})")
STOPPERS = 16
"""Servers that ignore the first signal keep them for long: then others wait to be stopped, and nothing else does."""
LOOKERS = 4
LOG_TAIL_BYTES = 4096
MARKED_WITHIN_S = 1.0
LOGS_KEPT_S = 14 * 24 * 3600


class LocalProcesses:
    """A `Launcher` for local processes: knows them by their marks, and who is whose server by a note on disk."""

    def __init__(
        self, *, installation: str, node_ids: Sequence[str], folder: Path, stop_timeout_s: float
    ) -> None:
        self.installation = installation
        self._node_ids = tuple(node_ids)
        self._folder = folder
        self._stop_timeout_s = stop_timeout_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stoppers = ThreadPoolExecutor(STOPPERS, thread_name_prefix="fgpu-stop")
        self._lookers = ThreadPoolExecutor(LOOKERS, thread_name_prefix="fgpu-look")

    def handle(self, session: Session) -> str:
        """Return the name of the session's current attempt: ``session-attempt@node``."""
        assert session.placement is not None
        return f"{session.id}-{session.attempt}@{session.placement.node_id}"

    def log_path(self, session: Session) -> Path:
        """Return where the server's output goes."""
        return self._folder / "logs" / f"{session.id}-{session.attempt}.log"

    def start(self, session: Session, cmd: list[str], env: dict[str, str], home: Path) -> None:
        """Start the session's server in a process session of its own, and note which process it is."""
        handle = self.handle(session)
        marks = {INSTALLATION: self.installation, SESSION: str(session.id), ATTEMPT: handle}
        self._prune_logs()
        for folder in (self._folder / "run", self._folder / "logs", home):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.log_path(session).open("wb") as output:
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
        # In its first instant a process has no environment that can be read: it would not be known by its mark.
        deadline = time.monotonic() + MARKED_WITHIN_S
        while child.poll() is None and self._server(handle) is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def _prune_logs(self) -> None:
        """Remove logs that nobody has written to for a long time."""
        now = time.time()
        for path in (self._folder / "logs").glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                if now - path.stat().st_mtime > LOGS_KEPT_S:
                    path.unlink()

    def _note(self, handle: str) -> Path:
        return self._folder / "run" / handle

    def _marked(self) -> dict[str, list[psutil.Process]]:
        """Return every live process that carries this installation's mark, or descends from one, by handle."""
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
                # It ended, or it is another user's, and then not ours.
                continue
        for process, parent in unmarked.values():
            # One that was started without its environment.
            for _ in range(len(unmarked)):
                if parent not in unmarked:
                    break
                parent = unmarked[parent][1]
            if parent in handles:
                found[handles[parent]].append(process)
        return found

    def _server(self, handle: str) -> psutil.Process | None:
        """Return the live server process that was noted for this handle, or None."""
        child = self._children.get(handle)
        if child is not None and child.poll() is not None:
            return None
        try:
            process = psutil.Process(int(self._note(handle).read_text()))
            # The pid may be somebody else's by now; the mark cannot.
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(ATTEMPT) == handle:
                return process
        except (OSError, ValueError, psutil.Error):
            pass
        return None

    def exit_status(self, session: Session) -> tuple[int | None, str] | None:
        """Return None while the session's server lives, else its exit status and its last words.

        Negative is a signal; None that it is not known, for a process that this Hub did not start.
        """
        handle = self.handle(session)
        if self._server(handle) is not None:
            return None
        child = self._children.get(handle)
        status = child.poll() if child is not None else None
        try:
            tail = self.log_path(session).read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace")
        except OSError:
            tail = ""
        return status, tail

    async def environment(self, session: Session, port: int) -> dict[str, str] | None:
        """Return the environment of the session's process that listens on the port; None where none does."""
        return await asyncio.get_running_loop().run_in_executor(
            self._lookers, self._environment, session, port
        )

    def _environment(self, session: Session, port: int) -> dict[str, str] | None:
        handle = self.handle(session)
        server = self._server(handle)
        if server is None:
            return None
        # Mostly the one that was started. Where that is a script that waits, it is a child.
        if (env := _environment_if_it_listens(server, port)) is not None:
            return env
        found = (_environment_if_it_listens(process, port) for process in self._marked().get(handle, ()))
        return next((env for env in found if env is not None), None)

    def watch(self, changed: Callable[[], None]) -> None:
        """Do nothing: that a process has ended is seen by looking."""

    def survey(self, nodes: Collection[str] | None = None) -> Mapping[str, Machine | None]:
        """Return nothing: every node is this machine."""
        return {}

    async def observe(self) -> Seen:
        """Return every marked process group of this installation, one entry per attempt of a session."""
        loop = asyncio.get_running_loop()
        return Seen(await loop.run_in_executor(self._lookers, self._observe), self._node_ids)

    def _observe(self) -> list[Observed]:
        found = []
        for handle in self._marked():
            match = HANDLE.fullmatch(handle)
            if match is None:
                continue
            alive = self._server(handle) is not None or not self._note(handle).exists()
            found.append(
                Observed(
                    node_id=match[3],
                    session_id=int(match[1]),
                    attempt=int(match[2]),
                    handle=handle,
                    alive=alive,
                    message="the session's server process ended",
                )
            )
        return found

    def sessions_of(self, pids: Sequence[int]) -> dict[int, int]:
        """Return the session of each process that carries this installation's mark, or descends from one that does."""
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
        """Return which attempt of this installation's sessions a process carries the mark of, or ""."""
        try:
            env = process.environ()
        except (psutil.Error, OSError):
            return ""
        return env.get(ATTEMPT, "") if env.get(INSTALLATION) == self.installation else ""

    async def remove(self, observed: Observed) -> bool:
        """End every process of this attempt; return whether all are gone."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._stoppers, self._remove, [observed.handle], False)

    async def remove_session(self, session: Session, *, now: bool) -> bool:
        """End every process of every attempt of this session; return whether all are gone."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._stoppers, self._remove_session, session, now)

    def _remove_session(self, session: Session, now: bool) -> bool:
        prefix = f"{session.id}-"
        handles = {h for h in self._marked() if h.startswith(prefix)} | {self.handle(session)}
        return self._remove(sorted(handles), now)

    def _remove(self, handles: Sequence[str], now: bool) -> bool:
        """Ask the server to end, then end what is left of it and its children, the hard way in the end."""
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
    """Run a program with an environment and return what it prints, no more of it than a probe has to say."""
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


class LocalFGPUSpawner(QueuedSpawner, LocalProcessSpawner):
    """Sessions as processes of the Hub's own user, beside each other and not kept apart.

    Fine for one person or a demo. Limits of CPU and memory are counted, and not enforced. A program can drop its
    GPU limit with its environment; the watchdog sees what it then takes.
    """

    containers = False

    stop_timeout_s = Integer(
        10,
        help="""How long a server may take to end after SIGTERM before it is killed.

        Example: ``c.LocalFGPUSpawner.stop_timeout_s = 5``
        """,
    ).tag(config=True)

    @default("cmd")
    def _own_server(self) -> list[str]:
        return ["jupyterhub-singleuser"]

    @classmethod
    def make_launcher(
        cls, *, config: Config, settings: FGPU, images: Images, installation: str
    ) -> SessionLauncher:
        """Return what sees and ends the local processes of this installation."""
        own = configured(cls, config)
        return LocalProcesses(
            installation=installation,
            node_ids=settings.node_ids(),
            folder=settings.data_path(),
            stop_timeout_s=float(own.get("stop_timeout_s", cls.stop_timeout_s.default_value)),
        )

    @property
    def _processes(self) -> LocalProcesses:
        launcher = Runtime.current().launcher
        assert isinstance(launcher, LocalProcesses)
        return launcher

    @property
    def home(self) -> Path:
        """The user's folder. The name is quoted, so that it is always one folder below ``home``."""
        name = quote(self.user.name, safe="").replace(".", "%2E")
        return self.runtime.settings.data_path() / "home" / name

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Return ``env`` with the user's home. There is no system user of that name."""
        env["USER"] = self.user.name
        env["HOME"] = str(self.home)
        env["SHELL"] = "/bin/bash"
        return env

    def limits_path_in_session(self) -> str:
        """Return where the limits file is: where it was written."""
        return str(self.runtime.isolation.folder(self.session.id) / "limits")

    async def launch(self, session: Session) -> tuple[str, int]:
        """Start the server in the image's Python environment, on a free port of the loopback."""
        image = self.runtime.catalogue.of(session.request)
        if image is None:
            raise LaunchFailed(f"there is no image {session.request.image!r} any more", EndCause.PULL_FAILED)
        binaries, program = self._program(image)
        self.port = random_port()
        self.ip = "127.0.0.1"
        env = self.get_env()
        env["PATH"] = f"{binaries}{os.pathsep}{env.get('PATH', os.defpath)}"
        env = {k: v for k, v in sealed_environment(env, self.told(), self.prepared).items() if v is not None}
        root = ["--allow-root"] if os.geteuid() == 0 else []
        self._processes.start(session, [program, *self.cmd[1:], *self.get_args(), *root], env, self.home)
        return self.ip, self.port

    def _program(self, image: Image) -> tuple[Path, str]:
        """Return the folder of the environment's programs, and the server's program in it."""
        binaries = Path(image.environment or sys.prefix).expanduser() / "bin"
        program = shutil.which(self.cmd[0], path=str(binaries))
        if program is None:
            raise LaunchFailed(
                f"image {image.slug!r}: its environment has no {self.cmd[0]}; ask an administrator to install it",
                EndCause.PULL_FAILED,
            )
        return binaries, program

    async def exit_status(self, session: Session) -> tuple[int, EndCause, str] | None:
        """Return None while the server process lives, else how it ended."""
        ended = self._processes.exit_status(session)
        if ended is None:
            return None
        status, tail = ended
        self.log.info("Last output of session %d:\n%s", session.id, tail)
        lines = [line for line in tail.splitlines() if line.strip()]
        last = f"; its last words: {lines[-1].strip()[:200]}" if lines and status else ""
        if status is None:
            return 1, EndCause.EXITED, "the server ended; how is not known"
        if status < 0:
            return 128 - status, EndCause.EXITED, f"the server was ended by signal {-status}"
        return status, EndCause.EXITED, f"the server ended with status {status}{last}"

    async def probe(self, session: Session, command: Sequence[str]) -> Answer:
        """Run a probe beside the server, with the environment that the server and its children really have."""
        env = await self._processes.environment(session, self.port)
        if env is None:
            raise LaunchFailed("the session's server was gone when its GPU limit was checked")
        program, *arguments = command
        words = [str(self.runtime.isolation.folder(session.id) / program), *arguments]
        timeout_s = self.runtime.settings.verify_timeout_s
        return await in_a_thread_of_its_own(run_beside, words, env, timeout_s)

    async def take_down(self, session: Session, *, now: bool) -> bool:
        """End every process of the session."""
        return await self._processes.remove_session(session, now=now)
