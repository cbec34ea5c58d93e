"""The measured GPU use of sessions: one row for each session."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Row, select

from fgpu_scheduler.core.records import SessionMeasurements
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.schema import meters as table
from fgpu_scheduler.store.upsert import put

COLUMNS = [c.name for c in table.columns if c.name != "session_id"]


class Meters:
    """The measurements of an installation. Thread-safe."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def save(self, measured: Sequence[SessionMeasurements]) -> None:
        """Write or replace these measurements in one transaction. This changes no version."""
        if measured:
            with self._store.writing_unversioned() as connection:
                put(connection, table, [asdict(one) for one in measured])

    def of(self, session_ids: Collection[int]) -> dict[int, SessionMeasurements]:
        """Return the measurements of these sessions, by id; sessions without any are left out."""
        if not session_ids:
            return {}
        with self._store.reading() as connection:
            chosen = select(table).where(table.c.session_id.in_(sorted(session_ids)))
            return {row.session_id: measured_of(row) for row in connection.execute(chosen)}


def measured_of(row: Row[Any]) -> SessionMeasurements:
    """Return the measurement of a row."""
    return SessionMeasurements(**{name: getattr(row, name) for name in ("session_id", *COLUMNS)})
