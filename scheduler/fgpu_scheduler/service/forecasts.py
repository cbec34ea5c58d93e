"""The forecasts as the scheduler tells them: one computation for all who ask, beside everything else."""

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
from fgpu_scheduler.store.first_forecasts import FirstForecasts
from fgpu_scheduler.store.store import Store

log = logging.getLogger("fgpu.scheduler")

FORECAST_FOR_S = 30
"""How long a forecast may be shown while nothing changes; expected ends move with the clock."""
QUICK_FORECAST_S = 0.25
FORETELL_EVERY_S = 60.0
"""So often who waits is told something, though nobody asks."""
SWITCH_S = 0.0005
"""So long one thread of this process computes while others want to: a small write waits a few times for a forecast."""
FORECAST_REST = 2
"""A forecast that took longer than that is shown for so many times as long, whatever changes: one of ten thousand takes
seconds, something always changes there, and everything else in this process runs beside it."""


class Forecasts:
    """Keeps what was forecast last. `Queue.outlook` has the promise."""

    def __init__(
        self, store: Store, thread: StoreThread, policy: Policy, clock: Clock, took: Callable[[float], None]
    ) -> None:
        self._store = store
        self._call = thread.call
        self._policy = policy
        self._clock = clock
        self._took = took
        self._outlook: Outlook | None = None
        self._is_behind = False
        self._looking_ahead: asyncio.Future[Outlook] | None = None
        self._look_ahead_again_at = 0.0
        self._first_forecasts = FirstForecasts(store)
        self._told: set[int] = set()
        """Those who wait of whom it is kept what they were told first."""
        # Its own: who submits, starts or ends does not wait for a forecast. A process would be given the snapshot by
        # pickle, and that takes as long as the forecast itself.
        sys.setswitchinterval(SWITCH_S)
        self._forecaster = ThreadPoolExecutor(1, thread_name_prefix="fgpu-forecast")

    async def now(self) -> Outlook:
        """Return what is expected: not older than the question, in versions of the store.

        In seconds it is at most `FORECAST_FOR_S` older. Where it takes long, see `FORECAST_REST`.
        """
        version = await self._call(self._store.version)
        while self._outlook is None or self._is_older(self._outlook.snapshot, version):
            task = self._looking_ahead
            # One that is done was too old, or nobody has taken it yet. To await it again is not to wait at all.
            if task is None or task.done():
                task = self._looking_ahead = asyncio.ensure_future(self._look_ahead())
                task.add_done_callback(self._looked_ahead)
            self._outlook = await asyncio.shield(task)
        self._is_behind = self._outlook.snapshot.version < version
        return self._outlook

    def behind_s(self) -> int:
        """Return how old what was returned last is; 0 where nothing had changed since."""
        if self._outlook is None or not self._is_behind:
            return 0
        return max(0, self._clock.now_s() - self._outlook.snapshot.now_s)

    async def foretell(self) -> None:
        """Have a start told to each who waits, though nobody asks: what is told is held against it."""
        version = -1
        while True:
            await asyncio.sleep(FORETELL_EVERY_S)
            try:
                if await self._call(self._store.version) != version:
                    version = (await self.now()).snapshot.version
            except StoreUnavailable as e:
                log.debug("No forecast now: %s", e)

    def stop(self) -> None:
        """Finish what has begun, and begin no more."""
        self._forecaster.shutdown(wait=True)

    def _is_older(self, snapshot: Snapshot, version: int) -> bool:
        if asyncio.get_running_loop().time() < self._look_ahead_again_at:
            return False
        return snapshot.version < version or not 0 <= self._clock.now_s() - snapshot.now_s < FORECAST_FOR_S

    async def _look_ahead(self) -> Outlook:
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
            self._look_ahead_again_at = loop.time() + FORECAST_REST * took_s
        await self._note_told(found)
        return found

    async def _note_told(self, ahead: Outlook) -> None:
        """Keep what each who waits is told first, to hold it against the start."""
        waiting = {f.session_id for f in ahead.forecasts.values() if f.position}
        new = [ahead.forecasts[i] for i in sorted(waiting - self._told)]
        self._told &= waiting
        try:
            await self._call(self._first_forecasts.record, new, now_s=ahead.snapshot.now_s)
        except StoreUnavailable as e:
            # What is told is worth more than how good it was.
            log.debug("What was told of %d starts is not kept: %s", len(new), e)
        else:
            self._told |= {f.session_id for f in new if f.told is not None}

    def _looked_ahead(self, task: asyncio.Future[Outlook]) -> None:
        # Whoever waited may have left: one that failed then is nothing to those who ask next.
        if self._looking_ahead is task:
            self._looking_ahead = None
        if not task.cancelled():
            task.exception()
