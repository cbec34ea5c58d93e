"""What the owner of a session is told when an administrator ends it: written before the Hub is asked to end it.

The Hub ends a server without a word. So the words wait here, and become the message of an end by a user's wish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Connection, delete, select

from fgpu_scheduler.store.schema import end_messages as table
from fgpu_scheduler.store.upsert import put

if TYPE_CHECKING:
    from fgpu_scheduler.store.store import Store

MOST_TEXT = 500
HEEDED_S = 180
"""So long the Hub may take to end a server. Words that were left behind say nothing of a later end."""


class EndMessages:
    """The messages of one installation. Thread-safe, as its store is."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, session_id: int, message: str, *, now_s: int) -> None:
        """Keep what is said if this session is ended by a user's wish within `HEEDED_S` seconds.

        Raises:
            StoreUnavailable: the store cannot be written.
        """
        with self._store.writing_beside() as connection:
            put(connection, table, [{"session_id": session_id, "message": message, "said_at_s": now_s}])

    def drop(self, session_id: int) -> None:
        """Forget it: the session was not ended.

        Raises:
            StoreUnavailable: the store cannot be written.
        """
        with self._store.writing_beside() as connection:
            connection.execute(delete(table).where(table.c.session_id == session_id))


def take(connection: Connection, session_id: int, *, now_s: int) -> str | None:
    """Return what is said of a session that ends now, or None, and forget it."""
    own = table.c.session_id == session_id
    found = connection.execute(select(table.c.message, table.c.said_at_s).where(own)).one_or_none()
    if found is None:
        return None
    connection.execute(delete(table).where(own))
    return str(found.message) if now_s - found.said_at_s <= HEEDED_S else None
