"""What the Hub process has one of: settings, store, scheduler, catalogue, and the sessions' launcher."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import functools
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, TypeVar

from jupyterhub import orm
from traitlets.config import Config

from fgpu_scheduler import (
    BadSettings,
    EndCause,
    FGPUError,
    Launcher,
    Node,
    Session,
    SessionState,
    SystemClock,
)
from fgpu_scheduler.health import known_or_as_it_was
from fgpu_scheduler.meters import Meters
from fgpu_scheduler.retention import Retention
from fgpu_scheduler.service import Deadlines, Scheduler
from fgpu_scheduler.store import Store
from fgpuspawner.administrators import follow_the_hub
from fgpuspawner.engines import Engines
from fgpuspawner.forgetting import keep_forgetting
from fgpuspawner.idle import Servers, SessionActivity
from fgpuspawner.images.live import Images, keep_current
from fgpuspawner.images.model import Catalogue
from fgpuspawner.images.prefetch import Prefetch
from fgpuspawner.images.pull_file import PullState, write_pulls
from fgpuspawner.images.pulls import Pulls
from fgpuspawner.images.worker import ImageWorker
from fgpuspawner.isolation.backend import Prepared
from fgpuspawner.isolation.gpu_use import GpuUse
from fgpuspawner.isolation.hub import Isolation
from fgpuspawner.isolation.nvml_reader import SharedReaders
from fgpuspawner.isolation.watchdog import Owners, Watchdog
from fgpuspawner.latecomers import take_in
from fgpuspawner.meter.sampler import Sampler
from fgpuspawner.nodes import Machine, as_far_as_known
from fgpuspawner.options import Offer, make_offer
from fgpuspawner.presets import with_unknown_image
from fgpuspawner.settings import FGPU
from fgpuspawner.tenants import Tenants
from fgpuspawner.upkeep import look_after
from fgpuspawner.waiting import to_the_end
from fgpuspawner.warm import WarmPool

log = logging.getLogger("fgpu")

T = TypeVar("T")

START_AGAIN_S = 1.0
FILERS = 4
"""Threads that write for launches, and remove after ends: of their own, as both go on whatever else hangs."""
FORM_READERS = 4
"""Threads that read for the launch form: while the database hangs they do, and nobody else waits for them."""


class SessionLauncher(Launcher, Owners, Protocol):
    """Sees and removes what sessions were launched as, and knows whose processes are whose."""

    def survey(self, nodes: Collection[str] | None = None) -> Mapping[str, Machine | None]:
        """Return what the machines of other engines say of themselves, by node; None for one that is silent. Blocks.

        All are asked, or those of these nodes.
        """
        ...


class LaunchingSpawner(Servers, Protocol):
    """The spawner class of the Hub, as far as the runtime needs it."""

    containers: ClassVar[bool]
    """Whether its sessions are containers."""

    @classmethod
    def make_launcher(
        cls, *, config: Config, settings: FGPU, images: Images, installation: str
    ) -> SessionLauncher:
        """Return what sees and removes what this kind of spawner launches."""
        ...

    @classmethod
    def ended(cls, session: Session) -> None:
        """Have the Hub learn that a session has ended."""
        ...


class Runtime:
    """Opened once, before the Hub looks at its servers; started in its event loop."""

    _current: Runtime | None = None

    def __init__(self, settings: FGPU, *, config: Config, spawner_class: type[LaunchingSpawner]) -> None:
        self.settings = settings.checked()
        self._config = config
        self._spawner_class = spawner_class
        self._started: asyncio.Future[None] | None = None
        self._preparing = asyncio.Lock()
        self._filers = ThreadPoolExecutor(FILERS, thread_name_prefix="fgpu-files")
        self._form_readers = ThreadPoolExecutor(FORM_READERS, thread_name_prefix="fgpu-form")
        self._readers = SharedReaders()
        self.upkeep: asyncio.Future[None] | None = None
        self.tenants: Tenants | None = None
        self.keeping: asyncio.Future[None] | None = None
        self.warm: WarmPool | None = None
        self.warming: asyncio.Future[None] | None = None
        self.saving: asyncio.Future[None] | None = None
        self.pulls: Pulls | None = None
        self._pulling: list[asyncio.Future[None]] = []

    @classmethod
    def current(cls) -> Runtime:
        """Return the Hub's runtime.

        Raises:
            RuntimeError: the Hub was not configured with `fgpuspawner.config.configure`.
        """
        if cls._current is None:
            raise RuntimeError(
                "fgpuspawner is not configured: call fgpuspawner.config.configure(c) in jupyterhub_config.py"
            )
        return cls._current

    def open(self) -> None:
        """Read the catalogue, find the GPUs, open the database. Blocks; for the Hub's start.

        Raises:
            FGPUError: one of them cannot be used; the message is one line.
        """
        self._lock = _locked(self.settings.data_path() / "hub.lock")
        self.store = Store(self.settings.database_url(), half_life_s=self.settings.half_life_s)
        self.images = Images(self.settings.catalogue_path(), self.store)
        self.store.open()
        self.images.refresh()
        for line in with_unknown_image(self.settings.presets, {i.slug for i in self.images.catalogue.images}):
            log.warning("%s", line)
        self.launcher = self._spawner_class.make_launcher(
            config=self._config,
            settings=self.settings,
            images=self.images,
            installation=self.store.installation_id,
        )
        stored = self.store.snapshot(0).nodes
        known = [node.id for node in stored if node.devices]
        machines = as_far_as_known(self.launcher.survey(), self.settings.nodes, known)
        self._away = [node_id for node_id, machine in machines.items() if machine is None]
        found = self.settings.discover_nodes(machines)
        self.nodes: tuple[Node, ...] = known_or_as_it_was(found, stored)
        self.isolation = Isolation(self.settings, self.nodes)
        self.isolation.open(
            containers=self._spawner_class.containers, installation=self.store.installation_id
        )
        self.scheduler = Scheduler(
            self.store,
            policy=self.settings.policy(),
            rules=self.settings.rules(),
            activity=self._activity(),
            caps=self.settings.caps(),
            launcher=self.launcher,
            deadlines=Deadlines(
                queue_timeout_s=self.settings.queue_timeout_s,
                resume_grace_s=self.settings.resume_grace_s,
                abandoned_after_s=self.settings.abandoned_after_s,
            ),
        )
        self.scheduler.on_end = self._spawner_class.ended
        # Whatever the last run told of its pulls: they have ended with it.
        write_pulls(self.settings.data_path(), {}, now_s=0)
        # However the Hub ends, as long as it can: its threads may be in the middle of something then.
        atexit.register(self.store.close)
        Runtime._current = self

    @property
    def _elsewhere(self) -> Engines | None:
        """What reaches other machines, where there may be any."""
        return self.launcher if isinstance(self.launcher, Engines) else None

    def _activity(self) -> SessionActivity | None:
        """Return what knows who is idle, where anybody is ended for it."""
        rules = self.settings.rules()
        if not any(own.idle_after_s for own in (rules.default, *rules.groups.values())):
            return None
        return SessionActivity(
            self._spawner_class,
            GpuUse(self.isolation, self.launcher, elsewhere=self._elsewhere, make_reader=self._readers),
            SystemClock(),
            idle_after_s=lambda session: rules.of(session.request.resource_group).idle_after_s or 0,
        )

    def start(self, served: Collection[tuple[str, str]]) -> None:
        """Begin to schedule, in the running event loop. `ready` waits until that is done.

        ``served`` are the servers (user, name) that the Hub knows to be up, or had been when it ended.
        """
        self._served = frozenset(served)
        self._started = asyncio.ensure_future(self._start())
        self._reading = asyncio.create_task(keep_current(self.images))

    async def _start(self) -> None:
        # Whoever polls waits meanwhile: a database that is away must not look like servers that are gone. Nothing of
        # this is done a second time, so nothing may fail for good that can be had later.
        live = await self._scheduling()
        try:
            await asyncio.to_thread(self.isolation.prune, [s.id for s in live])
        except OSError as e:
            log.error("What ended sessions left cannot be removed yet; the next launch tries it again: %s", e)
        for session in live:
            if session.state is SessionState.RUNNING and self._server_of(session) not in self._served:
                message = "the Hub had no server for this session any more when it restarted"
                end = functools.partial(self.scheduler.end, session.id, EndCause.EXITED, message)
                await self.scheduler.patiently(end)
        watchdog = Watchdog(
            self.isolation,
            self.scheduler,
            self.launcher,
            every_s=self.settings.watchdog_every_s,
            tolerance_mib=self.settings.watchdog_tolerance_mib,
            elsewhere=self._elsewhere,
            make_reader=self._readers,
        )
        self._watching = asyncio.create_task(watchdog.run())
        sampler = Sampler(
            self.isolation,
            self.scheduler,
            self.launcher,
            Meters(self.store),
            SystemClock(),
            data=self.settings.data_path(),
            every_s=self.settings.meter_every_s,
            elsewhere=self._elsewhere,
            make_reader=self._readers,
        )
        self._forgetting = asyncio.create_task(
            keep_forgetting(Retention(self.store), SystemClock(), days=self.settings.history_days)
        )
        self._metering = asyncio.create_task(sampler.run())
        self._asking = asyncio.create_task(
            take_in(self._away, self.launcher.survey, self.settings.discover_nodes, self._take_in)
        )
        kinds = "simulated GPUs" if self.simulated else "GPUs"
        count = sum(len(n.devices) for n in self.nodes)
        log.info("Scheduling %d %s on %d nodes", count, kinds, len(self.nodes))

    async def _scheduling(self) -> tuple[Session, ...]:
        """Have the scheduler started, however often that has to be tried, and return the live sessions."""
        while True:
            try:
                return await self.scheduler.start(self.nodes, self.settings.quotas_given())
            except Exception as e:
                trace = None if isinstance(e, FGPUError) else e
                log.error("The scheduler cannot start yet, trying on: %s", e, exc_info=trace)
            await asyncio.sleep(START_AGAIN_S)

    async def _take_in(self, node: Node) -> None:
        """Offer what a machine has that was silent when the Hub started."""
        await asyncio.to_thread(self.isolation.take_in, node)
        await self.scheduler.change_node(node)
        self.nodes = tuple(node if n.id == node.id else n for n in self.nodes)

    @staticmethod
    def _server_of(session: Session) -> tuple[str, str]:
        return session.request.user, session.request.server_name

    async def ready(self) -> None:
        """Wait until what the last run left is known and healed."""
        assert self._started is not None, "the runtime was not started"
        await asyncio.shield(self._started)

    def warm_pool(self, engines: Engines) -> WarmPool | None:
        """Return the warm pool of this machine's own engine; None where it has none.

        Raises:
            BadSettings: it is asked for an image that there is not.
        """
        own = next((e for e in engines.engines if not e.address.is_elsewhere), None)
        unknown = sorted(slug for slug in self.settings.warm_pool if self.catalogue.entry(slug) is None)
        if unknown:
            known = ", ".join(image.slug for image in self.catalogue.images)
            raise BadSettings(f"c.FGPU.warm_pool: there is no image {unknown[0]!r}; there are {known}")
        if own is None:
            return None
        return WarmPool(
            own.containers,
            self.isolation,
            self.scheduler,
            self.store,
            sizes=self.settings.warm_pool,
            data=self.settings.data_path(),
            is_offered=lambda slug: self.catalogue.get(slug) is not None,
        )

    async def keep_warm(self, pool: WarmPool) -> None:
        """Run the pool once it is known which sessions live."""
        await self.ready()
        await pool.run()

    async def look_after_images(self) -> None:
        """Make, name and remove private images as they are wished, once it is known which sessions live."""
        await self.ready()
        worker = ImageWorker(
            self.store,
            self.launcher if isinstance(self.launcher, Engines) else None,
            catalogue=lambda: self.catalogue,
            refresh=self.images.refresh,
            quota=self.settings.image_quota(),
        )
        await worker.run()

    def fetch_images(self, engines: Engines) -> None:
        """Begin to fetch images, in the running event loop: for whoever asks, and for the first who wait."""
        pulls = self.pulls = Pulls(
            engines,
            self.settings.data_path(),
            at_a_time=self.settings.pulls_at_a_time,
            changed=self.scheduler.nudge,
        )
        self._pulling = [asyncio.ensure_future(pulls.tell())]
        if self.settings.prefetch:
            prefetch = Prefetch(
                pulls,
                engines,
                self.scheduler,
                first=self.settings.prefetch,
                catalogue=lambda: self.catalogue,
            )
            self._pulling.append(asyncio.ensure_future(self._prefetch(prefetch)))

    async def _prefetch(self, prefetch: Prefetch) -> None:
        await self.ready()
        await prefetch.run()

    def pull_of(self, session_id: int) -> PullState | None:
        """Return how far the pull is that a session waits for, None where it waits for none."""
        return self.pulls.of(session_id) if self.pulls is not None else None

    async def prepare(self, session: Session) -> Prepared:
        """Write what a session needs for its launch.

        Raises:
            CannotPrepare: with words for the owner.
        """
        # One at a time, so that whoever lives by now is known to whoever removes what the dead left.
        async with self._preparing:
            live = [s.id for s in await self.scheduler.live()]
            loop = asyncio.get_running_loop()
            return await to_the_end(loop.run_in_executor(self._filers, self.isolation.prepare, session, live))

    async def clear(self, session: Session) -> None:
        """Remove what was written for a session that is gone."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._filers, self.isolation.remove, session.id)

    async def read_for_form(self, read: Callable[..., T], *args: Any) -> T:
        """Run what asks the database for a form, which may hang there longer than anybody waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._form_readers, read, *args)

    @property
    def catalogue(self) -> Catalogue:
        """The images in force now."""
        return self.images.catalogue

    @property
    def simulated(self) -> bool:
        """Whether any GPU is simulated."""
        return any(d.simulated for n in self.nodes for d in n.devices)

    def is_simulated(self, session: Session) -> bool:
        """Whether any GPU of this session's shares is simulated."""
        assert session.placement is not None
        own = [s.device_uuid for s in session.placement.shares]
        return any(d.simulated and d.uuid in own for n in self.nodes for d in n.devices)

    def offer(self, user: str, hub_groups: Collection[str]) -> Offer:
        """Return what this user may choose.

        Raises:
            Refused: no image, or no resource group, is open to them.
        """
        return make_offer(
            self.settings,
            self.nodes,
            self.catalogue.startable_by(user, hub_groups),
            self.settings.groups_of(user, hub_groups),
            user=user,
            hub_groups=hub_groups,
        )


