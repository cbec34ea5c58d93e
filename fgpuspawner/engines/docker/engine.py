"""Docker containers as an `Engine`: on this machine's daemon and on those of other machines.

A launch has these steps; when it is cancelled or fails, the session's end removes what they made.

1. Read the image, which is there by now, and whether it would run as root.
2. Copy the session's files to its machine, if that is another one (`remote_machine.py`).
3. Make the user's network, and keep it until a container is on it (`networks.py`).
4. Make the container's arguments (`create.py`), and take the identity out of them (`handover.py`): what a container is
   created with can be read later.
5. Take a warm container of this shape (`warm_pool.py`), or create one.
6. Start it, send it its identity, and read its address.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound, TLSParameterError

from fgpu_scheduler import BadSettings, EndCause, Observed, PrivateImage, Seen, Session
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import (
    FOLDERS,
    Capabilities,
    Ended,
    Endpoint,
    Engine,
    EngineSilent,
    HubSide,
    ImageStore,
    Installation,
    LaunchFailed,
    LaunchSpec,
    SavedImage,
    SaveSpec,
)
from fgpuspawner.engines.docker import create, disk, handover
from fgpuspawner.engines.docker.address import addresses
from fgpuspawner.engines.docker.checks import sessions_of_others
from fgpuspawner.engines.docker.client import FAILED, run_in
from fgpuspawner.engines.docker.create import ContainerOptions, CreateContext, some_gpus
from fgpuspawner.engines.docker.daemon import Daemon, OwnTrust
from fgpuspawner.engines.docker.endings import refusal_words
from fgpuspawner.engines.docker.fleet import SWEEP_VOLUMES_EVERY_S, Fleet, VolumeSweep, image_store
from fgpuspawner.engines.docker.handover import Handover
from fgpuspawner.engines.docker.images.inspection import has_roots_number
from fgpuspawner.engines.docker.images.pulls import Pulls
from fgpuspawner.engines.docker.images.saver import ImageSaver
from fgpuspawner.engines.docker.network_guard import NetworkGuard
from fgpuspawner.engines.docker.networks import NETWORK
from fgpuspawner.engines.docker.remote_machine import copy_files
from fgpuspawner.engines.docker.warm_pool import WarmPool
from fgpuspawner.images.availability import Availability
from fgpuspawner.images.model import Image
from fgpuspawner.images.pull_state import PullState
from fgpuspawner.isolation.base import IN_CONTAINER
from fgpuspawner.isolation.files import make_folder
from fgpuspawner.isolation.native import machine_folder
from fgpuspawner.isolation.nvml_reader import NvmlReader
from fgpuspawner.isolation.report import ACCOUNTING, LARGEST_BYTES, Answer
from fgpuspawner.meter.disk import DiskUse
from fgpuspawner.settings.nodes import MachineFacts

log = logging.getLogger("fgpu.docker")

OTHER_USER = "65533:65533"
"""A user id without an image's account. Docker's user namespaces only map ids below 65536."""
DOES_NOT_ANSWER = "the Docker engine does not answer"


class DockerEngine(Engine):
    """Runs sessions as containers, each on its user's network, with its slice, without capabilities or new privileges."""

    capabilities = Capabilities(
        "containers",
        own_root=True,
        real_limits=True,
        apart=True,
        networks=True,
        machines=True,
        saves_images=True,
        fetches_images=True,
        warm_pool=True,
        reads_logs=True,
    )

    def __init__(self, installation: Installation, settings: Mapping[str, Any]) -> None:
        """Connect to the daemons of the configured nodes. ``settings`` are the spawner class's.

        Raises:
            BadSettings: this machine's own daemon is needed and does not answer.
        """
        self._installation = installation
        #: Whether an image would run as root, by image id.
        self._as_root: dict[str, bool] = {}
        own = installation.settings
        #: Folders of simulated machines, by node.
        self._machines: Mapping[str, Path] = {
            spec["name"]: machine_folder(own.data_path(), spec["name"])
            for spec in own.nodes
            if isinstance(spec.get("gpus"), dict)
        }
        self.fleet = Fleet(
            [
                Daemon(
                    address,
                    installation=installation.id,
                    network=settings.get("network_name", NETWORK),
                    images=self._offered,
                    client_kwargs=client_settings(settings),
                    stop_timeout_s=int(settings.get("stop_timeout_s", 10)),
                )
                for address in addresses(own.nodes)
            ]
        )
        self.fleet.connect()
        self.pulls = Pulls(self.fleet, at_a_time=own.pulls_at_a_time)
        self.network = NetworkGuard(own, self.fleet, installation=installation.id)
        #: Whether a daemon can limit a container's disk.
        self._limits_disk: dict[Daemon, bool] = {}
        self._homes = disk.own_targets(settings)
        self._saver = ImageSaver(self.fleet, installation.id)
        self.warm: WarmPool | None = None

    def _offered(self) -> list[str]:
        catalogue = self._installation.catalogue()
        return [image.reference for image in catalogue.images if image.enabled and not image.owner]

    # -- the Hub's life -------------------------------------------------------------------------------

    def survey(self) -> Mapping[str, MachineFacts | None]:
        return self.fleet.survey()

    def open(self, hub: HubSide) -> None:
        self.network.open(hub.urls, hub.background)
        hub.background.every(
            SWEEP_VOLUMES_EVERY_S,
            VolumeSweep(self.fleet, self._installation.id).sweep,
            failed="Unused volumes cannot be looked for",
        )
        self.warm = self._warm_pool(hub)
        self.pulls.changed = hub.queue.nudge
        self._saver.open(hub)
        for daemon in self.fleet.daemons:
            daemon.containers.removed = self._removed
            hub.background.run(
                _warn_of_others(daemon),
                failed=f"Other installations' sessions on {daemon.address} are unknown",
            )

    def _warm_pool(self, hub: HubSide) -> WarmPool | None:
        sizes, catalogue = self._installation.settings.warm_pool, self._installation.catalogue
        unknown = sorted(slug for slug in sizes if catalogue().entry(slug) is None)
        if unknown:
            known = ", ".join(image.slug for image in catalogue().images)
            raise BadSettings(f"c.FGPU.warm_pool: there is no image {unknown[0]!r}; there are {known}")
        own = next((d for d in self.fleet.daemons if not d.address.is_elsewhere), None)
        if own is None:
            return None
        return WarmPool(
            own.containers,
            hub,
            sizes=sizes,
            node_ids=own.address.node_ids,
            data=self._installation.settings.data_path(),
            is_offered=lambda slug: catalogue().get(slug) is not None,
            fetching=self.pulls.states,
        )

    def begin(self) -> None:
        if self.warm is not None:
            self.warm.begin()

    def close(self) -> None:
        if self.warm is not None:
            self.warm.close()
        self.network.close()
        self.fleet.close()

    def answering(self) -> tuple[int, int]:
        answer = len(self.fleet.answering)
        return answer, len(self.fleet.daemons) - answer

    def _removed(self) -> None:
        """Free the place on the network, and the CPU and memory, of a container that was removed."""
        self.network.sweep_soon()
        if self.warm is not None:
            self.warm.wake()

    # -- what runs ------------------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        for daemon in self.fleet.daemons:
            daemon.watch(changed)

    async def observe(self) -> Seen:
        return await self.fleet.observe()

    async def remove(self, observed: Observed) -> bool:
        return await self.fleet.remove(observed)

    def name(self, session: Session) -> str:
        return self.fleet.of(session).containers.name(session)

    # -- one session ----------------------------------------------------------------------------------

    async def start(self, spec: LaunchSpec) -> Endpoint:
        assert isinstance(spec.options, ContainerOptions)
        if not spec.image.reference:
            raise LaunchFailed(f"image {spec.image.slug!r} no longer exists", EndCause.PULL_FAILED)
        daemon = self.fleet.of(spec.session)
        if not daemon.answers:
            raise LaunchFailed(f"{daemon.address} does not answer; ask for a new session", EndCause.NODE_LOST)
        try:
            return await self._started(daemon, spec, spec.options)
        except APIError as e:
            log.error("Session %d: the engine refused: %s", spec.session.id, e.explanation)
            raise LaunchFailed(refusal_words(e, spec.shared)) from e
        except FAILED as e:
            raise LaunchFailed(DOES_NOT_ANSWER) from e

    async def _started(self, daemon: Daemon, spec: LaunchSpec, options: ContainerOptions) -> Endpoint:
        session, containers = spec.session, daemon.containers
        found = await self.pulls.found(daemon, spec.image)
        if found is None:
            raise LaunchFailed(
                f"image {spec.image.reference} was removed from {daemon.address} just now",
                EndCause.PULL_FAILED,
            )
        for place in (
            (FOLDERS, *(f"{FOLDERS}/{folder.name}" for folder in spec.shared)) if spec.shared else ()
        ):
            # To mount over: the session only reads its own files.
            await asyncio.to_thread(make_folder, spec.folder / place, mode=0o755)
        publish_at = None if options.internal_ip else options.host_ip
        if daemon.address.host is not None:
            publish_at = await asyncio.to_thread(socket.gethostbyname, daemon.address.host)
            spec = await containers.call(self._copied, daemon, spec)
        gpus = None
        if options.gives_gpus and not spec.simulated:
            gpus = some_gpus(await containers.call(daemon.client.info), spec.devices)
        async with self.network.of(session.request.user, daemon) as network:
            context = CreateContext(
                name=containers.name(session),
                labels=containers.labels(session),
                installation=self._installation.id,
                network=network,
                api_version=daemon.client.api_version,
                publish_at=publish_at,
                gpus=gpus,
                closed=self._installation.settings.egress == "closed",
                disk_mib=await self._disk_mib(daemon, spec.image.reference),
            )
            if found["Id"] not in self._as_root:
                helper = f"{context.name}-user"
                as_root = await containers.call(has_roots_number, daemon.client, found, helper=helper)
                self._as_root[found["Id"]] = as_root
            kwargs, displaced = create.arguments(
                spec, options, context, found, as_root=self._as_root[found["Id"]]
            )
            for path in displaced:
                words = "Session %d: something else is configured to be mounted at %s; it is left out"
                log.error(words, session.id, path)
            container, identity, warm = await self._made(daemon, spec, kwargs, found, network)
        await containers.call(daemon.client.start, container)
        if identity is not None:
            await self._send(daemon, session, container, identity)
        ip, port = await _endpoint(daemon, container, network, spec.port, publish_at)
        log.info("Session %d: container %s on %s is started", session.id, context.name, daemon.address)
        return Endpoint(ip, port, has_driver=spec.simulated or gpus is not None, warm=warm)

    def _copied(self, daemon: Daemon, spec: LaunchSpec) -> LaunchSpec:
        """Return a launch with its files on another machine. Blocks."""
        assert spec.session.placement is not None
        node_id = spec.session.placement.node_id
        with daemon.copying:
            mounts = copy_files(
                daemon.client,
                container=daemon.containers.name(spec.session),
                image=spec.image.reference,
                installation=self._installation.id,
                node=node_id,
                mounts=spec.prepared.mounts,
                shared=machine_folder(self._installation.settings.data_path(), node_id),
            )
        return replace(spec, prepared=replace(spec.prepared, mounts=mounts))

    async def _made(
        self, daemon: Daemon, spec: LaunchSpec, kwargs: dict[str, Any], image: Mapping[str, Any], network: str
    ) -> tuple[str, Handover | None, bool]:
        """Return a container for the session, what to send it, and whether it is a warm one, which runs already."""
        identity: Handover | None = None
        if handover.can_take(image, kwargs):
            prepared = spec.prepared
            public = {*spec.slice_environment, *prepared.environment, *prepared.search_paths}
            kwargs, identity = handover.split(kwargs, public=public)
            # Containers wait with the folders that each session has; what a user chooses they cannot be given.
            poolable = not spec.session.request.folders and not daemon.address.is_elsewhere
            if self.warm is not None and identity.is_server and poolable:
                warm = await self.warm.take(
                    spec.session,
                    kwargs,
                    image_id=image["Id"],
                    slice_environment=spec.slice_environment,
                    network=network,
                )
                if warm is not None:
                    # A new container would have been created with these.
                    environment = {**spec.slice_environment, **identity.environment}
                    return warm, replace(identity, environment=environment), True
        made = await daemon.containers.call(daemon.client.create_container, **kwargs)
        return str(made["Id"]), identity, False

    async def _send(self, daemon: Daemon, session: Session, container: str, identity: Handover) -> None:
        try:
            await daemon.containers.call(handover.send, daemon.client, container, identity)
        except APIError as e:
            if e.status_code != HTTPStatus.CONFLICT:
                raise
            # It no longer runs; how it ended says more.
            log.warning("Session %d did not get its identity: %s", session.id, e.explanation)
        except OSError as e:
            raise LaunchFailed("the Docker engine did not tell the container which session it is") from e

    async def ended(self, session: Session) -> Ended | None:
        daemon = self.fleet.answering_for(session)
        return None if daemon is None else await daemon.containers.ended(session)

    def is_away(self, session: Session) -> bool:
        assert session.placement is not None
        daemon = self.fleet.find(session.placement.node_id)
        return daemon is not None and not daemon.answers

    async def probe(
        self, session: Session, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
    ) -> Answer:
        daemon = self.fleet.of(session)
        program, *rest = command
        # A warm container's own environment lacks what describes the session.
        name, words = daemon.containers.name(session), [f"{IN_CONTAINER}/{program}", *rest]
        # The session can signal processes of its own user. The check at the start must see what that user sees.
        user = OTHER_USER if ACCOUNTING in command else ""
        run = functools.partial(run_in, environment=environment, user=user, most_bytes=LARGEST_BYTES)
        try:
            return await in_a_thread_of_its_own(run, daemon.client, name, words)
        except FAILED as e:
            raise LaunchFailed("the Docker engine did not run the check of the session's GPU limit") from e

    async def log(self, session: Session, *, lines: int) -> bytes | None:
        return await self.fleet.of(session).containers.log(session, lines)

    async def set_memory(self, session: Session, memory_mib: int) -> None:
        daemon = self.fleet.of(session)
        name, limit = daemon.containers.name(session), memory_mib * 2**20
        update = functools.partial(daemon.client.update_container, mem_limit=limit, memswap_limit=limit)
        try:
            await daemon.containers.call(update, name)
        except FAILED as e:
            raise LaunchFailed(f"the memory limit of session {session.id} could not be changed: {e}") from e

    async def cgroup(self, session: Session) -> str | None:
        daemon = self.fleet.of(session)
        if daemon.address.is_elsewhere:
            return None
        name = daemon.containers.name(session)
        try:
            found = await daemon.containers.call(daemon.client.inspect_container, name)
            lines = await asyncio.to_thread(Path(f"/proc/{found['State']['Pid']}/cgroup").read_text)
        except (OSError, *FAILED):
            return None
        return next((ln.removeprefix("0::") for ln in lines.splitlines() if ln.startswith("0::/")), None)

    async def disk_use(self, session: Session) -> DiskUse:
        daemon = self.fleet.answering_for(session)
        if daemon is None:
            raise EngineSilent("its machine does not answer")
        name, user = daemon.containers.name(session), session.request.user
        use = functools.partial(disk.use_of, here=not daemon.address.is_elsewhere, own=self._homes)
        try:
            return await in_a_thread_of_its_own(use, daemon.client, name, user)
        except NotFound:
            return DiskUse()
        except FAILED as e:
            raise EngineSilent(str(e)) from e

    async def _disk_mib(self, daemon: Daemon, image: str) -> int:
        """Return the disk limit that the engine itself enforces on a container, in MiB; 0 if it cannot or need not."""
        limit_mib = self._installation.settings.session_disk_mib
        if not limit_mib:
            return 0
        if daemon not in self._limits_disk:
            self._limits_disk[daemon] = await daemon.containers.call(disk.limits_disk, daemon.client, image)
            how = "limits" if self._limits_disk[daemon] else "cannot limit"
            log.info("%s %s what a container writes to the disk", daemon.address, how)
        return limit_mib if self._limits_disk[daemon] else 0

    async def stop(self, session: Session, *, now: bool) -> bool:
        daemon = self.fleet.answering_for(session)
        # A silent daemon is asked again later.
        return daemon is not None and await daemon.containers.end_session(session, now=now)

    # -- who uses which GPU ---------------------------------------------------------------------------

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        return self.fleet.sessions_of(pids, node_id)

    def gpu_reader(self, node_id: str) -> NvmlReader:
        return self.fleet.of_node(node_id).driver(node_id, self._machines.get(node_id))

    # -- images ---------------------------------------------------------------------------------------

    async def availability(self, image: Image, node_id: str) -> Availability:
        return await self.pulls.availability(self._answering(node_id), image)

    async def has_image(self, image: Image, node_id: str) -> bool:
        return await self.pulls.found(self._answering(node_id), image) is not None

    async def fetch_image(self, image: Image, node_id: str, session_id: int, *, ahead: bool = False) -> None:
        await self.pulls.ensure(self._answering(node_id), image, session_id, ahead=ahead)

    def _answering(self, node_id: str) -> Daemon:
        daemon = self.fleet.of_node(node_id)
        if not daemon.answers:
            raise EngineSilent(f"{daemon.address} does not answer")
        return daemon

    def fetching(self) -> Mapping[int, PullState]:
        return self.pulls.states()

    async def save_image(self, spec: SaveSpec) -> SavedImage:
        return await self._saver.save(spec)

    async def rename_image(self, image: PrivateImage, reference: str) -> bool:
        return await self._saver.rename(image, reference)

    async def delete_image(self, image: PrivateImage) -> None:
        await self._saver.delete(image)

    def image_stores(self) -> Sequence[ImageStore]:
        return [image_store(daemon) for daemon in self.fleet.daemons]


