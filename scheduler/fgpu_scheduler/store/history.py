"""Ended sessions and their measurements: newest first, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, exists, select

from fgpu_scheduler.core.model import Session
from fgpu_scheduler.core.records import PastSession
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.meters import measured_of
from fgpu_scheduler.store.schema import meters, sessions
from fgpu_scheduler.store.statements import ONE_SESSION, Sessions

NEWEST = 2**62
"""A number above every id."""


class History:
    """The history of an installation. Thread-safe; every method may raise `StoreUnavailable`."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def page(self, *, user: str | None, before_id: int | None, limit: int) -> tuple[PastSession, ...]:
        """Return the newest ended sessions with ids below ``before_id``, of one user or of all."""
        values = {"before": NEWEST if before_id is None else before_id, "limit": limit}
        with self._store.reading() as connection:
            if user is None:
                return _with_measured(connection, _ENDED.read(connection, **values))
            return _with_measured(connection, _ENDED_OF.read(connection, user=user, **values))

    def one(self, session_id: int) -> PastSession | None:
        """Return one session, live or ended."""
        with self._store.reading() as connection:
            found = _with_measured(connection, ONE_SESSION.read(connection, session_id=session_id))
        return next(iter(found), None)

    def measured_runs(self, user: str, *, limit: int) -> tuple[PastSession, ...]:
        """Return a user's newest ended sessions that were measured."""
        with self._store.reading() as connection:
            return _with_measured(connection, _MEASURED_OF.read(connection, user=user, limit=limit))


def _with_measured(connection: Connection, found: Sequence[Session]) -> tuple[PastSession, ...]:
    if not found:
        return ()
    chosen = select(meters).where(meters.c.session_id.in_([s.id for s in found]))
    measured = {row.session_id: measured_of(row) for row in connection.execute(chosen)}
    return tuple(PastSession(session, measured.get(session.id)) for session in found)


_newest = (
    select(sessions)
    .where(sessions.c.ended_at_s.is_not(None))
    .order_by(sessions.c.id.desc())
    .limit(bindparam("limit"))
)
_of_user: Any = sessions.c.user_name == bindparam("user")
_ENDED = Sessions(_newest.where(sessions.c.id < bindparam("before")))
_ENDED_OF = Sessions(_newest.where(sessions.c.id < bindparam("before"), _of_user))
_MEASURED_OF = Sessions(
    _newest.where(
        _of_user,
        # Correlated, one lookup for each of the user's sessions: IN would first list the meters of all users.
        exists().where(meters.c.session_id == sessions.c.id, meters.c.samples > 0),
    )
)
