"""The Hub's single instances: settings, store, images, engine, isolation, queue, and the background work on them.

1. `Runtime.open` runs before JupyterHub looks at its servers. It reads the catalogue, opens the database, connects to
   the engine and chooses each node's isolation. An error ends the Hub with one line.
2. `Runtime.start` runs in the Hub's event loop. It compares the engine with the database, starts the scheduler, removes
   files of ended sessions, and then begins the background work.
3. JupyterHub's polls wait in `Runtime.ready` until then, so that a slow database does not look like dead servers.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from traitlets.config import Config

from fgpu_scheduler import (
    UP,
    Audit,
    Deadlines,
    EndCause,
    Node,
    NodeState,
    PrivateImages,
    Queue,
    Refusal,
    Scheduler,
    Session,
    Store,
    SystemClock,
    beyond_capacity,
)
from fgpuspawner.concurrency.background import Background, Failures, until_it_works
from fgpuspawner.concurrency.waiting import to_the_end
from fgpuspawner.engines.base import Capabilities, Engine, HubSide, Installation
from fgpuspawner.form.offer import Offer, RequestRefused, make_offer
from fgpuspawner.form.presets import with_unknown_image
from fgpuspawner.hub.adoption import CheckedEngine
from fgpuspawner.hub.compute_watch import POLL_EVERY_S as COMPUTE_POLL_EVERY_S
from fgpuspawner.hub.gpu_observers import GpuIdleTimes
from fgpuspawner.hub.idle import Servers, SessionActivity
from fgpuspawner.hub.image_pulls import ImageWatch, Prefetch, PullProgressFile
from fgpuspawner.hub.image_worker import kept_names
from fgpuspawner.hub.inventory import Inventory, nodes_at_start
from fgpuspawner.hub.metrics import HubMetrics
from fgpuspawner.hub.parking import Parker
from fgpuspawner.hub.resizing import Resizer
from fgpuspawner.hub.session_logs import SessionLogs
from fgpuspawner.hub.session_probes import held_bytes, prover
from fgpuspawner.images.live import REFRESH_EVERY_S, Images
from fgpuspawner.images.model import Catalogue
from fgpuspawner.images.pull_state import PullState
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.gpu_poller import Drivers
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.nodes import MachineFacts
from fgpuspawner.text.sessions import session_name

log = logging.getLogger("fgpu")

T = TypeVar("T")

START_AGAIN_S = 1.0
"""The pause before the scheduler's start, or the first observation, is tried again."""
FIRST_OBSERVATION_S = 5.0
"""How long the Hub's start waits for each observation of the engine."""
WATCHDOG = "the watchdog"
FILE_THREADS = 4
"""Threads only for files of launches and ends, so that both continue while other work hangs."""
FORM_THREADS = 4
"""Threads only for the launch form's reads: when the database hangs, only these hang."""


class LaunchingSpawner(Servers, Protocol):
    """The part of the Hub's spawner class that the runtime uses."""

    capabilities: ClassVar[Capabilities]

    @classmethod
    def make_engine(cls, installation: Installation) -> Engine: ...

    @classmethod
    def notice_end(cls, session: Session) -> None: ...


