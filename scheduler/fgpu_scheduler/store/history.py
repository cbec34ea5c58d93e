"""What has ended, and what was measured of it: newest first, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, exists, select

from fgpu_scheduler.core.model import Session
from fgpu_scheduler.core.records import Past
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.meters import measured_of
from fgpu_scheduler.store.schema import meters, sessions
from fgpu_scheduler.store.statements import ONE_SESSION, Sessions

NEWEST = 2**62
"""A bound above every id."""


class History:
    """What has ended in one store. Safe to use from several threads; every method raises `StoreUnavailable`."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def page(self, *, user: str | None, before_id: int | None, limit: int) -> tuple[Past, ...]:
        """Return the newest sessions that have ended, of one user or of all, with ids below ``before_id``."""
        values = {"before": NEWEST if before_id is None else before_id, "limit": limit}
        with self._store.reading() as connection:
            if user is None:
                return _with_measured(connection, _ENDED.read(connection, **values))
            return _with_measured(connection, _ENDED_OF.read(connection, user=user, **values))

    def one(self, session_id: int) -> Past | None:
        """Return one session, live or ended."""
        with self._store.reading() as connection:
            found = _with_measured(connection, ONE_SESSION.read(connection, session_id=session_id))
        return next(iter(found), None)

    def measured_runs(self, user: str, *, limit: int) -> tuple[Past, ...]:
        """Return a user's newest sessions that have ended and of which something was measured."""
        with self._store.reading() as connection:
            return _with_measured(connection, _MEASURED_OF.read(connection, user=user, limit=limit))


def _with_measured(connection: Connection, found: Sequence[Session]) -> tuple[Past, ...]:
    if not found:
        return ()
    chosen = select(meters).where(meters.c.session_id.in_([s.id for s in found]))
    measured = {row.session_id: measured_of(row) for row in connection.execute(chosen)}
    return tuple(Past(session, measured.get(session.id)) for session in found)


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
        # Asked of each of theirs: a list of everybody's would be made anew each time.
        exists().where(meters.c.session_id == sessions.c.id, meters.c.samples > 0),
    )
)
