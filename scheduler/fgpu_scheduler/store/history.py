"""Past sessions: their measurements, what they held in a period, and how they compare with their first forecasts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Select, bindparam, exists, func, insert, or_, select

from fgpu_scheduler.core.forecast import Forecast
from fgpu_scheduler.core.forecast_accuracy import (
    NEWEST_OUTCOMES,
    ForecastHistory,
    ForecastOutcome,
    StartRange,
    calibrated,
)
from fgpu_scheduler.core.model import Session
from fgpu_scheduler.core.records import HeldShares, PastSession, SessionMeasurements
from fgpu_scheduler.core.run_lengths import LEAST, RunLengths
from fgpu_scheduler.core.shares import gpu_millionths
from fgpu_scheduler.store.rows import sizes_of, texts_of
from fgpu_scheduler.store.schema import devices, first_forecasts, meters, sessions, shares
from fgpu_scheduler.store.statements import (
    ENDED_BY_ID,
    ONE_SESSION,
    SessionQuery,
    put,
    read_all_runs,
    read_runs,
)
from fgpu_scheduler.store.transaction import StoreConnection, StorePart

NEWEST = 2**62
"""A number above every id."""
AT_ONCE = 1000
"""How many rows of `spent_between` are in memory at a time: a year may have hundreds of thousands."""

# --- Measurements ---


class Meters(StorePart):
    """The measured GPU use of sessions: one row for each session."""

    def save(self, measured: Sequence[SessionMeasurements]) -> None:
        """Write or replace these measurements in one transaction. This changes no version."""
        if measured:
            with self._store.writing_unversioned() as connection:
                put(connection, meters, [asdict(one) for one in measured])

    def of(self, session_ids: Collection[int]) -> dict[int, SessionMeasurements]:
        """Return the measurements of these sessions, by id; sessions without any are left out."""
        with self._store.reading() as connection:
            return _measured(connection, session_ids)


def _measured(connection: Connection, session_ids: Collection[int]) -> dict[int, SessionMeasurements]:
    rows = connection.execute(select(meters).where(meters.c.session_id.in_(sorted(session_ids))))
    return {row.session_id: SessionMeasurements(**row._mapping) for row in rows}


# --- Ended sessions ---


class History(StorePart):
    """Past sessions with their measurements."""

    def page(self, *, user: str | None, before_id: int | None, limit: int) -> tuple[PastSession, ...]:
        """Return the newest ended sessions with ids below ``before_id``, of one user or of all."""
        values: dict[str, Any] = {"before": NEWEST if before_id is None else before_id, "limit": limit}
        if user is not None:
            values["user"] = user
        return self._read(_ENDED if user is None else _ENDED_OF, **values)

    def one(self, session_id: int) -> PastSession | None:
        """Return one session, live or ended."""
        return next(iter(self._read(ONE_SESSION, session_id=session_id)), None)

    def measured_runs(self, user: str, *, limit: int) -> tuple[PastSession, ...]:
        """Return a user's newest ended sessions that were measured."""
        return self._read(_MEASURED_OF, user=user, limit=limit)

    def begins_at_s(self) -> int | None:
        """Return when the oldest known session was submitted; None without sessions."""
        with self._store.reading() as connection:
            return connection.execute(
                select(sessions.c.submitted_at_s).order_by(sessions.c.id).limit(1)
            ).scalar()

    def waits_without_start(self, from_s: int) -> tuple[tuple[int, int | None], ...]:
        """Return begin and end (None: it still waits) of each wait after ``from_s`` that no placement has ended."""
        since_s, until_s = sessions.c.queued_at_s, sessions.c.ended_at_s
        chosen = select(func.coalesce(since_s, sessions.c.submitted_at_s), until_s).where(
            sessions.c.scheduled_at_s.is_(None), or_(until_s.is_(None), until_s > from_s)
        )
        with self._store.reading() as connection:
            return tuple((begin_s, end_s) for begin_s, end_s in connection.execute(chosen))

    def counts_since(self, from_s: int) -> dict[int, str]:
        """Return the counts in the measurements of each session that has not ended before ``from_s``, by id."""
        until_s = sessions.c.ended_at_s
        chosen = (
            select(meters.c.session_id, meters.c.counts)
            .join(sessions, sessions.c.id == meters.c.session_id)
            .where(or_(until_s.is_(None), until_s > from_s))
        )
        with self._store.reading() as connection:
            return {session_id: counts for session_id, counts in connection.execute(chosen)}

    def _read(self, query: SessionQuery, **values: Any) -> tuple[PastSession, ...]:
        with self._store.reading() as connection:
            found: Sequence[Session] = query.read(connection, **values)
            measured = _measured(connection, [session.id for session in found]) if found else {}
        return tuple(PastSession(session, measured.get(session.id)) for session in found)


_of_user: Any = sessions.c.user_name == bindparam("user")
_ENDED = SessionQuery(ENDED_BY_ID.where(sessions.c.id < bindparam("before")))
_ENDED_OF = SessionQuery(ENDED_BY_ID.where(sessions.c.id < bindparam("before"), _of_user))
# Correlated, one lookup for each of the user's sessions: IN would first list the meters of all users.
_has_samples = exists().where(meters.c.session_id == sessions.c.id, meters.c.samples > 0)
_MEASURED_OF = SessionQuery(ENDED_BY_ID.where(_of_user, _has_samples))

# --- First forecasts, compared with the starts to correct later forecasts ---

