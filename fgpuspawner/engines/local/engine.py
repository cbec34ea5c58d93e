"""Local processes as an `Engine`: for one person or a demo. All run as the Hub's own system user."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import TypeVar

from fgpu_scheduler import EndCause, Observed, Seen, Session
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own, to_the_end
from fgpuspawner.engines.base import (
    LAST_WORDS,
    Capabilities,
    Ended,
    Endpoint,
    Engine,
    HubSide,
    Installation,
    Launched,
    LaunchFailed,
    LaunchSpec,
)
from fgpuspawner.engines.local import packages
from fgpuspawner.engines.local.processes import Processes, run_beside
from fgpuspawner.images.availability import Availability, Where
from fgpuspawner.images.labels import is_version
from fgpuspawner.images.model import Image
from fgpuspawner.isolation.report import Answer
from fgpuspawner.isolation.sealing import sealed_environment
from fgpuspawner.text.logs import shown_lines

log = logging.getLogger("fgpu.local")

T = TypeVar("T")

ADDRESS = "127.0.0.1"
SERVER = "jupyterhub-singleuser"
OF_SERVER = (
    # No log-in shells: the machine's profile would remove the session's commands from PATH.
    "--ServerApp.terminado_settings={'shell_command': ['bash']}",
    # JupyterLab's own page of extensions would change the environment of all servers.
    "--LabApp.extension_manager=readonly",
    "--LabApp.lock_all_plugins=True",
    "--PluginManager.level=user",
)
STOPPERS = 16
"""A server that ignores the first signal occupies one for long; that only delays other stops."""
LOOKERS = 4
LOGS_EVERY_S = 10.0
MOST_LOG_READ = 256 << 10
PACKAGES = {"pytorch": "torch"}
"""Package names of frameworks that differ from their names."""


def folder_of(image: Image) -> Path:
    return Path(image.environment or sys.prefix).expanduser()


def availability(image: Image, server: str) -> Availability:
    """Return whether an image's environment has the server and the versions in its entry.

    An environment that the entry names may lack the framework's package: the administrator has chosen it.
    """
    folder, own = folder_of(image), not image.environment
    pythons = [path.name.removeprefix("python") for path in (folder / "lib").glob("python3.*")]
    if own:
        pythons = [f"{sys.version_info.major}.{sys.version_info.minor}"]
    lacks = []
    if shutil.which(server, path=str(folder / "bin")) is None:
        lacks.append(f"no {server}")
    if pythons and not any(is_version(version, image.python) for version in pythons):
        lacks.append(f"Python {' and '.join(pythons)}, not {image.python}")
    if (framework := image.framework.casefold()) != "python":
        path = sys.path if own else [str(site) for site in folder.glob("lib/python3.*/site-packages")]
        name = PACKAGES.get(framework, framework)
        versions = [found.version for found in distributions(name=name, path=path)]
        if versions and not any(is_version(version, image.version) for version in versions):
            lacks.append(f"{image.framework} {versions[0]}, not {image.version}")
        elif own and not versions:
            lacks.append(f"no {image.framework}")
    if lacks:
        where = "the Hub's own Python environment" if own else f"the Python environment {folder}"
        words = f"its sessions would run in {where}, which has {', and '.join(lacks)}"
        return Availability(Where.CANNOT, words)
    return Availability(Where.HERE)


class LocalEngine(Engine):
    """Runs sessions as processes beside each other, not separated. CPU and memory limits are counted, not enforced."""

    capabilities = Capabilities("local processes, all of one system user", reads_logs=True)

    def __init__(self, installation: Installation, *, stop_timeout_s: float, server: str = SERVER) -> None:
        settings = installation.settings
        self._server = server
        self._packages = settings.data_path() / packages.FOLDER
        self._node_ids = tuple(settings.node_ids())
        self._processes = Processes(
            installation=installation.id, folder=settings.data_path(), stop_timeout_s=stop_timeout_s
        )
        #: Port and folder of each session that this Hub has started.
        self._launched: dict[int, tuple[int, Path]] = {}
        self._stoppers = ThreadPoolExecutor(STOPPERS, thread_name_prefix="fgpu-stop")
        self._lookers = ThreadPoolExecutor(LOOKERS, thread_name_prefix="fgpu-look")

    async def _in(self, threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def open(self, hub: HubSide) -> None:
        self._folder_of = hub.isolation.folder
        self._processes.forget_ended()
        hub.background.every(
            LOGS_EVERY_S,
            lambda: self._in(self._lookers, self._processes.cut_logs_back),
            failed="The logs of sessions could not be cut back",
        )

    async def observe(self) -> Seen:
        return Seen(await self._in(self._lookers, self._processes.observe), self._node_ids)

    async def remove(self, observed: Observed) -> bool:
        remove = functools.partial(self._processes.remove, [observed.handle], now=False)
        return await self._in(self._stoppers, remove)

    async def start(self, spec: LaunchSpec) -> Endpoint:
        """Start the server in the image's Python environment, on the loopback interface."""
        server = spec.command[0] if spec.command else SERVER
        found = await self._in(self._lookers, lambda: availability(spec.image, server))
        if found.where is Where.CANNOT:
            raise LaunchFailed(f"image {spec.image.name}: {found.words}", EndCause.PULL_FAILED)
        for folder in spec.shared:
            if not await self._in(self._lookers, Path(folder.path).is_dir):
                raise LaunchFailed(
                    f"folder {folder.name} is missing on this machine; start without it, or ask an administrator"
                )
        binaries = folder_of(spec.image) / "bin"
        program = shutil.which(server, path=str(binaries)) or server
        given = dict(spec.environment)
        given["PATH"] = f"{binaries}{os.pathsep}{given.get('PATH', os.defpath)}"
        given |= await self._in(self._lookers, lambda: self._own_packages(spec, given))
        sealed = sealed_environment(given, spec.slice_environment, spec.prepared)
        environment = {name: value for name, value in sealed.items() if value is not None}
        root = ["--allow-root"] if os.geteuid() == 0 else []
        own = OF_SERVER if Path(program).name == SERVER else ()
        command = [program, *spec.command[1:], *own, *spec.arguments, *root]
        self._launched[spec.session.id] = spec.port, spec.folder
        args = spec.session, command, environment, Path(environment["HOME"])
        await to_the_end(self._in(self._lookers, functools.partial(self._processes.start, *args)))
        log.info("Session %d: its server is started, at port %d", spec.session.id, spec.port)
        return Endpoint(ADDRESS, spec.port)

    def _own_packages(self, spec: LaunchSpec, environment: dict[str, str]) -> dict[str, str]:
        """Make the user's environment for this image, and return the variables that lead to it."""
        folder = self._packages / packages.folder_name(spec.session.request.user) / spec.image.slug
        try:
            made = packages.own_environment(folder_of(spec.image), folder)
        except (OSError, packages.PythonFailed) as e:
            log.error("Image %s: the environment for a user's packages: %s", spec.image.name, e)
            words = "the folder for your packages cannot be made; ask an administrator to read the Hub's log"
            if isinstance(e, packages.PythonFailed):
                words = "its Python does not run; ask an administrator to repair or rebuild its environment"
            raise LaunchFailed(f"image {spec.image.name}: {words}") from None
        return {} if made is None else packages.variables(folder, environment)

    async def ended(self, session: Session) -> Ended | None:
        found = self._processes.exit_status(session)
        if found is None:
            return None
        status, lines = found[0], shown_lines(found[1], most=1)
        last = f"{LAST_WORDS}{lines[0].strip()[:200]}" if lines and status else ""
        if status is None:
            return Ended(1, EndCause.EXITED, "the server ended; its exit status is unknown")
        if status < 0:
            return Ended(128 - status, EndCause.EXITED, f"the server was ended by signal {-status}")
        return Ended(status, EndCause.EXITED, f"the server ended with status {status}{last}")

    async def probe(
        self, session: Session, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
    ) -> Answer:
        """Run a probe beside the server, with the environment that the server and its children really have."""
        port, folder = self._launched.get(session.id) or self._known(session)
        look = functools.partial(self._processes.environment, session, port)
        found = await self._in(self._lookers, look)
        if found is None:
            raise LaunchFailed("the session's server was gone when its GPU limit was checked")
        program, *arguments = command
        words = [str(folder / program), *arguments]
        return await in_a_thread_of_its_own(run_beside, words, found, timeout_s)

    def _known(self, session: Session) -> tuple[int, Path]:
        """Return port and folder of a session that an earlier Hub has started."""
        launched = Launched.from_json(session.launched)
        if launched is None:
            raise LaunchFailed("the address of the session's server is unknown")
        return launched.port, self._folder_of(session.id)

    async def log(self, session: Session, *, lines: int) -> bytes | None:
        tail = functools.partial(self._processes.log_tail, session, MOST_LOG_READ)
        return await self._in(self._lookers, tail) or None

    async def stop(self, session: Session, *, now: bool) -> bool:
        self._launched.pop(session.id, None)
        remove = functools.partial(self._processes.remove_session, session, now=now)
        return await self._in(self._stoppers, remove)

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        return self._processes.sessions_of(pids)

    async def availability(self, image: Image, node_id: str) -> Availability:
        return await self._in(self._lookers, functools.partial(availability, image, self._server))
