"""The store, read in a few worker threads. Callers at about the same time share one reading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy.exc import SQLAlchemyError

from fgpu_scheduler import (
    Banner,
    Caps,
    Clock,
    Extension,
    NotExtended,
    Outlook,
    PrivateImage,
    PrivateImages,
    QueueReader,
    RequestForecast,
    Resizes,
    Session,
    Snapshot,
    StaleVersion,
    Store,
    StoreUnavailable,
    UnknownSession,
    amounts_that_fit,
    not_extended,
)
from fgpuspawner.concurrency.background import Failures, until_it_works
from fgpuspawner.engines.base import Capabilities
from fgpuspawner.form.offer import LaunchRequest, Offer, make_offer
from fgpuspawner.images.availability import AVAILABLE, Availabilities
from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.edits import Draft, Update, edit_catalogue, write_to_file
from fgpuspawner.images.live import Images
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.needs import never_held
from fgpuspawner.images.pull_state import read_pulls
from fgpuspawner.isolation.choice import CHOICES
from fgpuspawner.meter.disk import DISK
from fgpuspawner.meter.gpu_health import HEALTH
from fgpuspawner.meter.model import MeterFile
from fgpuspawner.meter.tally import mean_sm_percent
from fgpuspawner.meter.usage_report import DAY_S, WEEK_S, RecentUse, recent_use
from fgpuspawner.service.model import Savers, World, extension_of
from fgpuspawner.service.problems import Problem
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.room import Room, room_of

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

FRESH_S = 1.5
"""Seconds for which a reading serves while the store's version stays the same: forecasts move with the clock."""
RECENT_S = 15
"""Age in seconds up to which a reading of the same version is good enough for a page's first view."""
FAILED_S = 0.5
"""Seconds for which a failure also answers callers that waited behind it; else each would wait for the database's
timeout."""
ANSWER_WITHIN_S = 12.0
"""Seconds after which the database counts as not answering: longer than it waits for a lock or a connection."""
REPORT_WITHIN_S = 50.0
"""Most seconds for a report of a year; proxies usually wait for a minute."""
WEEK_SUMS_FRESH_S = 60
WRITE_TRIES = 5
"""Tries of a write when another process wrote in between."""
ANY_IMAGE = Image("any", "any", "any", "any", "any", "any")
"""Stands for any image, in questions that do not depend on it."""
NO_SERVER = "/"
"""The server of a request that is only forecast; no server can have this name."""
MAX_EVENTS = 1000
"""A listener that missed more reads everything again."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes after an event: each changed session once, with its newest event, oldest first."""

    last_event_id: int
    sessions: tuple[tuple[int, Session], ...]


