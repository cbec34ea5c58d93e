"""The spawner of sessions that are Docker containers."""

from __future__ import annotations

import asyncio
import functools
import posixpath
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.types import DeviceRequest
from docker.utils import convert_volume_binds
from dockerspawner import DockerSpawner
from traitlets import Bool, Dict, Integer, List, Unicode, default
from traitlets.config import Config

from fgpu_scheduler import EndCause, Session
from fgpuspawner import handover
from fgpuspawner.containers import (
    GONE,
    Containers,
    EngineSilent,
    how_it_ended,
    in_words,
    with_last_words,
)
from fgpuspawner.engines import Engine, Engines, engines_for
from fgpuspawner.execs import run_in
from fgpuspawner.gpus import some_gpus
from fgpuspawner.images.live import Images
from fgpuspawner.images.model import Image
from fgpuspawner.images.pulls import PullFailed
from fgpuspawner.isolation import machine
from fgpuspawner.isolation.backend import IN_CONTAINER
from fgpuspawner.isolation.report import LARGEST_BYTES, Answer
from fgpuspawner.isolation.sealing import parse_environment, sealed_environment, sealed_mounts
from fgpuspawner.network import NETWORK
from fgpuspawner.queued import LaunchFailed, QueuedSpawner
from fgpuspawner.runtime import Runtime, SessionLauncher
from fgpuspawner.settings import FGPU, configured
from fgpuspawner.tenants import Tenants
from fgpuspawner.waiting import in_a_thread_of_its_own

NO_NAME_SERVER = "127.0.0.1"
"""Of the container itself: nothing listens there."""

FOR_ONE_LAUNCH = ("extra_create_kwargs", "extra_host_config", "use_internal_ip", "host_ip", "network_name")
"""What a launch sets for itself, and then puts back as it was configured."""

SUDO_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID")
"""What `sudo` and `apt-get` need, and no more: none to mount, to trace others, to make devices, or of the network."""

LIMITS = ("mem_limit", "cpu_quota", "nano_cpus")
"""What the session's request decides, whatever ``extra_host_config`` says."""


INTERPRETERS = ("bash", "sh", "dash", "ash", "python", "python3")
"""What the images of frameworks run when nothing else is asked for."""