class Runtime:
    """The Hub's single instances. Opened before the Hub looks at its servers, started in its event loop."""

    _current: Runtime | None = None

    def __init__(self, settings: FGPU, *, config: Config, spawner_class: type[LaunchingSpawner]) -> None:
        self.settings = settings.checked()
        self._config = config
        self._spawner_class = spawner_class
        #: Done when the last run's state is read and repaired; None before `start`.
        self._started: asyncio.Future[None] | None = None
        #: Held while a session's files are written.
        self._preparing = asyncio.Lock()
        self._file_threads = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="fgpu-files")
        self._form_threads = ThreadPoolExecutor(FORM_THREADS, thread_name_prefix="fgpu-form")
        self.background = Background(log)
        #: Whether the Hub is stopping: then it, and not the owner, ends sessions.
        self.hub_stops = False

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

    def open(self, serve: Callable[[str], None]) -> None:
        """Read the catalogue, find the GPUs, open the database and connect to the engine. Blocks.

        ``serve`` gets the id of the database's installation and raises if this Hub may not serve it.

        Raises:
            FGPUError: one of them cannot be used; the message is one line.
        """
        settings = self.settings
        self.store = Store(settings.database_url(), half_life_s=settings.half_life_s)
        self.images = Images(settings.catalogue_path(), self.store)
        self.store.open()
        serve(self.store.installation_id)
        self.images.refresh()
        slugs = {image.slug for image in self.images.catalogue.images}
        for line in with_unknown_image(settings.presets, settings.warm_pool, slugs):
            log.warning("%s", line)
        self.engine = self._spawner_class.make_engine(
            Installation(self.store.installation_id, settings, self._config, lambda: self.catalogue)
        )
        heard = False

        def survey() -> Mapping[str, MachineFacts | None]:
            nonlocal heard
            found = self.engine.survey()
            heard = True
            return found

        nodes = nodes_at_start(settings, survey, self.store.snapshot(0).nodes)
        self.isolation = Isolation(settings, nodes)
        own_root = self._spawner_class.capabilities.own_root
        self.isolation.open(own_root=own_root, installation=self.store.installation_id)
        atexit.register(self.isolation.close)
        self.drivers = Drivers(self.isolation, self.engine)
        # One poller serves all observers, so the shortest interval counts.
        self.poll_every_s = min(settings.watchdog_every_s, settings.meter_every_s, COMPUTE_POLL_EVERY_S)
        self.gpu_idle_times = GpuIdleTimes(SystemClock(), every_s=self.poll_every_s)
        atexit.register(self.drivers.close)
        self.logs = SessionLogs(self.engine, settings.data_path())
        self.checked = None if settings.end_unknown_sessions else CheckedEngine(self.engine, self.store)
        self.queue: Queue = Scheduler(
            self.store,
            policy=settings.policy(),
            rules=settings.rules(),
            activity=self._activity(),
            caps=settings.caps(),
            launcher=self.engine if self.checked is None else self.checked,
            deadlines=Deadlines(
                queue_timeout_s=settings.queue_timeout_s,
                resume_grace_s=settings.resume_grace_s,
                abandoned_after_s=settings.abandoned_after_s,
            ),
        )
        data = settings.data_path()
        self.metrics = HubMetrics(self.queue, self.engine.answering, data=data)
        self.store.on_transaction(self.metrics.transaction)
        self.queue.on_end = self._on_end
        self.queue.on_pass = self.metrics.passes.observe
        self.queue.on_forecast = self.metrics.forecasts.observe
        self.inventory = Inventory(
            settings, self.engine.survey, self.isolation, self.queue, nodes, heard=heard
        )
        self.prefetch = Prefetch(
            self.engine, self.queue, first=settings.prefetch, catalogue=lambda: self.catalogue
        )
        self._pull_progress = PullProgressFile(data, self.pull_states)
        self.image_watch = ImageWatch(
            self.engine, lambda: self.catalogue, lambda: self.nodes, self.background, data=data
        )
        # Also when the Hub ends by an error: threads may still be in a transaction.
        atexit.register(self.store.close)
        Runtime._current = self

    def _on_end(self, session: Session) -> None:
        self.metrics.ended(session)
        self._spawner_class.notice_end(session)

    def _activity(self) -> SessionActivity | None:
        """Return the source of idle times, if any group ends idle sessions."""
        rules = self.settings.rules()
        if not any(own.ends_idle_after_s for own in (rules.default, *rules.groups.values())):
            return None
        return SessionActivity(
            self._spawner_class,
            self.gpu_idle_times,
            SystemClock(),
            idle_after_s=lambda session: rules.of(session.request.resource_group).ends_idle_after_s or 0,
        )

    def open_engine(self, urls: Sequence[str]) -> None:
        """Give the engine the Hub's side and close its networks. ``urls`` must stay reachable for sessions. In the
        Hub's loop.

        Raises:
            BadSettings: the engine cannot do what is set.
        """
        atexit.register(self.engine.close)
        self.engine.open(
            HubSide(
                isolation=self.isolation,
                queue=self.queue,
                background=self.background,
                urls=tuple(dict.fromkeys(urls)),
                nodes_changed=self.inventory.changed,
                ended=lambda limit: self.store.ended(user=None, limit=limit),
                kept_images=lambda: kept_names(PrivateImages(self.store)),
            )
        )

    # -- in the Hub's event loop ----------------------------------------------------------------------

    def start(
        self, served: Collection[tuple[str, str]], background_work: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to schedule, then begin the background work; `ready` waits until that is done.

        ``served`` are the servers (user, name) that the Hub's database has as running.
        """
        self._served, self._begin_background_work = frozenset(served), background_work
        self._started = asyncio.ensure_future(self._start())
        self.background.every(
            REFRESH_EVERY_S,
            lambda: asyncio.to_thread(self.images.refresh),
            failed="The catalogue could not be read again",
            first_after_s=REFRESH_EVERY_S,
        )
        self._pull_progress.begin(self.background)

    async def _start(self) -> None:
        # Polls wait for this method: a database that does not answer must not look like servers that are gone. It runs
        # once, so no temporary error may end it.
        nodes = self.nodes
        if self.checked is not None:
            await self._observe_first(self.checked)
            # A silent node may run unknown sessions: place nothing there before it has answered.
            fitting = self.checked.fitting
            nodes = tuple(n if n.id in fitting else replace(n, state=NodeState.LOST) for n in nodes)
        live = await until_it_works(
            lambda: self.queue.start(nodes, self.settings.quotas_given()),
            every_s=START_AGAIN_S,
            failures=Failures(log, "The scheduler cannot start yet, trying on", level=logging.ERROR),
        )
        snapshot = await self.queue.patiently(self.queue.snapshot)
        for line in beyond_capacity(snapshot, self.settings.account_tree()):
            log.warning("Not all guarantees can be kept: %s", line)
        try:
            await asyncio.to_thread(self.isolation.prune, [s.id for s in live])
        except OSError as e:
            log.error("What ended sessions left cannot be removed yet; the next launch tries it again: %s", e)
        prove = prover(self.engine, self.isolation, self.settings, simulated=self.is_simulated)
        self.resizer = Resizer(
            self.store,
            self.queue,
            self.isolation,
            SystemClock(),
            held=functools.partial(held_bytes, self.engine, self.isolation),
            problems=prove,
            step_milli=self.settings.caps().fgpu_step_milli,
            on_outcome=lambda outcome: self.metrics.resizes.labels(outcome).inc(),
        )
        await self.resizer.heal(live)
        self.parker = Parker(
            self.queue,
            self.engine,
            self.isolation,
            self.drivers,
            self.gpu_idle_times,
            self.settings,
            prove=prove,
            on_moved=lambda way, took_s: self.metrics.parking.labels(way).observe(took_s),
        )
        for session in live:
            server = session.request.user, session.request.server_name
            if session.state in UP and server not in self._served:
                message = "the Hub did not know this session any more when it restarted"
                end = functools.partial(self.queue.end, session.id, EndCause.EXITED, message)
                await self.queue.patiently(end)
        self._begin_background_work()
        kinds = "simulated GPUs" if self.simulated else "GPUs"
        count = sum(len(n.devices) for n in self.nodes)
        log.info("Scheduling %d %s on %d nodes", count, kinds, len(self.nodes))

    async def _observe_first(self, engine: CheckedEngine) -> None:
        """Observe the engine until no answer contradicts the database. Silent nodes are checked when they answer."""
        while True:
            observing = self.background.run(engine.observe(), failed="The engine could not be looked at")
            await asyncio.wait([observing], timeout=FIRST_OBSERVATION_S)
            if not engine.wrong:
                return
            await asyncio.sleep(START_AGAIN_S)

    async def audit(self, session: Session, action: str, details: str = "", *, actor: str = WATCHDOG) -> None:
        """Add to the audit log what someone other than its owner did to a session.

        Raises:
            StoreUnavailable: it cannot be written.
        """
        if actor == WATCHDOG:
            self.metrics.actions.labels(action).inc()
        target = f"session {session.id} ({session_name(session.request)}) of {session.request.user}"
        await asyncio.to_thread(
            Audit(self.store).add,
            actor=actor,
            action=action,
            target=target,
            group=session.request.resource_group,
            details=details,
            now_s=SystemClock().now_s(),
        )

    def opened(self, user: str, server: str, by: str) -> None:
        """Add to the audit log that ``by`` opened another user's server. In the Hub's event loop."""

        async def audit() -> None:
            session = await self.queue.serving(user, server)
            if session is not None:
                await self.audit(session, "session.open", actor=by)

        self.background.run(audit(), failed=f"Not in the audit log: {by} opened {user}/{server}")

    def why_not_all(self) -> str:
        """Return why the Hub does only part of its work, in words for users; empty if it does all."""
        if self.checked is not None and self.checked.wrong:
            return "a machine runs sessions that this Hub does not know; its log names them"
        return "" if self.has_begun else "the Hub has not begun its work yet"

    @property
    def has_begun(self) -> bool:
        return self._started is not None and self._started.done()

    async def ready(self) -> None:
        """Wait until the state of the last run is read and repaired."""
        assert self._started is not None, "the runtime was not started"
        await asyncio.shield(self._started)

    def pull_states(self) -> dict[int, PullState]:
        """Return the progress of the pulls that sessions wait for, or why a pre-pull failed, by session."""
        return {**self.prefetch.failed, **self.engine.fetching()}

    def pull_of(self, session_id: int) -> PullState | None:
        return self.pull_states().get(session_id)

    async def prepare(self, session: Session) -> Prepared:
        """Write a session's files for its launch; raises CannotPrepare with words for the owner."""
        # One at a time: the list of live sessions must be current when files of dead ones are removed.
        async with self._preparing:
            live = [s.id for s in await self.queue.live()]
            loop = asyncio.get_running_loop()
            return await to_the_end(
                loop.run_in_executor(self._file_threads, self.isolation.prepare, session, live)
            )

    async def clear(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._file_threads, self.isolation.remove, session.id)

    async def accept_image(self, engines_id: str, user: str) -> None:
        """Store that a user accepts another user's image, and reload the images."""
        answer = PrivateImages(self.store).answer
        now_s = SystemClock().now_s()
        await self.queue.patiently(
            lambda: asyncio.to_thread(answer, engines_id, user=user, accepted=True, now_s=now_s)
        )
        await asyncio.to_thread(self.images.refresh)

    async def read_for_form(self, read: Callable[..., T], *args: Any) -> T:
        """Run a database read of the launch form in the form's own threads, as it may hang."""
        return await asyncio.get_running_loop().run_in_executor(self._form_threads, read, *args)

    @property
    def catalogue(self) -> Catalogue:
        return self.images.catalogue

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.inventory.nodes

    @property
    def simulated(self) -> bool:
        return any(d.simulated for n in self.nodes for d in n.devices)

    def is_simulated(self, session: Session) -> bool:
        own = session.device_uuids
        return any(d.simulated and d.uuid in own for n in self.nodes for d in n.devices)

    def offer(self, user: str, hub_groups: Collection[str]) -> Offer:
        """Return what this user may choose.

        Raises:
            Refused: no image or resource group is open to the user, or the nodes are unknown.
        """
        if not self.nodes and not self.inventory.heard:
            words = (
                "the cluster doesn't answer, so it isn't known which GPUs there are; try again in a minute"
            )
            raise RequestRefused([Refusal("group", "engine_silent", words)])
        return make_offer(
            self.settings,
            self.nodes,
            self.catalogue.startable_by(user, hub_groups),
            self.settings.groups_of(user, hub_groups),
            user=user,
            hub_groups=hub_groups,
            lending=self.isolation.lending,
            parking=self.isolation.parking,
            available=self.image_watch.available.fresh(SystemClock().now_s()),
        )