class Reader:
    """Reads the store for all handlers. Every failure is `StoreUnavailable`, never an empty answer.

    How one `World` serves many requests:

    1. `world` runs one reading at a time. Callers that wait behind it take its result, as it began after their calls.
    2. The reading is kept while the store's version stays the same, and at most `FRESH_S`, as forecasts move with the
       clock; after a slow reading four times as long as it took, so that a long queue does not keep the service busy.
    3. A failure also answers all callers that waited behind it.
    4. A write through `change` ends the freshness at once: it may not change the store's version.
    """

    def __init__(
        self, store: Store, settings: FGPU, images: Images, clock: Clock, engine: Capabilities
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.savers = Savers.ADMINISTRATORS if engine.saves_images else Savers.NOBODY
        if engine.saves_images and settings.owners_may_commit:
            self.savers = Savers.OWNERS
        self.images = images
        self._store = store
        self._queue = QueueReader(store, settings.policy())
        self._meters = MeterFile(settings.data_path())
        self._clock = clock
        self._caps: Caps = settings.caps()
        self._rules = settings.rules()
        self.extension = Extension(
            settings.extend_by_s, settings.extend_times, settings.max_time_limit_s or None
        )
        # Reports and forecasts take long; threads of their own keep them from delaying other reads.
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="fgpu-store")
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="fgpu-report")
        self._forecasts = ThreadPoolExecutor(2, thread_name_prefix="fgpu-forecast")
        #: A lock for each user with a forecast in progress.
        self._forecasting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: Why no read is possible; empty while connected.
        self._not_connected = "the database is not connected yet"
        self._reading = asyncio.Lock()
        self._world: World | None = None
        self._lately: RecentUse | None = None
        self._adding_up = asyncio.Lock()
        #: Monotonic time up to which `_world` serves while the store's version stays the same.
        self._fresh_until = 0.0
        #: Monotonic time at which the last successful reading began.
        self._read_at = float("-inf")
        #: Number of writes through this object.
        self._changes_made = 0
        #: The last failure, which answers callers up to this monotonic time.
        self._failure = ""
        self._failed_until = 0.0

    async def connect(self) -> None:
        """Connect, trying again until it works: the Hub, which migrates, starts at the same time."""

        async def connect() -> None:
            try:
                await self._in_thread(self._queue.connect)
                await self._in_thread(self.images.refresh)
            except StoreUnavailable as e:
                self._not_connected = str(e)
                raise

        failures = Failures(log, "The scheduler's database cannot be read yet, trying again")
        await until_it_works(connect, every_s=0.5, failures=failures)
        self._not_connected = ""
        log.info("Connected to the scheduler's database")

    def room(self) -> Room | None:
        """Return the free space on the disk of the Hub's data; None if unknown."""
        try:
            return room_of(self.settings.data_path())
        except OSError:
            return None

    async def close(self) -> None:
        """Wait for running reads, and close every connection. Later calls raise `StoreUnavailable`."""
        self._not_connected = "the service is ending"
        for pool in (self._pool, self._forecasts, self._reports):
            pool.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(pool.shutdown, wait=True)
        await asyncio.to_thread(self._queue.close)

    async def world(self) -> World:
        """Return a reading as new as the store's version at the call, and at most `FRESH_S` old."""
        self._check_connected()
        asked_at = time.monotonic()
        async with self._reading:
            if self._world is not None and self._read_at >= asked_at:
                return self._world
            if time.monotonic() < self._failed_until:
                raise StoreUnavailable(self._failure)
            try:
                return await self._current_world()
            except StoreUnavailable as e:
                self._failure, self._failed_until = str(e), time.monotonic() + FAILED_S
                raise

    async def recent_world(self) -> World:
        """Return the current reading of the store; its forecasts may be up to `RECENT_S` old.

        For a page's first view, which then refreshes: forecasts of a long queue take long.
        """
        world = self._world
        # `_fresh_until` is 0 after an administrator's write, such as the banner, which may not change the version.
        if world is None or not self._fresh_until:
            return await self.world()
        is_recent = 0 <= self._clock.now_s() - world.snapshot.now_s <= RECENT_S
        same = is_recent and await self._read(self._queue.version) == world.snapshot.version
        return world if same else await self.world()

    async def _current_world(self) -> World:
        read_at = time.monotonic()
        version = await self._read(self._queue.version)
        world = self._world
        if world is None or world.snapshot.version != version or time.monotonic() >= self._fresh_until:
            began, changes_made = time.monotonic(), self._changes_made
            world = await self._make_world()
            ended = time.monotonic()
            self._world = world
            # It may lack what an administrator wrote during the read.
            if changes_made == self._changes_made:
                self._fresh_until = ended + max(FRESH_S, 4 * (ended - began))
        self._read_at = read_at
        return world

    async def state(self) -> World:
        """Return the current state without forecasts: enough for one request."""
        return await self._read(self._read_state)

    @property
    def catalogue(self) -> Catalogue:
        return self.images.catalogue

    @property
    def last_world(self) -> World | None:
        """The last successful reading, however old; to be shown only with its age."""
        return self._world

    async def session(self, session_id: int) -> Session | None:
        return await self._read(self._queue.session, session_id)

    async def read_queue(self, function: Callable[[QueueReader], R]) -> R:
        """Return what a function reads from the queue."""
        return await self._read(function, self._queue)

    async def last_event_id(self) -> int:
        return await self._read(self._queue.last_event_id)

    async def forecast(self, wanted: LaunchRequest, offer: Offer, world: World) -> RequestForecast:
        """Return the forecast of a request that may queue.

        One of a user at a time, in its own thread: a long queue takes seconds.

        Raises:
            Problem: it takes too long, which is no fault of the database.
        """
        self._check_connected()
        turn = self._forecasting.setdefault(offer.user, asyncio.Lock())
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), turn:
                return await self._run(self._forecasts, lambda: self._forecast(wanted, offer, world))
        except TimeoutError:
            words = f"so many wait that a forecast takes longer than {ANSWER_WITHIN_S:.0f} seconds"
            raise Problem(503, "forecast_takes_long", words) from None

    async def extend(self, session_id: int) -> Session | NotExtended:
        """Extend a session's time limit, if that is allowed now; return it, or the reason against it.

        Raises:
            UnknownSession: it does not run.
            StaleVersion: the store changes all the time.
        """
        return await self._read(self._extend, session_id)

    async def read_store(self, function: Callable[[Store], R]) -> R:
        """Return what a function reads from the store."""
        return await self._read(function, self._store)

    async def report(self, function: Callable[[QueueReader], R]) -> R:
        """Return a function's result over much of the history, which takes long.

        Raises:
            TimeoutError: it, or an earlier report, takes longer than `REPORT_WITHIN_S`.
        """
        self._check_connected()
        async with asyncio.timeout(REPORT_WITHIN_S):
            return await self._run(self._reports, lambda: function(self._queue))

    async def recent_use(self) -> RecentUse:
        """Return use and waits of the last week, computed once a minute.

        Raises:
            TimeoutError: it, or an earlier report, takes too long.
        """
        async with self._adding_up:
            now_s = self._clock.now_s()
            if self._lately is None or abs(now_s - self._lately.at_s) >= WEEK_SUMS_FRESH_S:
                self._lately = await self.report(lambda queue: self._recent_use(queue, now_s))
            return self._lately

    def _recent_use(self, queue: QueueReader, now_s: int) -> RecentUse:
        from_s, known_from_s = now_s - WEEK_S, queue.begins_at_s()
        if known_from_s is not None and self.settings.history_days:
            known_from_s = max(known_from_s, now_s - self.settings.history_days * DAY_S)
        means = {id_: mean_sm_percent(counts) for id_, counts in queue.counts_since(from_s).items()}
        return recent_use(
            queue.spent(from_s, now_s),
            now_s,
            sm_percents={id_: mean for id_, mean in means.items() if mean is not None},
            waits=queue.waits_without_start(from_s),
            known_from_s=known_from_s,
        )

    async def change(self, change: Callable[[Store, int], R]) -> R:
        """Write an administrator's change: ``change`` gets the store and the time."""
        found = await self._read(self._write, change)
        self._fresh_until = 0.0
        self._changes_made += 1
        return found

    async def private_images(self) -> tuple[PrivateImage, ...]:
        return await self._read(PrivateImages(self._store).all)

    async def change_private_images(self, change: Callable[[PrivateImages, int], R]) -> R:
        """Write a change of private images; errors of ``change`` are raised here."""
        found = await self._read(self._write, lambda store, now_s: change(PrivateImages(store), now_s))
        # The caller sees it at once.
        await self._read(self.images.refresh)
        return found

    def offer(self, world: World, user: str, hub_groups: tuple[str, ...], groups: tuple[str, ...]) -> Offer:
        """Return what this user may choose; raises `RequestRefused` if that is nothing."""
        return make_offer(
            self.settings,
            world.snapshot.nodes,
            self.catalogue.startable_by(user, hub_groups),
            groups,
            user=user,
            hub_groups=hub_groups,
            parking=frozenset(c.node_id for c in world.isolation if not c.unparkable),
            available=world.available,
        )

    def cpu_and_memory_of(self, world: World) -> Callable[[str, int], tuple[int, int]]:
        """Return the function from an amount of a group's GPUs to its CPU and memory, as on the launch form."""
        offers = {group: self._any_offer(world.snapshot, group) for group in world.groups}
        return lambda group, milli: offers[group].beside(milli, group)

    def shown_images(
        self, world: World, user: str, hub_groups: tuple[str, ...], groups: tuple[str, ...]
    ) -> tuple[Image, ...]:
        """Return the images shown to this user of these resource ``groups``, without those that can't start."""
        visible, nodes = self.catalogue.visible_to(user, hub_groups), world.snapshot.nodes
        own = [node for node in nodes if node.resource_group in groups]
        able = (i for i in visible if world.available.why_not(i.slug, own) is None)
        return tuple(i for i in able if never_held(i, nodes, self._caps) is None)

    # --- In the worker threads ---

    async def _read(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_connected()
        return await self._in_thread(function, *args, **kwargs)

    def _check_connected(self) -> None:
        """Raise the error that prevents a connection. It is not a failed reading, so it is not cached."""
        if self._not_connected:
            raise StoreUnavailable(self._not_connected)

    async def _in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await self._run(self._pool, lambda: function(*args, **kwargs))
        except TimeoutError:
            raise StoreUnavailable(
                f"the scheduler's database has not answered for {ANSWER_WITHIN_S:.0f} seconds"
            ) from None

    async def _run(self, pool: ThreadPoolExecutor, function: Callable[[], R]) -> R:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function)
        except SQLAlchemyError as e:
            # Errors that the store does not classify, such as a damaged file: the log has the details.
            details = " ".join(str(getattr(e, "orig", None) or e).split())
            log.error("The scheduler's database: %s", details[:300])
            raise StoreUnavailable("the scheduler's database cannot be read") from e

    def _read_state(self) -> World:
        return World(
            self._queue.snapshot(self._clock.now_s()),
            isolation=CHOICES.read(self.settings.data_path()),
            available=self._available(),
        )

    def _available(self) -> Availabilities:
        return AVAILABLE.read(self.settings.data_path()).fresh(self._clock.now_s())

    async def _make_world(self) -> World:
        snapshot = await self._read(self._queue.snapshot, self._clock.now_s())
        # However long a report takes, the database is not away.
        ahead = await self._run(self._pool, lambda: self._queue.outlook(snapshot))
        return await self._read(self._read_world, ahead)

    def _read_world(self, ahead: Outlook) -> World:
        groups, data, now_s = ahead.snapshot.resource_groups, self.settings.data_path(), self._clock.now_s()
        return World(
            ahead.snapshot,
            ahead.forecasts,
            {group: self._largest_now(ahead.snapshot, group) for group in groups},
            CHOICES.read(data),
            self._rules,
            read_pulls(data, now_s=now_s),
            private=PrivateImages(self._store).all(),
            savers=self.savers,
            banner=Banner(self._store).at(now_s),
            meters=self._meters.read(),
            disks=DISK.read(data),
            extension=self.extension,
            gpus=HEALTH.read(data),
            resizes={wish.session_id: wish for wish in Resizes(self._store).of_live()},
            step_milli=self.settings.caps().fgpu_step_milli,
            unblockings=ahead.unblockings,
            wanted=ahead.wanted,
            available=self._available(),
        )

    def _forecast(self, wanted: LaunchRequest, offer: Offer, world: World) -> RequestForecast:
        others = [other.for_server(NO_SERVER) for other in offer.others(wanted)]
        return self._queue.forecast(wanted.for_server(NO_SERVER), wanted.count, world.snapshot, others)

    def _largest_now(self, snapshot: Snapshot, group: str) -> int | None:
        offer = self._any_offer(snapshot, group)
        others = [other.for_server(NO_SERVER) for other in offer.others(offer.default)]
        found = self._queue.largest_now(others, group, snapshot)
        return None if found is None else found.fgpu_milli

    def _any_offer(self, snapshot: Snapshot, group: str) -> Offer:
        nodes = [node for node in snapshot.nodes if node.resource_group == group]
        return make_offer(self.settings, nodes, [ANY_IMAGE], (group,))

    def _extend(self, session_id: int) -> Session | NotExtended:
        for _ in range(WRITE_TRIES - 1):
            with contextlib.suppress(StaleVersion):
                return self._extend_once(session_id)
        return self._extend_once(session_id)

    def _extend_once(self, session_id: int) -> Session | NotExtended:
        snapshot = self._queue.snapshot(self._clock.now_s())
        session = snapshot.session(session_id)
        if session is None:
            raise UnknownSession(f"there is no session {session_id}")
        allowed = extension_of(session, World(snapshot, rules=self._rules, extension=self.extension))
        against = not_extended(session, allowed)
        if against is not None:
            return against
        if self._queue.delays_promised_start(session, allowed.by_s, snapshot):
            return NotExtended.PROMISED
        return self._write(
            lambda store, now_s: store.extend(session_id, allowed.by_s, snapshot.version, now_s=now_s)
        )

    def _write(self, change: Callable[[Store, int], R]) -> R:
        # It has its own connection: all others of this process can only read.
        store = Store(self.settings.database_url())
        store.connect()
        try:
            return change(store, self._clock.now_s())
        finally:
            store.close()

    async def change_images(
        self, change: Callable[[Draft], Update], by: str, *, only_check: bool = False
    ) -> None:
        """Change the catalogue, on top of the last good file, and read it again; or only try whether that is possible."""
        await self._read(self._change_images, change, by, only_check)

    async def write_images(self, by: str, *, without: str = "") -> None:
        """Write the catalogue's changes into its file, or remove one image from that."""
        await self._read(self._write_images, by, without)

    def _write_images(self, by: str, without: str) -> None:
        self._write(lambda store, _: write_to_file(store, self.images.path, by=by, without=without))
        self.images.refresh()

    def _change_images(self, change: Callable[[Draft], Update], by: str, only_check: bool) -> None:
        if not self.images.file.images:
            why = self.images.problem or "it was not read yet"
            raise CatalogueError(f"nothing can be changed before the file was good once: {why}")
        amounts = amounts_that_fit(self._queue.snapshot(self._clock.now_s()).nodes, self._caps)
        file = self.images.file
        self._write(
            lambda store, _: edit_catalogue(
                store, file, change, by=by, amounts=amounts, only_check=only_check
            )
        )
        if not only_check:
            self.images.refresh()

    async def changes(self, after_id: int) -> Changes | None:
        """Return the changes after an event; None if there are too many."""
        return await self._read(self._read_changes, after_id)

    def _read_changes(self, after_id: int) -> Changes | None:
        events = self._queue.events(after_id=after_id, limit=MAX_EVENTS + 1)
        if len(events) > MAX_EVENTS:
            return None
        newest = {e.session_id: e.id for e in events if e.session_id is not None}
        live = {s.id: s for s in self._queue.snapshot(self._clock.now_s()).sessions}
        changed = []
        for session_id, event_id in sorted(newest.items(), key=lambda item: item[1]):
            session = live.get(session_id) or self._queue.session(session_id)
            if session is not None:
                changed.append((event_id, session))
        return Changes(events[-1].id if events else after_id, tuple(changed))
