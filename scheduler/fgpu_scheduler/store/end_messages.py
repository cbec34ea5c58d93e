"""What the owner of a session is told when an administrator ends it: written before the Hub is asked to end it.

The Hub ends a server without a word. So the words wait here, and become the message of an end by a user's wish.
"""

from __future__ import annotations

from sqlalchemy import delete

from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.schema import end_messages as table
from fgpu_scheduler.store.upsert import put

MOST_MESSAGE_TEXT = 500


class EndMessages:
    """The messages of one installation. Thread-safe, as its store is."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def put(self, session_id: int, message: str, *, now_s: int) -> None:
        """Keep what is said if this session is ended by a user's wish soon: see `transaction.HEEDED_S`."""
        with self._store.writing_unversioned() as connection:
            put(connection, table, [{"session_id": session_id, "message": message, "said_at_s": now_s}])

    def drop(self, session_id: int) -> None:
        """Forget it: the session was not ended."""
        with self._store.writing_unversioned() as connection:
            connection.execute(delete(table).where(table.c.session_id == session_id))