class FGPUSpawner(QueuedSpawner, DockerSpawner):
    """Sessions as Docker containers, each with its slice, no new privileges and no capabilities."""

    containers = True
    _image_environment: Mapping[str, str] = {}
    _found_image: Mapping[str, Any] = {}
    _handover: handover.Handover | None = None

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
        help="""Whether a session gets its real GPUs through a Docker device request (NVIDIA container toolkit, or CDI).

        Where it is off, or the engine has neither, it is told the UUID and gets no device.

        Example: ``c.FGPUSpawner.use_nvidia_runtime = False``
        """,
    ).tag(config=True)

    read_only_root = Bool(
        False,
        help="""Whether a session's root file system is read-only, but for its volumes and ``writable_in_memory``.

        What an image's programs write elsewhere fails then. Homes must be volumes (``c.FGPUSpawner.volumes``), or
        nothing can be written in them.

        Example: ``c.FGPUSpawner.read_only_root = True``
        """,
    ).tag(config=True)

    writable_in_memory = Dict(
        default_value={
            "/tmp": "rw,exec,nosuid,nodev,mode=1777",
            "/run": "rw,noexec,nosuid,nodev,mode=755",
            "/var/tmp": "rw,noexec,nosuid,nodev,mode=1777",
        },
        help="""With ``read_only_root``, folders that are in memory instead, and their mount options.

        They count as the session's memory, and end with it.

        Example: ``c.FGPUSpawner.writable_in_memory = {"/tmp": "rw,exec,nosuid,nodev,mode=1777,size=1g"}``
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
        cls, *, config: Config, settings: FGPU, images: Images, installation: str
    ) -> SessionLauncher:
        """Return what sees and removes this installation's containers, on every engine.

        Raises:
            BadSettings: this machine's own engine does not answer.
        """
        own = configured(cls, config)
        return engines_for(
            settings.nodes,
            installation=installation,
            network=own.get("network_name", NETWORK),
            images=lambda: [i.reference for i in images.catalogue.images if i.enabled and not i.owner],
            machines={
                spec["name"]: machine.folder_of(settings.data_path(), spec["name"])
                for spec in settings.nodes
                if isinstance(spec.get("gpus"), dict)
            },
            client_kwargs=dict(own.get("client_kwargs", {})),
        )

    @property
    def _engine(self) -> Engine:
        """The engine of the session's node; before it has one, any: nothing is asked of it then."""
        engines = Runtime.current().launcher
        assert isinstance(engines, Engines)
        if self._session is None or self._session.placement is None:
            return engines.engines[0]
        return engines.of(self._session)

    def _answering_engine(self) -> Engine | None:
        """Return the session's engine; None if it does not answer, or its node is not configured any more."""
        try:
            return self._engine if self._engine.answers else None
        except EngineSilent:
            return None

    def is_away(self, session: Session) -> bool:
        """Return whether the session's engine does not answer, and may again."""
        try:
            return not self._engine.answers
        except EngineSilent:
            return False

    @property
    def _tenants(self) -> Tenants:
        tenants = Runtime.current().tenants
        assert tenants is not None
        return tenants

    @property
    def _node_id(self) -> str:
        assert self.session.placement is not None
        return self.session.placement.node_id

    @property
    def _containers(self) -> Containers:
        return self._engine.containers

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
            return self._made(self._without_identity(self._sealed(kwargs)))
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

    async def _made(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Have a container made, or take a warm one that is the same, and runs."""
        pool, told = self.runtime.warm, self._handover
        if pool is not None and told is not None and told.is_server and not self._engine.address.is_elsewhere:
            slice_ = self.told()
            taken = await pool.take(
                self.session, kwargs, image_id=self._found_image["Id"], told=slice_, network=self.network_name
            )
            if taken is not None:
                # What a new container would have been made with.
                self._handover = replace(told, environment={**slice_, **told.environment})
                return {"Id": taken}
        return dict(await self._containers.call(self.client.create_container, **kwargs))

    def _without_identity(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return what a container is made with that is told later who it is, where its image can be told."""
        self._handover = None
        if not handover.can_take(self._found_image, kwargs):
            return kwargs
        prepared = self.prepared
        public = {*self.told(), *prepared.environment, *prepared.search_paths}
        kwargs, self._handover = handover.split(kwargs, public=public)
        return kwargs

    async def _tell(self, container: str) -> None:
        """Tell a container that waits for it who it is."""
        if self._handover is None:
            return
        try:
            await self._containers.call(handover.tell, self.client, container, self._handover)
        except APIError as e:
            if e.status_code != HTTPStatus.CONFLICT:
                raise
            # It does not run any more: how it ended says more.
            self.log.warning("Session %d could not be told who it is: %s", self.session.id, e.explanation)
        except OSError as e:
            raise LaunchFailed("the Docker engine did not tell the container which session it is") from e

    async def get_command(self) -> list[str]:
        """Return the configured command, else the image's own. A bare shell is no server: it would end at once."""
        own = (self._found_image.get("Config") or {}).get("Cmd") or []
        if len(own) == 1 and posixpath.basename(own[0]) in INTERPRETERS:
            own = []
        return [*(self.cmd or own or [handover.SERVER]), *self.get_args()]

    @property
    def object_name(self) -> str:
        """The container's name: one for each attempt, never reused."""
        return self._containers.name(self.session) if self._session is not None else ""

    @object_name.setter
    def object_name(self, value: str) -> None:
        """Ignore the name that the Hub kept: the session says what it is."""

    async def launch(self, session: Session) -> tuple[str, int]:
        """Create and start the session's container, fetching its image first where it is not there."""
        image = self.runtime.catalogue.of(session.request)
        if image is None or not image.reference:
            raise LaunchFailed(f"there is no image {session.request.image!r} any more", EndCause.PULL_FAILED)
        self.image = image.reference
        found = self._found_image = await self._image(session, image)
        self._image_environment = _given(parse_environment((found.get("Config") or {}).get("Env")))
        self.mem_limit = f"{session.request.memory_mib}M"
        self.cpu_limit = session.request.cpu_milli / 1000
        if not self._engine.answers:
            raise LaunchFailed(
                f"{self._engine.address} does not answer; ask for a new session", EndCause.NODE_LOST
            )
        before = {name: getattr(self, name) for name in FOR_ONE_LAUNCH}
        try:
            await self._go_to(self._engine, image.reference)
            self.extra_create_kwargs = await self._create_kwargs(session, found)
            self.extra_host_config = await self._host_config(session)
            user = session.request.user
            async with self._tenants.network_of(user, self._engine) as self.network_name:
                created = await self.create_object()
            self.object_id = created["Id"]
            await self.start_object()
            await self._tell(self.object_id)
            return await self.get_ip_and_port()
        except APIError as e:
            self.log.error("Session %d: the engine refused: %s", session.id, e.explanation)
            raise LaunchFailed(in_words(e)) from e
        except (DockerException, *GONE) as e:
            raise LaunchFailed("the Docker engine does not answer") from e
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    async def _go_to(self, engine: Engine, image: str) -> None:
        """Make what a container on this engine needs of this machine: its files there, and a port to reach it at."""
        if engine.address.address is None:
            return
        self.use_internal_ip = False
        self.host_ip = await asyncio.to_thread(socket.gethostbyname, engine.address.address)
        shared = machine.folder_of(self.runtime.isolation.host.data, self._node_id)
        mounts = await engine.ship(
            container=self.object_name,
            image=image,
            node=self._node_id,
            mounts=self.prepared.mounts,
            shared=shared,
        )
        self._prepared = replace(self.prepared, mounts=mounts)

    async def get_ip_and_port(self) -> tuple[str, int]:
        """Return where the Hub reaches the container: itself, or the port that its machine publishes for it."""
        if self.use_internal_ip:
            ip, port = await super().get_ip_and_port()
            return str(ip), int(port)
        container = await self.docker("inspect_container", self.object_name)
        published = container["NetworkSettings"]["Ports"].get(f"{self.port}/tcp") or []
        if not published:
            raise LaunchFailed("the container ended, or its machine published no port for it")
        return self.host_ip, int(published[0]["HostPort"])

    async def _image(self, session: Session, image: Image) -> dict[str, Any]:
        """Return what the engine says of the session's image, fetched first where it is not there."""
        pulls = self.runtime.pulls
        assert pulls is not None
        self._fetching = None
        try:
            found = await pulls.here(self._engine, image)
            if found is None:
                self._fetching = image.reference
                self._session = await self.runtime.scheduler.pulling(session.id, session.attempt)
                # Not run to its end when the session is cancelled: a pull touches no GPU.
                found = await pulls.ensure(self._engine, image, session.id)
                self._fetching = None
        except PullFailed as e:
            self._fetching = None
            raise LaunchFailed(str(e), EndCause.PULL_FAILED) from e
        except EngineSilent as e:
            raise LaunchFailed("the Docker engine does not answer") from e
        return dict(found)

    def too_late(self, limit_s: int) -> LaunchFailed:
        """Return what a launch fails with that took longer than it may; where its image did, that is named."""
        if self._fetching is None:
            return super().too_late(limit_s)
        return LaunchFailed(
            f"image {self._fetching} was not fetched within the launch limit of {limit_s} seconds",
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
        if self.runtime.settings.egress == "closed":
            # Docker's resolver would ask outside for the container, from the host's side of the firewall.
            ours["dns"] = [NO_NAME_SERVER]
        if self._has_sudo(session):
            # A set-user-id program, which sudo is, gives nothing where new privileges are off.
            ours["security_opt"] = [o for o in self.security_opt if not o.startswith("no-new-privileges")]
            ours["cap_add"] = list(SUDO_CAPABILITIES)
        if self.read_only_root:
            ours |= {"read_only": True, "tmpfs": dict(self.writable_in_memory)}
        given = dict(await _evaluated(self._eval_if_callable(self.extra_host_config)))
        given = {key: value for key, value in given.items() if key not in LIMITS}
        if isinstance(given.get("binds"), list | tuple):
            # DockerSpawner would take a list for the whole, and leave out the volumes.
            volumes: Any = self.volume_binds
            given["binds"] = [*given["binds"], *convert_volume_binds(volumes)]
        # Without this a container may use as much swap again.
        always: dict[str, Any] = {"memswap_limit": self.mem_limit}
        request = await self._gpus(session)
        if request is not None:
            always["device_requests"] = [request]
        return {**ours, **given, **self.prepared.host_config, **always}

    def _has_sudo(self, session: Session) -> bool:
        """Return whether the session's user may become root in it: by the image, or by a Hub group of theirs."""
        image = self.runtime.catalogue.of(session.request)
        groups = self.runtime.settings.sudo_groups
        return (image is not None and image.sudo) or any(g in groups for g in session.request.groups)

    async def _gpus(self, session: Session) -> DeviceRequest | None:
        """Return the request for the session's real GPUs, None where it gets none."""
        if not self.use_nvidia_runtime or self.runtime.is_simulated(session):
            return None
        return some_gpus(await self.docker("info"), self.runtime.isolation.devices_of(session))

    async def exit_status(self, session: Session) -> tuple[int, EndCause, str] | None:
        """Return None while the container runs, or while its engine does not say; else how it ended."""
        if self._answering_engine() is None:
            return None
        name = self._containers.name(session)
        try:
            container = await self._containers.inspect(name)
        except NotFound:
            return 0, EndCause.EXITED, "the session's container was removed; nobody here did it"
        except (DockerException, *GONE) as e:
            # Not to be taken for an end: the share stays held until the engine says so.
            self.log.warning("Session %d: the engine does not answer: %s", session.id, e)
            return None
        if container["State"]["Running"] or container["State"]["Status"] == "created":
            return None
        status, cause, message = how_it_ended(container)
        tail = await self._containers.log_tail(name)
        self.log.info("Last output of session %d:\n%s", session.id, "\n".join(tail))
        return status, cause, with_last_words(status, cause, message, tail)

    async def has_driver(self, session: Session) -> bool:
        """Return whether the container got a driver: a simulated one, or the toolkit's."""
        return self.runtime.is_simulated(session) or await self._gpus(session) is not None

    async def probe(self, session: Session, command: Sequence[str]) -> Answer:
        """Run a probe in the container, as the container's own user."""
        program, *arguments = command
        words = [f"{IN_CONTAINER}/{program}", *arguments]
        try:
            # A container that was there before its session has nothing of this in its own environment.
            run = functools.partial(
                run_in,
                self.client,
                self._containers.name(session),
                words,
                environment=self.told(),
                most_bytes=LARGEST_BYTES,
            )
            return await in_a_thread_of_its_own(run)
        except (DockerException, *GONE) as e:
            raise LaunchFailed("the Docker engine did not run the check of the session's GPU limit") from e

    async def cgroup(self, session: Session) -> str | None:
        """Return the container's cgroup (version 2), as the kernel tells it of the container's first process."""
        if self._engine.address.is_elsewhere:
            return None
        try:
            container = await self.docker("inspect_container", self._containers.name(session))
            path = Path(f"/proc/{container['State']['Pid']}/cgroup")
            lines = (await asyncio.to_thread(path.read_text)).splitlines()
        except (DockerException, OSError, *GONE):
            return None
        return next((line.removeprefix("0::") for line in lines if line.startswith("0::/")), None)

    async def take_down(self, session: Session, *, now: bool) -> bool:
        """End the session's containers. While its engine does not answer that is left for later."""
        if self._answering_engine() is None:
            return False

        def removed() -> None:
            self._tenants.sweep_soon()
            if self.runtime.warm is not None:
                self.runtime.warm.wake()

        return await self._containers.end_session(
            session, now=now, stop_timeout_s=self.stop_timeout_s, removed=removed
        )


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
