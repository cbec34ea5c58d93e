"""A store that is checked after every write, on a database that answers late, not at all, or loses answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from sqlalchemy import Connection

from fgpu_scheduler.core.model import Request, Session, Snapshot
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.reclaim import Reclaim
from fgpu_scheduler.core.usage import HalfLife
from fgpu_scheduler.errors import StaleVersion, StoreUnavailable
from fgpu_scheduler.store.database import Database
from fgpu_scheduler.store.snapshot_cache import ContentsCache
from fgpu_scheduler.store.store import Store
from fgpu_scheduler.store.transaction import Write


class Observer(Protocol):
    """Checks what is written."""

    def wrote(self, store: WatchedStore, submitted: Sequence[Session], *, planned: bool) -> None:
        """Check the store after a write, even if the write may have failed."""
        ...

    def decided(self, snapshot: Snapshot, plan: Plan) -> None:
        """Check a plan for this snapshot before its commit."""
        ...

    def committed(self, decided_on: int, found: int) -> None:
        """Check that a plan made on one version was committed at another."""
        ...

    def refused(self, why: StaleVersion, decided_on: int, found: int) -> None:
        """Check that a plan made on one version was refused at another."""
        ...


Fault = Callable[[], bool]


class WatchedStore(Store):
    """A store on SQLite. ``away`` returns whether the database is down, ``loses`` whether it loses the next answer."""

    def __init__(
        self, url: str, observer: Observer, *, half_life_s: HalfLife, away: Fault, loses: Fault
    ) -> None:
        super().__init__(url, half_life_s=half_life_s)
        self._faulty = self._database = _Faulty(url, away, loses)
        self._observer = observer
        self._submits = self._plans = False

    def forget(self) -> None:
        """Drop the cache, as in a process that has just connected."""
        self._cache = ContentsCache()

    @contextmanager
    def faultless(self) -> Iterator[None]:
        """Make the database answer without faults, for the checks."""
        was, self._faulty.faulty = self._faulty.faulty, False
        try:
            yield
        finally:
            self._faulty.faulty = was

    @contextmanager
    def writing(self, *, now_s: int) -> Iterator[Write]:
        writes: list[Write] = []
        try:
            with super().writing(now_s=now_s) as write:
                yield write
                writes.append(write)
        finally:
            # Also if only the answer was lost.
            if writes and (writes[0].log or writes[0].changed):
                changed = writes[0].changed.values() if self._submits else ()
                new = [s for s in changed if s.id not in writes[0].world.sessions]
                with self.faultless():
                    self._observer.wrote(self, new, planned=self._plans)

    def submit(
        self,
        requests: Sequence[Request],
        *,
        now_s: int,
        max_pending_per_user: int | None = None,
        held: bool = False,
        replacing: int | None = None,
        place: Callable[[Snapshot], Plan] | None = None,
    ) -> tuple[Session, ...]:
        def placed(snapshot: Snapshot) -> Plan:
            assert place is not None
            decided = place(snapshot)
            with self.faultless():
                self._observer.decided(snapshot, decided)
            return decided

        self._submits = True
        try:
            return super().submit(
                requests,
                now_s=now_s,
                max_pending_per_user=max_pending_per_user,
                held=held,
                replacing=replacing,
                place=None if place is None else placed,
            )
        finally:
            self._submits = False

    def commit(self, plan: Plan, *, now_s: int) -> tuple[Session, ...]:
        with self.faultless():
            found = self.version()
            if found == plan.version:
                self._observer.decided(self.snapshot(now_s), plan)
        self._plans = True
        try:
            placed = super().commit(plan, now_s=now_s)
        except StaleVersion as e:
            self._observer.refused(e, plan.version, found)
            raise
        finally:
            self._plans = False
        self._observer.committed(plan.version, found)
        return placed

    def reclaim(self, decisions: Sequence[Reclaim], version: int, *, now_s: int) -> tuple[Session, ...]:
        with self.faultless():
            found = self.version()
        try:
            changed = super().reclaim(decisions, version, now_s=now_s)
        except StaleVersion as e:
            self._observer.refused(e, version, found)
            raise
        self._observer.committed(version, found)
        return changed


class _Faulty(Database):
    """A database with faults."""

    def __init__(self, url: str, away: Fault, loses: Fault) -> None:
        super().__init__(url)
        self._away = away
        self._loses = loses
        self.faulty = True

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        self._break(self._away)
        with super().reading() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        self._break(self._away)
        with super().writing() as connection:
            yield connection
        self._break(self._loses)

    def _break(self, fault: Fault) -> None:
        if self.faulty and fault():
            raise StoreUnavailable("the database does not answer")
