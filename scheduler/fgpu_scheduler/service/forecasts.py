"""The scheduler's forecasts: one computation in its own thread, shared by all callers."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fgpu_scheduler.core.forecast import Outlook, outlook
from fgpu_scheduler.core.model import Snapshot
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.errors import StoreUnavailable
from fgpu_scheduler.ports import Clock
from fgpu_scheduler.service.store_thread import StoreThread
from fgpu_scheduler.store.history import FirstForecasts
from fgpu_scheduler.store.store import Store

log = logging.getLogger("fgpu.scheduler")

FORECAST_FOR_S = 30
"""How long a forecast may be used while nothing changes; expected ends move with the clock."""
QUICK_FORECAST_S = 0.25
"""A forecast that takes longer than this is used for `FORECAST_REST` times as long as it took, even after changes."""
FORECAST_EVERY_S = 60.0
"""How often a forecast is made even if no caller asks for one."""
SWITCH_S = 0.0005
"""How long a thread of this process keeps the interpreter while others want it: a small write waits a few times for a
forecast's thread."""
FORECAST_REST = 2
"""Forecasting ten thousand sessions takes seconds, and there something always changes. The pause leaves time for the rest
of this process."""


class Forecasts:
    """Makes and caches the forecasts; `Queue.outlook` documents them."""

    def __init__(
        self, store: Store, thread: StoreThread, policy: Policy, clock: Clock, took: Callable[[float], None]
    ) -> None:
        self._store = store
        self._call = thread.call
        self._policy = policy
        self._clock = clock
        self._took = took
        #: The last forecast, and whether the store had changed since when it was last returned.
        self._outlook: Outlook | None = None
        self._is_behind = False
        #: The forecast in progress, which all callers await.
        self._running: asyncio.Future[Outlook] | None = None
        #: The loop's time before which no other forecast begins.
        self._not_before_s = 0.0
        self._first_forecasts = FirstForecasts(store)
        #: Pending sessions with a stored first forecast.
        self._recorded: set[int] = set()
        # Its own thread, so that no write waits for a forecast. Not a process: pickling the snapshot would take as long
        # as the forecast.
        sys.setswitchinterval(SWITCH_S)
        self._forecaster = ThreadPoolExecutor(1, thread_name_prefix="fgpu-forecast")

    async def now(self) -> Outlook:
        """Return a forecast of the store's current version, at most `FORECAST_FOR_S` old.

        If forecasting takes long, it may be of an older version: see `FORECAST_REST`.
        """
        version = await self._call(self._store.version)
        while self._outlook is None or self._is_older(self._outlook.snapshot, version):
            task = self._running
            # A finished task was too old. Awaiting it again would not wait, and this loop would never yield.
            if task is None or task.done():
                task = self._running = asyncio.ensure_future(self._forecast())
                task.add_done_callback(self._forecast_done)
            self._outlook = await asyncio.shield(task)
        self._is_behind = self._outlook.snapshot.version < version
        return self._outlook

    def behind_s(self) -> int:
        """Return the age of the last returned forecast in seconds; 0 if nothing had changed since it was made."""
        if self._outlook is None or not self._is_behind:
            return 0
        return max(0, self._clock.now_s() - self._outlook.snapshot.now_s)

    async def forecast_regularly(self) -> None:
        """Make forecasts even if no caller asks, so that each session has a first forecast to compare with its start."""
        version = -1
        while True:
            await asyncio.sleep(FORECAST_EVERY_S)
            try:
                if await self._call(self._store.version) != version:
                    version = (await self.now()).snapshot.version
            except StoreUnavailable as e:
                log.debug("No forecast now: %s", e)

    def stop(self) -> None:
        """Finish the forecast in progress, and begin no other."""
        self._forecaster.shutdown(wait=True)

    def _is_older(self, snapshot: Snapshot, version: int) -> bool:
        if asyncio.get_running_loop().time() < self._not_before_s:
            return False
        return snapshot.version < version or not 0 <= self._clock.now_s() - snapshot.now_s < FORECAST_FOR_S

    async def _forecast(self) -> Outlook:
        snapshot = await self._call(self._store.snapshot, self._clock.now_s())
        known = {group: await self._call(self._store.experience, group) for group in snapshot.resource_groups}
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await loop.run_in_executor(
            self._forecaster, outlook, snapshot, self._policy, known.__getitem__
        )
        took_s = loop.time() - began
        self._took(took_s)
        if took_s > QUICK_FORECAST_S:
            self._not_before_s = loop.time() + FORECAST_REST * took_s
        await self._record_first(found)
        return found

    async def _record_first(self, ahead: Outlook) -> None:
        """Store the first forecast of each pending session, to compare it with the start later."""
        waiting = {f.session_id for f in ahead.forecasts.values() if f.position}
        new = [ahead.forecasts[i] for i in sorted(waiting - self._recorded)]
        self._recorded &= waiting
        try:
            await self._call(self._first_forecasts.record, new, now_s=ahead.snapshot.now_s)
        except StoreUnavailable as e:
            # The forecast itself matters more than its later comparison.
            log.debug("The first forecasts of %d sessions are not stored: %s", len(new), e)
        else:
            self._recorded |= {f.session_id for f in new if f.shown is not None}

    def _forecast_done(self, task: asyncio.Future[Outlook]) -> None:
        # If every caller was cancelled, none reads the exception: read it, so that asyncio does not report it.
        if self._running is task:
            self._running = None
        if not task.cancelled():
            task.exception()
