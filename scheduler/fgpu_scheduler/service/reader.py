"""The scheduler's database as another process reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fgpu_scheduler.core.extending import delays_promised_start
from fgpu_scheduler.core.forecast import Outlook, outlook
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.model import Request, Session, Snapshot
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.records import Event, HeldShares, PastSession
from fgpu_scheduler.core.request_forecast import RequestForecast, forecast_request, largest_now
from fgpu_scheduler.queue import QueueReader
from fgpu_scheduler.store.history import History, spent_between
from fgpu_scheduler.store.store import Store

OUTLOOK_FOR_S = 30
"""How long an outlook serves questions about requests that are not submitted yet."""


class StoreReader(QueueReader):
    """Reads a store and forecasts by its scheduler's policy. `QueueReader` documents the methods."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self._store = store
        self._policy = policy
        self._history = History(store)
        self._newest: Outlook | None = None
        self._experience: tuple[int, dict[str, ForecastHistory]] = -1, {}

    def connect(self) -> None:
        self._store.connect_readonly()

    def close(self) -> None:
        self._store.close()

    def version(self) -> int:
        return self._store.version()

    def snapshot(self, now_s: int) -> Snapshot:
        return self._store.snapshot(now_s)

    def outlook(self, snapshot: Snapshot) -> Outlook:
        self._newest = outlook(snapshot, self._policy, self._store.experience)
        return self._newest

    def forecast(
        self, request: Request, count: int, snapshot: Snapshot, others: Sequence[Request]
    ) -> RequestForecast:
        group, ahead = request.resource_group, self._newest
        if ahead is not None and not 0 <= snapshot.now_s - ahead.snapshot.now_s <= OUTLOOK_FOR_S:
            ahead = None
        return forecast_request(
            request,
            count,
            snapshot.of_group(group),
            self._policy,
            self._experience_of(snapshot, group),
            others,
            ahead,
        )

    def _experience_of(self, snapshot: Snapshot, group: str) -> ForecastHistory:
        """Return a group's experience, read once per version: a form forecasts at every move of a slider."""
        version, found = self._experience
        if version != snapshot.version:
            found = {one: self._store.experience(one) for one in snapshot.resource_groups}
            self._experience = snapshot.version, found
        return found.get(group, ForecastHistory())

    def largest_now(self, others: Sequence[Request], group: str, snapshot: Snapshot) -> Request | None:
        return largest_now(others, 1, snapshot.of_group(group), self._policy)

    def delays_promised_start(self, session: Session, by_s: int, snapshot: Snapshot) -> bool:
        return delays_promised_start(snapshot, session, by_s, self._policy)

    def session(self, session_id: int) -> Session | None:
        return self._store.session(session_id)

    def held_sessions(self) -> tuple[Session, ...]:
        return self._store.held_sessions()

    def ended(self, *, user: str | None, limit: int) -> tuple[Session, ...]:
        return self._store.ended(user=user, limit=limit)

    def last_event_id(self) -> int:
        return self._store.last_event_id()

    def events(self, *, after_id: int = 0, limit: int = 200) -> tuple[Event, ...]:
        return self._store.events(after_id=after_id, limit=limit)

    def past(self, session_id: int) -> PastSession | None:
        return self._history.one(session_id)

    def history(self, *, user: str | None, before_id: int | None, limit: int) -> tuple[PastSession, ...]:
        return self._history.page(user=user, before_id=before_id, limit=limit)

    def measured_runs(self, user: str, *, limit: int) -> tuple[PastSession, ...]:
        return self._history.measured_runs(user, limit=limit)

    def spent(self, from_s: int, to_s: int) -> Iterator[HeldShares]:
        return spent_between(self._store, from_s, to_s)