def start_with_the_hub(app: Any) -> None:
    """Open and start the runtime of a Hub that is about to look at its servers; stop it on a wrong setting."""
    from fgpuspawner.config import SERVICE, check_hub, use_subdomains  # The one place that knows both.

    ours = logging.getLogger("fgpu")
    ours.handlers = app.log.handlers
    ours.setLevel(app.log.level)
    ours.propagate = False
    try:
        settings = FGPU.from_config(app.config)
        check_hub(app, settings)
        use_subdomains(app, settings)
        runtime = Runtime(settings, config=app.config, spawner_class=app.spawner_class)
        runtime.open()
        if isinstance(runtime.launcher, Engines):
            installation = runtime.store.installation_id
            runtime.tenants = Tenants(settings, runtime.launcher, installation=installation)
            runtime.tenants.open(app)
            runtime.warm = runtime.warm_pool(runtime.launcher)
            runtime.fetch_images(runtime.launcher)
    except (FGPUError, OSError) as e:
        sys.exit(f"fgpuspawner: {e}")
    follow_the_hub(app)
    servers = app.db.query(orm.Spawner).filter(orm.Spawner.server != None).all()  # noqa: E711
    runtime.start([(s.user.name, s.name) for s in servers if s.user is not None])
    runtime.upkeep = asyncio.ensure_future(look_after(app, SERVICE))
    runtime.saving = asyncio.ensure_future(runtime.look_after_images())
    if runtime.tenants is not None:
        runtime.keeping = asyncio.ensure_future(runtime.tenants.keep())
    if runtime.warm is not None:
        runtime.warming = asyncio.ensure_future(runtime.keep_warm(runtime.warm))


def _locked(path: Path) -> IO[str]:
    """Return a lock that is held for the life of this process.

    Raises:
        BadSettings: another process holds it.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BadSettings(
            f"c.FGPU.data_dir: another Hub is running on {path.parent}; end it, or give this one another folder"
        ) from None
    return file
