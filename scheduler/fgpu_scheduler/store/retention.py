"""Deletion of old sessions and events, in small batches, so that other writers hardly wait.

These are kept: sessions that live ones refer to, and the newest runs of each group, from which forecasts take the lengths
of runs. Usage is summed in its own table.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, and_, delete, func, not_, or_, select

from fgpu_scheduler.core.request_counts import counted_ids
from fgpu_scheduler.store.schema import (
    end_messages,
    events,
    first_forecasts,
    is_live,
    meters,
    resizes,
    sessions,
    shares,
)
from fgpu_scheduler.store.transaction import StorePart

BATCH = 200
"""How many rows one transaction deletes."""
TYPICAL_RUNS = 50
"""How many of the newest runs of each resource group are kept for `Store.experience`."""
KEPT_EVENTS = 2000
"""How many of the newest events are kept at any age: more than a client that missed some can ask for."""


class Retention(StorePart):
    """Deletes old sessions and events."""

    def delete_old_sessions(self, before_s: int, *, now_s: int, limit: int = BATCH) -> int:
        """Delete at most ``limit`` sessions that ended before ``before_s``, with their shares and receipts.

        Return how many were deleted.
        """
        with self._store.reading() as connection:
            chosen = select(sessions.c.id).where(_deletable(connection, before_s))
            ids = connection.execute(chosen.order_by(sessions.c.ended_at_s).limit(limit)).scalars().all()
            counted = counted_ids(connection.execute(select(func.max(sessions.c.id))).scalar_one() or 0)
        # The chosen sessions ended long ago, so no new session refers to them by now.
        if any(session_id in counted for session_id in ids):
            # With a new version: these sessions are in the counts of requested amounts, and all processes must count
            # the same.
            with self._store.writing(now_s=now_s) as write:
                _delete_rows(write.connection, ids)
                write.event("history", reason=f"forgot {len(ids)} sessions")
        elif ids:
            # Without one: it would make every process read and plan again, for data that plans do not use.
            with self._store.writing_unversioned() as connection:
                _delete_rows(connection, ids)
        return len(ids)

    def delete_old_events(self, before_s: int, *, limit: int = BATCH) -> int:
        """Delete at most ``limit`` events before ``before_s``, except those of live sessions; return how many."""
        with self._store.reading() as connection:
            newest = connection.execute(select(func.max(events.c.id))).scalar_one() or 0
            live = select(sessions.c.id).where(is_live)
            chosen = (
                select(events.c.id)
                .where(events.c.id <= newest - KEPT_EVENTS, events.c.at_s < before_s)
                .where(or_(events.c.session_id.is_(None), events.c.session_id.not_in(live)))
                .order_by(events.c.id)
                .limit(limit)
            )
            ids = connection.execute(chosen).scalars().all()
        if ids:
            with self._store.writing_unversioned() as connection:
                connection.execute(delete(events).where(events.c.id.in_(ids)))
        return len(ids)


def _delete_rows(connection: Connection, ids: Sequence[int]) -> None:
    for table in (meters, shares, end_messages, first_forecasts, resizes):
        connection.execute(delete(table).where(table.c.session_id.in_(ids)))
    connection.execute(delete(sessions).where(sessions.c.id.in_(ids)))


def _deletable(connection: Connection, before_s: int) -> ColumnElement[bool]:
    """Return the condition for old sessions that nothing needs."""
    old = and_(sessions.c.ended_at_s.is_not(None), sessions.c.ended_at_s < before_s)
    named = {
        session_id
        for row in connection.execute(select(sessions.c.replaces, sessions.c.place_of).where(is_live))
        for session_id in row
        if session_id is not None
    }
    # Keep the newest session, so that no database gives its id again.
    newest = select(func.max(sessions.c.id)).scalar_subquery()
    found = [old, sessions.c.id < newest, sessions.c.id.not_in(sorted(named))]
    for (group,) in connection.execute(select(sessions.c.resource_group).where(old).distinct()):
        found.append(not_(_is_typical(connection, group)))
    return and_(*found)


def _is_typical(connection: Connection, group: str) -> ColumnElement[bool]:
    ran = and_(sessions.c.resource_group == group, sessions.c.started_at_s.is_not(None))
    oldest = (
        select(sessions.c.ended_at_s)
        .where(ran, sessions.c.ended_at_s.is_not(None))
        .order_by(sessions.c.ended_at_s.desc())
        .offset(TYPICAL_RUNS - 1)
        .limit(1)
    )
    at_s = connection.execute(oldest).scalar_one_or_none()
    return and_(ran, sessions.c.ended_at_s >= (0 if at_s is None else at_s))
