"""Sessions as Docker containers.

Every container has a name that says whose it is (``fgpu-INSTALLATION-SESSION-ATTEMPT``) and labels that say the
same. An image can carry forged labels, but not a container's name: what does not have both is left alone, and
what has both is checked against the database.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest
from docker.utils import convert_volume_binds, parse_repository_tag
from dockerspawner import DockerSpawner
from traitlets import Bool, Dict, Integer, List, Unicode, default
from traitlets.config import Config

from fgpu_scheduler import EndCause, FGPUError, Node, Observed, Session, format_milli
from fgpuspawner.isolation.backend import IN_CONTAINER
from fgpuspawner.isolation.report import LARGEST_BYTES, Answer
from fgpuspawner.isolation.sealing import parse_environment, sealed_environment, sealed_mounts
from fgpuspawner.queued import LaunchFailed, QueuedSpawner
from fgpuspawner.runtime import Runtime, SessionLauncher
from fgpuspawner.settings import FGPU, configured
from fgpuspawner.waiting import in_a_thread_of_its_own, to_the_end

T = TypeVar("T")

log = logging.getLogger("fgpu.docker")

LABEL = "fgpu"
GONE = (requests.exceptions.ConnectionError, requests.exceptions.Timeout)
"""What docker-py raises when its engine does not answer."""

LIMITS = ("mem_limit", "cpu_quota", "nano_cpus")
"""What the session's request decides, whatever ``extra_host_config`` says."""

KILLED = 128 + signal.SIGKILL

REMOVAL_TIMEOUT_S = 30

THREADS = 16
LOG_TAIL_LINES = 20


class EngineSilent(FGPUError):
    """The engine does not answer."""

    code = "engine_silent"


