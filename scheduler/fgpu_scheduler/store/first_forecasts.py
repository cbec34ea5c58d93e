"""The first forecast of each session's start, compared with the start to correct later forecasts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Select, bindparam, insert, or_, select

from fgpu_scheduler.core.forecast import Forecast
from fgpu_scheduler.core.forecast_accuracy import (
    NEWEST_OUTCOMES,
    ForecastHistory,
    ForecastOutcome,
    StartRange,
    calibrated,
)
from fgpu_scheduler.core.run_lengths import LEAST, RunLengths
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.schema import foretold as table
from fgpu_scheduler.store.schema import sessions
from fgpu_scheduler.store.statements import read_all_runs, read_runs

_told = (
    select(table, sessions.c.scheduled_at_s, sessions.c.ended_at_s)
    .join(sessions, sessions.c.id == table.c.session_id)
    .where(or_(sessions.c.scheduled_at_s.is_not(None), sessions.c.ended_at_s.is_not(None)))
    .order_by(table.c.session_id.desc())
    .limit(bindparam("limit"))
)
_TOLD_OF = _told.where(sessions.c.resource_group == bindparam("resource_group"))


class FirstForecasts:
    """The stored first forecasts of an installation. Thread-safe."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def record(self, forecasts: Iterable[Forecast], *, now_s: int) -> None:
        """Store the forecast of each session that has none stored. This changes no version."""
        found = {f.session_id: _row(f, now_s) for f in forecasts if f.shown is not None}
        if not found:
            return
        with self._store.writing_unversioned() as connection:
            chosen = select(table.c.session_id).where(table.c.session_id.in_(sorted(found)))
            there = set(connection.execute(chosen).scalars())
            new = [row for i, row in sorted(found.items()) if i not in there]
            if new:
                connection.execute(insert(table), new)

    def newest(self, limit: int = NEWEST_OUTCOMES) -> tuple[ForecastOutcome, ...]:
        """Return the first forecasts of the newest sessions that have started or left the queue, of all groups."""
        with self._store.reading() as connection:
            return _all_told(connection, _told, limit=limit)


def read_experience(connection: Connection, resource_group: str) -> ForecastHistory:
    """Return the run lengths and forecast errors of a group; lengths of all groups if this one has too few runs."""
    runs = read_runs(connection, [resource_group]).get(resource_group, ())
    lengths = RunLengths(resource_group, runs if len(runs) >= LEAST else read_all_runs(connection))
    told = _all_told(connection, _TOLD_OF, resource_group=resource_group, limit=NEWEST_OUTCOMES)
    return ForecastHistory(lengths, calibrated(told))


def _row(found: Forecast, now_s: int) -> dict[str, int]:
    told, planned = found.shown, found.planned or found.shown
    assert told is not None
    assert planned is not None
    before = {f"planned_{name}": at_s for name, at_s in asdict(planned).items()}
    return {"session_id": found.session_id, "told_at_s": now_s, **asdict(told), **before}


def _all_told(connection: Connection, chosen: Select[Any], **values: object) -> tuple[ForecastOutcome, ...]:
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
