"""A queue as another process reads it, from the scheduler's database."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Lock

from fgpu_scheduler.core.extending import delays_promised_start
from fgpu_scheduler.core.forecast import Outlook, outlook
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.model import Request, Session, Snapshot
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.request_forecast import RequestForecast, forecast_request, largest_now
from fgpu_scheduler.store.history import History, spent_between
from fgpu_scheduler.store.store import Store

OUTLOOK_FOR_S = 30
"""How long an outlook serves questions about requests that are not submitted yet."""


class QueueReader:
    """Reads a store, and forecasts by its scheduler's policy.

    Thread-safe; every call blocks and may raise `StoreUnavailable`.
    """

    def __init__(self, store: Store, policy: Policy) -> None:
        self._store = store
        self._policy = policy
        self._newest: Outlook | None = None
        #: A class opens the form at once: one thread makes the outlook, and the others wait for it.
        self._making = Lock()
        #: The store's version, and the experience of each resource group at that version.
        self._experience: tuple[int, dict[str, ForecastHistory]] = -1, {}
        self.connect, self.close = store.connect_readonly, store.close
        #: The current state: see `Store` for each.
        self.version, self.snapshot = store.version, store.snapshot
        self.session, self.held_sessions, self.ended = store.session, store.held_sessions, store.ended
        self.last_event_id, self.events = store.last_event_id, store.events
        #: The past: see `History` for each, and `spent_between`.
        history = History(store)
        self.past, self.history, self.measured_runs = history.one, history.page, history.measured_runs
        self.spent = partial(spent_between, store)
        self.begins_at_s, self.counts_since = history.begins_at_s, history.counts_since
        self.waits_without_start = history.waits_without_start

    def outlook(self, snapshot: Snapshot) -> Outlook:
        """Return a snapshot with the forecast of every pending session. A long queue takes seconds."""
        self._newest = outlook(snapshot, self._policy, self._store.experience)
        return self._newest

    def forecast(
        self, request: Request, count: int, snapshot: Snapshot, others: Sequence[Request]
    ) -> RequestForecast:
        """Return the forecast of ``count`` such sessions if they were submitted now.

        ``others`` are the amounts of fGPU to offer instead, smallest first, each with its own CPU and memory.
        """
        group = request.resource_group
        with self._making:
            ahead = self._newest
            if ahead is None or not _serves(ahead, snapshot, group):
                ahead = self.outlook(snapshot)
        known = self._experience_of(snapshot, group)
        of_group = snapshot.of_group(group)
        return forecast_request(request, count, of_group, self._policy, known, others, ahead)

    def _experience_of(self, snapshot: Snapshot, group: str) -> ForecastHistory:
        """Return a group's experience, read once per version: a form forecasts at every move of a slider."""
        version, found = self._experience
        if version != snapshot.version:
            found = {one: self._store.experience(one) for one in snapshot.resource_groups}
            self._experience = snapshot.version, found
        return found.get(group, ForecastHistory())

    def largest_now(self, others: Sequence[Request], group: str, snapshot: Snapshot) -> Request | None:
        """Return the largest of these requests of a resource group that would start at once, or None."""
        return largest_now(others, 1, snapshot.of_group(group), self._policy)

    def delays_promised_start(self, session: Session, by_s: int, snapshot: Snapshot) -> bool:
        """Return whether a session would start later than promised if this one's time limit were ``by_s`` longer."""
        return delays_promised_start(snapshot, session, by_s, self._policy)


def _serves(ahead: Outlook, snapshot: Snapshot, group: str) -> bool:
    """Return whether an outlook is recent enough; one of an empty queue serves only until something changes."""
    same = ahead.snapshot.version == snapshot.version
    is_recent = abs(snapshot.now_s - ahead.snapshot.now_s) <= OUTLOOK_FOR_S
    return is_recent and (same or bool(ahead.futures.get(group)))