class Containers:
    """A `Launcher` for the containers of one engine. All calls run in threads of its own."""

    def __init__(self, client: docker.APIClient, *, installation: str, node_ids: Sequence[str]) -> None:
        self.client = client
        self.installation = installation
        self._node_ids = tuple(node_ids)
        self.executor = ThreadPoolExecutor(THREADS, thread_name_prefix="fgpu-docker")
        self._left_alone: set[str] = set()

    def name(self, session: Session) -> str:
        """Return the name of the container of the session's current attempt."""
        return f"fgpu-{self.installation}-{session.id}-{session.attempt}"

    def labels(self, session: Session) -> dict[str, str]:
        """Return the labels by which the container is found, and by which an administrator knows it."""
        assert session.placement is not None
        return {
            f"{LABEL}.installation": self.installation,
            f"{LABEL}.session": str(session.id),
            f"{LABEL}.attempt": str(session.attempt),
            f"{LABEL}.node": session.placement.node_id,
            f"{LABEL}.user": session.request.user,
            f"{LABEL}.server": session.request.server_name,
            f"{LABEL}.image": session.request.image,
            f"{LABEL}.amount": format_milli(session.request.fgpu_milli),
        }

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a call to the engine in a thread, and to its end: what was begun is never left in mid-air."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self.executor, lambda: function(*args, **kwargs))
        return await to_the_end(running)

    async def observe(self) -> tuple[Sequence[Observed], Sequence[str]]:
        """Return this installation's containers; no node has answered if the engine does not."""
        filters = {"label": f"{LABEL}.installation={self.installation}"}
        try:
            listed = await self.call(self.client.containers, all=True, filters=filters)
            found = [o for entry in listed if (o := await self._observed(entry)) is not None]
        except (DockerException, *GONE) as e:
            log.warning("The Docker engine does not answer: %s", e)
            return (), ()
        return found, self._node_ids

    async def _observed(self, entry: dict[str, Any]) -> Observed | None:
        labels = entry.get("Labels") or {}
        name = (entry.get("Names") or ["/"])[0].removeprefix("/")
        named = self._named(entry)
        if named is None:
            if entry["Id"] not in self._left_alone:
                self._left_alone.add(entry["Id"])
                log.warning("Container %s carries our labels, but it is not ours; it is left alone", name)
            return None
        alive = entry.get("State") not in ("exited", "dead", "removing")
        cause, message = EndCause.EXITED, None
        if not alive:
            try:
                _, cause, message = how_it_ended(await self.call(self.client.inspect_container, entry["Id"]))
            except NotFound:
                return None
        return Observed(
            node_id=labels.get(f"{LABEL}.node", ""),
            session_id=named[0],
            attempt=named[1],
            handle=name,
            alive=alive,
            end_cause=cause,
            message=message,
        )

    async def remove(self, observed: Observed) -> bool:
        """Stop and remove one container; return whether it is known to be gone."""
        return await self.remove_named(observed.handle, now=False)

    async def remove_named(self, name: str, *, now: bool, stop_timeout_s: int = 10) -> bool:
        """Stop (unless ``now``) and remove a container; return whether the engine says that it is gone."""
        try:
            if not now:
                await self.call(self.client.stop, name, timeout=stop_timeout_s)
            await self.call(self.client.remove_container, name, force=True)
        except NotFound:
            return True
        except APIError as e:
            if e.status_code != 409:
                log.warning("Container %s could not be removed: %s", name, e.explanation)
                return await self._is_gone(name)
            return await self._removed_by_somebody(name)
        except (DockerException, *GONE) as e:
            log.warning("Container %s could not be removed: %s", name, e)
            return False
        return await self._is_gone(name)

    async def _removed_by_somebody(self, name: str) -> bool:
        """Wait until a removal that somebody else began has come to its end; return whether it is gone."""
        try:
            await self.call(self.client.wait, name, timeout=REMOVAL_TIMEOUT_S, condition="removed")
        except NotFound:
            return True
        except (DockerException, *GONE) as e:
            log.warning("Container %s is being removed, and is not gone yet: %s", name, e)
        return await self._is_gone(name)

    def sessions_of(self, pids: Sequence[int]) -> dict[int, int]:
        """Return the session of each process of the host that is in one of this installation's containers."""
        filters = {"label": f"{LABEL}.installation={self.installation}"}
        try:
            sessions = {
                entry["Id"]: named[0]
                for entry in self.client.containers(filters=filters)
                if (named := self._named(entry)) is not None
            }
            found: dict[int, int] = {}
            elsewhere: set[int] = set()
            for pid in pids:
                try:
                    text = Path(f"/proc/{pid}/cgroup").read_text()
                except OSError:
                    elsewhere.add(pid)
                    continue
                own = next((i for i in container_ids(text) if i in sessions), None)
                if own is not None:
                    found[pid] = sessions[own]
            # It has ended; or its number means something here, where the engine's processes are not to be seen.
            if elsewhere:
                for container, session_id in sessions.items():
                    inside = elsewhere.intersection(self._pids_in(container))
                    found.update(dict.fromkeys(inside, session_id))
        except (DockerException, *GONE) as e:
            raise EngineSilent(f"the Docker engine does not say whose processes use the GPUs: {e}") from e
        return found

    def _pids_in(self, container: str) -> list[int]:
        try:
            top = self.client.top(container, ps_args="-eo pid")
        except APIError:
            return []  # It has ended.
        return [int(row[0]) for row in top.get("Processes") or () if row[0].isdigit()]

    def _named(self, entry: dict[str, Any]) -> tuple[int, int] | None:
        """Return session and attempt of a container that is ours by its name and its labels, else None."""
        labels = entry.get("Labels") or {}
        named = session_and_attempt((entry.get("Names") or ["/"])[0].removeprefix("/"), self.installation)
        said = labels.get(f"{LABEL}.session"), labels.get(f"{LABEL}.attempt")
        return named if named is not None and said == (str(named[0]), str(named[1])) else None

    async def _is_gone(self, name: str) -> bool:
        try:
            await self.call(self.client.inspect_container, name)
        except NotFound:
            return True
        except (DockerException, *GONE):
            return False
        return False

    async def remove_session(self, session: Session, *, now: bool, stop_timeout_s: int) -> bool:
        """Remove the containers of every attempt of a session; return whether all are known to be gone."""
        names = [
            f"fgpu-{self.installation}-{session.id}-{attempt}" for attempt in range(1, session.attempt + 1)
        ]
        gone = await asyncio.gather(
            *(self.remove_named(name, now=now, stop_timeout_s=stop_timeout_s) for name in names)
        )
        return all(gone)


def container_ids(cgroup: str) -> list[str]:
    """Return the ids of containers in a process's ``/proc/PID/cgroup``, of version 1 or 2, the outer ones first."""
    return re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", cgroup)


def session_and_attempt(name: str, installation: str) -> tuple[int, int] | None:
    """Return session and attempt of a container of this installation by its name; None for any other name."""
    prefix = f"fgpu-{installation}-"
    match = re.fullmatch(r"([1-9][0-9]{0,17})-([1-9][0-9]{0,8})", name.removeprefix(prefix))
    if not name.startswith(prefix) or match is None:
        return None
    return int(match[1]), int(match[2])


