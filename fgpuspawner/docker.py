"""The spawner of sessions that are Docker containers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest
from docker.utils import convert_volume_binds
from dockerspawner import DockerSpawner
from traitlets import Bool, Dict, Integer, List, Unicode, default
from traitlets.config import Config

from fgpu_scheduler import EndCause, Node, Session
from fgpuspawner.containers import GONE, LOG_TAIL_LINES, Containers, how_it_ended, in_words, pull, run_in
from fgpuspawner.isolation.backend import IN_CONTAINER
from fgpuspawner.isolation.report import Answer
from fgpuspawner.isolation.sealing import parse_environment, sealed_environment, sealed_mounts
from fgpuspawner.queued import LaunchFailed, QueuedSpawner
from fgpuspawner.runtime import Runtime, SessionLauncher
from fgpuspawner.settings import FGPU, configured
from fgpuspawner.waiting import in_a_thread_of_its_own

LIMITS = ("mem_limit", "cpu_quota", "nano_cpus")
"""What the session's request decides, whatever ``extra_host_config`` says."""


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
            raise LaunchFailed(in_words(e)) from e
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


async def _evaluated(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) or isinstance(value, asyncio.Future) else value


def _given(environment: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if value is not None}


def _plain(labels: dict[str, str]) -> dict[str, str]:
    """Return labels that DockerSpawner's templates leave as they are: a user's name may hold braces."""
    return {key: value.replace("{", "{{").replace("}", "}}") for key, value in labels.items()}