_OUTCOMES = (
    select(first_forecasts, sessions.c.scheduled_at_s, sessions.c.ended_at_s)
    .join(sessions, sessions.c.id == first_forecasts.c.session_id)
    .where(or_(sessions.c.scheduled_at_s.is_not(None), sessions.c.ended_at_s.is_not(None)))
    .order_by(first_forecasts.c.session_id.desc())
    .limit(bindparam("limit"))
)
_OUTCOMES_OF = _OUTCOMES.where(sessions.c.resource_group == bindparam("resource_group"))


class FirstForecasts(StorePart):
    """The first forecast of each session's start."""

    def record(self, forecasts: Iterable[Forecast], *, now_s: int) -> None:
        """Store the forecast of each session that has none stored. This changes no version."""
        found = {f.session_id: _first_forecast_row(f, now_s) for f in forecasts if f.shown is not None}
        if not found:
            return
        with self._store.writing_unversioned() as connection:
            chosen = select(first_forecasts.c.session_id).where(
                first_forecasts.c.session_id.in_(sorted(found))
            )
            there = set(connection.execute(chosen).scalars())
            new = [row for i, row in sorted(found.items()) if i not in there]
            if new:
                connection.execute(insert(first_forecasts), new)

    def newest(self, limit: int = NEWEST_OUTCOMES) -> tuple[ForecastOutcome, ...]:
        """Return the first forecasts of the newest sessions that have started or left the queue, of all groups."""
        with self._store.reading() as connection:
            return _outcomes(connection, _OUTCOMES, limit=limit)


def read_experience(connection: Connection, resource_group: str) -> ForecastHistory:
    """Return the run lengths and forecast errors of a group; lengths of all groups if this one has too few runs."""
    runs = read_runs(connection, [resource_group]).get(resource_group, ())
    lengths = RunLengths(resource_group, runs if len(runs) >= LEAST else read_all_runs(connection))
    outcomes = _outcomes(connection, _OUTCOMES_OF, resource_group=resource_group, limit=NEWEST_OUTCOMES)
    return ForecastHistory(lengths, calibrated(outcomes))


def _first_forecast_row(found: Forecast, now_s: int) -> dict[str, int]:
    shown, planned = found.shown, found.planned or found.shown
    assert shown is not None
    assert planned is not None
    before = {f"planned_{name}": at_s for name, at_s in asdict(planned).items()}
    return {"session_id": found.session_id, "told_at_s": now_s, **asdict(shown), **before}


def _outcomes(connection: Connection, chosen: Select[Any], **values: object) -> tuple[ForecastOutcome, ...]:
    return tuple(
        ForecastOutcome(
            row.told_at_s,
            StartRange(row.early_at_s, row.middle_at_s, row.late_at_s),
            StartRange(row.planned_early_at_s, row.planned_middle_at_s, row.planned_late_at_s),
            row.ended_at_s if row.scheduled_at_s is None else row.scheduled_at_s,
            row.scheduled_at_s is not None,
        )
        for row in connection.execute(chosen, values)
    )


# --- What sessions held in a period, for reports ---


def spent_between(store: StoreConnection, from_s: int, to_s: int) -> Iterator[HeldShares]:
    """Yield by id every session that held shares at any time in ``from_s <= t < to_s``.

    One read transaction stays open until the last session, so all are of one instant.

    Raises:
        StoreUnavailable: the store cannot be read.
    """
    held = (
        sessions.c.scheduled_at_s < to_s,
        or_(sessions.c.ended_at_s.is_(None), sessions.c.ended_at_s > from_s),
        sessions.c.node_id.is_not(None),
    )
    chosen = (
        select(*_SPENT_COLUMNS, meters.c.gpu_millionths)
        .join_from(sessions, meters, sessions.c.id == meters.c.session_id, isouter=True)
        .where(*held)
        .order_by(sessions.c.id)
    )
    parts = (
        select(shares.c.session_id, shares.c.fgpu_milli, shares.c.compute_percent, devices.c.capacity_milli)
        .join_from(shares, sessions, shares.c.session_id == sessions.c.id)
        .join(devices, devices.c.uuid == shares.c.device_uuid, isouter=True)
        .where(*held)
        .order_by(shares.c.session_id)
    )
    no_parts: tuple[None, Iterator[Any]] = None, iter(())
    with store.reading() as connection:
        connection = connection.execution_options(yield_per=AT_ONCE)
        by_session = groupby(connection.execute(parts), attrgetter("session_id"))
        of_id, own = next(by_session, no_parts)
        for row in connection.execute(chosen):
            if of_id == row.id:
                yield _spent(row, tuple(own))
                of_id, own = next(by_session, no_parts)
            else:
                yield _spent(row, ())


_SPENT_COLUMNS = [
    sessions.c[name]
    for name in (
        *("id", "user_name", "resource_group", "groups", "image", "submitted_at_s", "queued_at_s"),
        *("scheduled_at_s", "started_at_s", "ended_at_s", "sizes", "parked_at_s"),
    )
]


def _spent(row: Any, parts: Sequence[Any]) -> HeldShares:
    if row.parked_at_s is not None:
        parts, millionths = (), 0
    else:
        # As in receipts: what was stored while the session ran or, without that, by the GPUs' present capacity.
        millionths = row.gpu_millionths or sum(
            gpu_millionths(part.fgpu_milli, part.capacity_milli, part.compute_percent) for part in parts
        )
    return HeldShares(
        row.id,
        row.user_name,
        row.resource_group,
        texts_of(row.groups),
        row.image,
        row.submitted_at_s if row.queued_at_s is None else row.queued_at_s,
        row.scheduled_at_s,
        row.started_at_s,
        row.ended_at_s,
        millionths,
        sum(part.fgpu_milli for part in parts),
        sizes_of(row.sizes),
    )