def how_it_ended(container: dict[str, Any]) -> tuple[int, EndCause, str]:
    """Return exit code, cause and words for the owner, of a container that is not running any more."""
    state = container["State"]
    code = int(state.get("ExitCode", 0))
    # The engine remembers any process of the container that was killed for memory, however long ago.
    if state.get("OOMKilled") and code == KILLED:
        limit = (container.get("HostConfig", {}).get("Memory") or 0) // 2**20
        return code, EndCause.OOM, f"the session used more than its {limit} MiB of memory and was ended"
    if state.get("Error"):
        return code, EndCause.EXITED, f"the container ended with status {code}: {state['Error']}"
    return code, EndCause.EXITED, f"the session's server ended with status {code}"


class FGPUSpawner(QueuedSpawner, DockerSpawner):
    """Sessions as Docker containers, each with its slice, no new privileges and no capabilities."""

    containers = True
    _image_environment: Mapping[str, str] = {}

    pids_limit = Integer(
        1024, help="""Most processes and threads in a session. Example: ``c.FGPUSpawner.pids_limit = 4096``"""
    ).tag(config=True)

    cap_drop = List(
        Unicode(),
        default_value=["ALL"],
        help="""Capabilities that a session does not have. Example: ``c.FGPUSpawner.cap_drop = ["ALL"]``""",
    ).tag(config=True)

    security_opt = List(
        Unicode(),
        default_value=["no-new-privileges"],
        help="""Docker security options. Example: ``c.FGPUSpawner.security_opt = ["no-new-privileges"]``""",
    ).tag(config=True)

    container_user = Unicode(
        "1000:1000",
        help="""User for images that name none, or root. Example: ``c.FGPUSpawner.container_user = "1000:100"``""",
    ).tag(config=True)

    stop_timeout_s = Integer(
        10,
        help="""How long a container may take to end before it is killed.

        Example: ``c.FGPUSpawner.stop_timeout_s = 5``
        """,
    ).tag(config=True)

    use_nvidia_runtime = Bool(
        True,
        help="""Whether a session gets its real GPUs through a Docker device request (the NVIDIA container toolkit).

        Where it is off, or the engine has no NVIDIA runtime, it is told the UUID and gets no device.

        Example: ``c.FGPUSpawner.use_nvidia_runtime = False``
        """,
    ).tag(config=True)

    log_config = Dict(
        default_value={"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}},
        help="""Docker log configuration of a session's container.

        Example: ``c.FGPUSpawner.log_config = {"Type": "local", "Config": {"max-size": "20m"}}``
        """,
    ).tag(config=True)

    @default("use_internal_ip")
    def _reach_containers_directly(self) -> bool:
        return True

    @default("remove")
    def _remove_ourselves(self) -> bool:
        # Not by the engine: how a container ended must be seen before it goes.
        return False

    @classmethod
    def make_launcher(
        cls, *, config: Config, settings: FGPU, installation: str, nodes: tuple[Node, ...]
    ) -> SessionLauncher:
        """Return what sees and removes this installation's containers.

        Raises:
            BadSettings: the engine does not answer.
        """
        from fgpuspawner.network import connect

        client = connect(dict(configured(cls, config).get("client_kwargs", {})))
        return Containers(client, installation=installation, node_ids=[n.id for n in nodes])

    @property
    def _containers(self) -> Containers:
        launcher = Runtime.current().launcher
        assert isinstance(launcher, Containers)
        return launcher

    @property
    def client(self) -> docker.APIClient:
        """The engine's client: one for the Hub."""
        return self._containers.client

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads for calls to the engine: enough that one that hangs delays nobody else."""
        return self._containers.executor

    def docker(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine's client in a thread; see `Containers.call`."""
        if method == "create_container":
            # The last word: whatever DockerSpawner, the configuration and hooks have put together.
            kwargs = self._sealed(kwargs)
        return self._containers.call(getattr(self.client, method), *args, **kwargs)

    def _sealed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return what a container is to be made with, with the session's isolation over it."""
        prepared = self.prepared
        host_config, displaced = sealed_mounts(kwargs.get("host_config") or {}, prepared.mounts)
        for path in displaced:
            self.log.error(
                "Session %d: something else is configured to be mounted at %s; it is left out",
                self.session.id,
                path,
            )
        environment = sealed_environment(
            parse_environment(kwargs.get("environment")),
            self.told(),
            prepared,
            image=self._image_environment,
        )
        return {**kwargs, "host_config": host_config, "environment": environment}

    @property
    def object_name(self) -> str:
        """The container's name: one for each attempt, never reused."""
        return self._containers.name(self.session) if self._session is not None else ""

    @object_name.setter
    def object_name(self, value: str) -> None:
        """Ignore the name that the Hub kept: the session says what it is."""

    async def launch(self, session: Session) -> tuple[str, int]:
        """Create and start the session's container, fetching its image first where it is not there."""
        image = self.runtime.catalogue.get(session.request.image)
        if image is None or not image.reference:
            raise LaunchFailed(f"there is no image {session.request.image!r} any more", EndCause.PULL_FAILED)
        self.image = image.reference
        found = await self._image(session, image.reference)
        self._image_environment = _given(parse_environment((found.get("Config") or {}).get("Env")))
        self.mem_limit = f"{session.request.memory_mib}M"
        self.cpu_limit = session.request.cpu_milli / 1000
        before = {name: getattr(self, name) for name in ("extra_create_kwargs", "extra_host_config")}
        try:
            self.extra_create_kwargs = await self._create_kwargs(session, found)
            self.extra_host_config = await self._host_config(session)
            created = await self.create_object()
            self.object_id = created["Id"]
            await self.start_object()
            ip, port = await self.get_ip_and_port()
            return str(ip), int(port)
        except APIError as e:
            self.log.error("Session %d: the engine refused: %s", session.id, e.explanation)
            raise LaunchFailed(_words(e)) from e
        except (DockerException, *GONE) as e:
            raise LaunchFailed("the Docker engine does not answer") from e
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    async def _image(self, session: Session, reference: str) -> dict[str, Any]:
        try:
            return dict(await self.docker("inspect_image", reference))
        except (ImageNotFound, NotFound):
            pass
        except (DockerException, *GONE) as e:
            raise LaunchFailed("the Docker engine does not answer") from e
        self._session = await self.runtime.scheduler.pulling(session.id, session.attempt)
        try:
            # Not run to its end when the session is cancelled: a pull touches no GPU.
            refused = await in_a_thread_of_its_own(pull, self.client, reference)
            if refused is None:
                return dict(await self.docker("inspect_image", reference))
        except (DockerException, *GONE) as e:
            refused = getattr(e, "explanation", None) or str(e)
        raise LaunchFailed(
            f"image {reference} is not on the engine and could not be fetched: {refused}",
            EndCause.PULL_FAILED,
        )

    async def _create_kwargs(self, session: Session, image: dict[str, Any]) -> dict[str, Any]:
        """Return the administrator's settings with ours over them: labels, and a user that is not root."""
        given = dict(await _evaluated(self._eval_if_callable(self.extra_create_kwargs)))
        labels = {**(given.get("labels") or {}), **_plain(self._containers.labels(session))}
        if is_root(str((image.get("Config") or {}).get("User") or "")):
            given.setdefault("user", self.container_user)
        return {**given, "labels": labels}

    async def _host_config(self, session: Session) -> dict[str, Any]:
        """Return our settings with the administrator's over them; the limits are always ours."""
        ours: dict[str, Any] = {
            "security_opt": list(self.security_opt),
            "cap_drop": list(self.cap_drop),
            "pids_limit": self.pids_limit,
            "log_config": dict(self.log_config),
        }
        given = dict(await _evaluated(self._eval_if_callable(self.extra_host_config)))
        given = {key: value for key, value in given.items() if key not in LIMITS}
        if isinstance(given.get("binds"), list | tuple):
            # DockerSpawner would take a list for the whole, and leave out the volumes.
            volumes: Any = self.volume_binds
            given["binds"] = [*given["binds"], *convert_volume_binds(volumes)]
        # Without this a container may use as much swap again.
        always: dict[str, Any] = {"memswap_limit": self.mem_limit}
        if not self.runtime.is_simulated(session) and await self._has_nvidia_runtime():
            assert session.placement is not None
            uuids = [s.device_uuid for s in session.placement.shares]
            request = DeviceRequest(
                driver="nvidia", device_ids=uuids, capabilities=[["gpu", "compute", "utility"]]
            )
            always["device_requests"] = [request]
        return {**ours, **given, **self.prepared.host_config, **always}

    async def _has_nvidia_runtime(self) -> bool:
        if not self.use_nvidia_runtime:
            return False
        return "nvidia" in ((await self.docker("info")).get("Runtimes") or {})

    async def exit_status(self, session: Session) -> tuple[int, EndCause, str] | None:
        """Return None while the container runs, or while its engine does not say; else how it ended."""
        name = self._containers.name(session)
        try:
            container = await self.docker("inspect_container", name)
        except NotFound:
            return 0, EndCause.EXITED, "the session's container was removed; nobody here did it"
        except (DockerException, *GONE) as e:
            # Not to be taken for an end: the share stays held until the engine says so.
            self.log.warning("Session %d: the engine does not answer: %s", session.id, e)
            return None
        if container["State"]["Running"] or container["State"]["Status"] == "created":
            return None
        status, cause, message = how_it_ended(container)
        tail = await self._log_tail(name)
        self.log.info("Last output of session %d:\n%s", session.id, "\n".join(tail))
        if status > 0 and tail and cause is EndCause.EXITED:
            message = f"{message}; its last words: {tail[-1][:200]}"
        return status, cause, message

    async def _log_tail(self, name: str) -> list[str]:
        try:
            output = await self.docker("logs", name, tail=LOG_TAIL_LINES)
        except (DockerException, *GONE):
            return []
        return [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]

    async def has_driver(self, session: Session) -> bool:
        """Return whether the container got a driver: a simulated one, or the toolkit's."""
        return self.runtime.is_simulated(session) or await self._has_nvidia_runtime()

    async def probe(self, session: Session, command: Sequence[str]) -> Answer:
        """Run a probe in the container, as the container's own user."""
        program, *arguments = command
        words = [f"{IN_CONTAINER}/{program}", *arguments]
        try:
            return await in_a_thread_of_its_own(run_in, self.client, self._containers.name(session), words)
        except (DockerException, *GONE) as e:
            raise LaunchFailed("the Docker engine did not run the check of the session's GPU limit") from e

    async def cgroup(self, session: Session) -> str | None:
        """Return the container's cgroup (version 2), as the kernel tells it of the container's first process."""
        try:
            container = await self.docker("inspect_container", self._containers.name(session))
            path = Path(f"/proc/{container['State']['Pid']}/cgroup")
            lines = (await asyncio.to_thread(path.read_text)).splitlines()
        except (DockerException, OSError, *GONE):
            return None
        return next((line.removeprefix("0::") for line in lines if line.startswith("0::/")), None)

    async def take_down(self, session: Session, *, now: bool) -> bool:
        """Stop and remove the session's containers."""
        return await self._containers.remove_session(session, now=now, stop_timeout_s=self.stop_timeout_s)


def is_root(user: str) -> bool:
    """Return whether an image's ``USER`` (a name or number, perhaps with a group) is root, or nobody's."""
    name = user.split(":")[0]
    try:
        return int(name) == 0  # The engine reads 00 as a number, too.
    except ValueError:
        return name in ("", "root")


def run_in(client: docker.APIClient, name: str, command: Sequence[str]) -> Answer:
    """Run a command in a container and return what it prints, no more of it than a probe has to say."""
    made = client.exec_create(name, list(command), stdin=False, tty=False)["Id"]
    output = bytearray()
    for out, _ in client.exec_start(made, stream=True, demux=True):
        output += out or b""
        if len(output) > LARGEST_BYTES:
            break
    return Answer(bytes(output), client.exec_inspect(made)["ExitCode"])


def pull(client: docker.APIClient, reference: str) -> str | None:
    """Fetch an image; return the engine's reason if it could not be fetched."""
    repository, tag = parse_repository_tag(reference)
    for line in client.pull(repository, tag=tag or "latest", stream=True, decode=True):
        if "error" in line:
            return str(line["error"])
    return None


async def _evaluated(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) or isinstance(value, asyncio.Future) else value


def _given(environment: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if value is not None}


def _plain(labels: dict[str, str]) -> dict[str, str]:
    """Return labels that DockerSpawner's templates leave as they are: a user's name may hold braces."""
    return {key: value.replace("{", "{{").replace("}", "}}") for key, value in labels.items()}


def _words(error: APIError) -> str:
    """Return an engine's refusal in words for the owner of the session."""
    text = str(error.explanation or error)
    if "could not select device driver" in text or "unknown or invalid runtime" in text:
        return "this server's Docker engine has no GPU runtime; ask an administrator to install it"
    if "no space left on device" in text:
        return "the server's disk is full; ask an administrator"
    return f"the container could not be started: {text[:300]}"
