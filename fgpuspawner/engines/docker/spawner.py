"""The settings of sessions in Docker containers: DockerSpawner's, with ours over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from dockerspawner import DockerSpawner
from traitlets import Bool, Dict, Integer, List, Unicode, default
from traitlets.config import Config

from fgpuspawner.engines.base import Held, Installation, Safeguard
from fgpuspawner.engines.docker import checks, daemon
from fgpuspawner.engines.docker.create import ContainerOptions
from fgpuspawner.engines.docker.engine import DockerEngine, client_settings
from fgpuspawner.engines.docker.firewall import FirewallKeeper
from fgpuspawner.engines.docker.network_guard import rules_for
from fgpuspawner.engines.docker.networks import NETWORK, ensure_network
from fgpuspawner.engines.marks import user_part
from fgpuspawner.images.model import Image
from fgpuspawner.settings import FGPU, configured, engine_is_asked
from fgpuspawner.spawner.base import QueuedSpawner


class FGPUSpawner(QueuedSpawner, DockerSpawner):
    """Sessions as Docker containers, each with its slice, without capabilities or new privileges."""

    capabilities = DockerEngine.capabilities

    pids_limit = Integer(
        1024, help="""Most processes and threads in a session. Example: ``c.FGPUSpawner.pids_limit = 4096``"""
    ).tag(config=True)

    ulimits = Dict(
        value_trait=Integer(),
        default_value={"core": 0},
        help="""Limits of each process in a session, as ``ulimit`` has them; unless set, no core dumps.

        The engine must be allowed to set them: "nofile" can be no more than its own. Not "nproc": it counts all
        processes of a user id on the machine, and so those of other sessions.

        Example: ``c.FGPUSpawner.ulimits = {"core": 0, "nofile": 65536}``
        """,
    ).tag(config=True)

    cap_drop = List(
        Unicode(),
        default_value=["ALL"],
        help="""Linux capabilities taken from a session. Example: ``c.FGPUSpawner.cap_drop = ["ALL"]``""",
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
        help="""Seconds that a container may take to end before it is killed.

        Example: ``c.FGPUSpawner.stop_timeout_s = 5``
        """,
    ).tag(config=True)

    use_nvidia_runtime = Bool(
        True,
        help="""Give a session its real GPUs by a Docker device request (NVIDIA container toolkit, or CDI).

        If off, or if the engine has neither, the session is told the UUID and gets no device.

        Example: ``c.FGPUSpawner.use_nvidia_runtime = False``
        """,
    ).tag(config=True)

    read_only_root = Bool(
        False,
        help="""Make a session's root file system read-only, except its volumes and ``writable_in_memory``.

        An image's programs cannot write elsewhere then. Homes must be volumes (``c.FGPUSpawner.volumes``), or
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
        help="""Folders kept in memory with ``read_only_root``, and their mount options.

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

    @default("escape")
    def _escape_and_cut(self) -> Callable[[str], str]:
        return lambda text: user_part(self._escape(text), "--")

    @default("use_internal_ip")
    def _reach_containers_directly(self) -> bool:
        return True

    @classmethod
    def make_engine(cls, installation: Installation) -> DockerEngine:
        return DockerEngine(installation, configured(cls, installation.config))

    @classmethod
    def set_up(cls, c: Any) -> None:
        """Make sessions reach the Hub and the service at the host's address on their network."""
        own = configured(cls, c)
        name = own.get("network_name", NETWORK)
        c.FGPUSpawner.network_name = name
        if not engine_is_asked():
            return
        with closing(daemon.connect_here(client_settings(own))) as client:
            gateway = ensure_network(client, name)
        address = c.FGPU.get("hub_address") or gateway
        c.JupyterHub.setdefault("hub_ip", address)
        c.FGPU.setdefault("service_ip", address)

    @classmethod
    def holds(cls, config: Any, settings: FGPU) -> Sequence[str]:
        """Return what this machine's daemon can enforce on containers."""
        with closing(daemon.connect_here(client_settings(configured(cls, config)))) as client:
            return checks.enforcement(client.info(), settings)

    @classmethod
    def wrong_elsewhere(cls, config: Any, settings: FGPU, installation: str) -> Sequence[str]:
        """Return warnings about other installations' sessions, and about clocks that differ."""
        return checks.problems(settings, client_settings(configured(cls, config)), installation)

    @classmethod
    def firewall(cls, installation: str, settings: FGPU, urls: Sequence[str]) -> FirewallKeeper:
        return FirewallKeeper(rules_for(settings, urls, installation))

    @classmethod
    def safeguards(cls, settings: FGPU, config: Config) -> Mapping[Safeguard, Held]:
        """Return the safeguards of the daemons and of the containers' settings."""
        given, traits = configured(cls, config), cls.class_traits(config=True)
        return checks.judge(
            checks.infos(settings, client_settings(given)),
            {name: given.get(name, trait.default()) for name, trait in traits.items()},
            ports=checks.ports_closed(settings),
        )

    @property
    def object_name(self) -> str:
        """The container's name, for hooks: one for each attempt. Before the session is placed, DockerSpawner's own."""
        if self._session is None:
            return str(self._object_name_default())
        engine = self.runtime.engine
        assert isinstance(engine, DockerEngine)
        return engine.name(self._session)

    @object_name.setter
    def object_name(self, value: str) -> None:
        """Ignore the name that the Hub stored: the session determines it."""

    async def engine_options(self, image: Image) -> ContainerOptions:
        """Return the settings of this session's container, with callables evaluated and templates filled in."""
        # DockerSpawner's templates, callables and environment need it.
        self.image = image.reference
        return ContainerOptions(
            create=await self._evaluated(self.extra_create_kwargs),
            host=await self._evaluated(self.extra_host_config),
            volumes=self.volume_binds,
            mounts=self.mount_binds,
            links=self.links,
            pids_limit=self.pids_limit,
            ulimits=self.ulimits,
            cap_drop=self.cap_drop,
            security_opt=self.security_opt,
            log_config=self.log_config,
            container_user=self.container_user,
            read_only_root=self.read_only_root,
            writable_in_memory=self.writable_in_memory,
            gives_gpus=self.use_nvidia_runtime,
            internal_ip=self.use_internal_ip,
            host_ip=self.host_ip,
        )

    async def _evaluated(self, setting: Any) -> dict[str, Any]:
        value = self._eval_if_callable(setting)
        if inspect.isawaitable(value):
            value = await value
        return dict(self._render_templates(value or {}))
