"""The message of an administrator to the owner of a session that they end.

JupyterHub's API ends a server without a message. So the message is stored before the Hub is asked, and becomes the
session's message if the session then ends by a user's wish.
"""

from __future__ import annotations

from sqlalchemy import delete

from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.schema import end_messages as table
from fgpu_scheduler.store.upsert import put

MOST_MESSAGE_TEXT = 500


class EndMessages:
    """The end messages of an installation. Thread-safe."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def put(self, session_id: int, message: str, *, now_s: int) -> None:
        """Store the message for an end by a user's wish within `transaction.HEEDED_S`."""
        with self._store.writing_unversioned() as connection:
            put(connection, table, [{"session_id": session_id, "message": message, "said_at_s": now_s}])

    def drop(self, session_id: int) -> None:
        """Delete the message, because the session was not ended."""
        with self._store.writing_unversioned() as connection:
            connection.execute(delete(table).where(table.c.session_id == session_id))