async def _warn_of_others(daemon: Daemon) -> None:
    """Log sessions of other installations on a daemon: what they hold is not counted here."""
    args = daemon.containers.looker, daemon.address, daemon.installation
    for line in await daemon.containers.call(sessions_of_others, *args):
        log.warning("%s", line)


async def _endpoint(
    daemon: Daemon, container: str, network: str, port: int, publish_at: str | None
) -> tuple[str, int]:
    """Return where the Hub reaches a container: directly, or at a port that its machine publishes."""
    found = await daemon.containers.call(daemon.client.inspect_container, container)
    settings = found["NetworkSettings"]
    if publish_at is None:
        return str(settings["Networks"][network]["IPAddress"]), port
    published = settings["Ports"].get(f"{port}/tcp") or []
    if published:
        return publish_at, int(published[0]["HostPort"])
    if found["State"]["Running"]:
        raise LaunchFailed("its machine published no port for the session's container")
    # It has ended; the next poll finds out how.
    return publish_at, port


def client_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return docker-py's arguments for this machine's daemon, from ``c.FGPUSpawner`` or ``c.DockerSpawner``.

    Raises:
        BadSettings: its TLS settings are wrong.
    """
    tls = settings.get("tls_config")
    try:
        return {**({"tls": OwnTrust(**tls)} if tls else {}), **dict(settings.get("client_kwargs", {}))}
    except (TLSParameterError, TypeError) as e:
        raise BadSettings(f"c.DockerSpawner.tls_config is {tls!r}: {e}") from e
