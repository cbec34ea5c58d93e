"""A write transaction of the store: the next version, what changed, and the log of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection

from fgpu_scheduler.core.model import Session, SessionState, Usage
from fgpu_scheduler.core.usage import HalfLife
from fgpu_scheduler.errors import UnknownSession
from fgpu_scheduler.store.database import Database
from fgpu_scheduler.store.rows import Used, life_values
from fgpu_scheduler.store.snapshot_cache import Seen
from fgpu_scheduler.store.statements import LOG, NEXT_VERSION, ONE_SESSION, SAVE_SESSION


class Kept:
    """The newest version that this process has seen."""

    def __init__(self) -> None:
        self.seen: Seen | None = None
        self._usage: tuple[Used, int, tuple[Usage, ...]] = ({}, 0, ())

    def put(self, seen: Seen) -> None:
        """Keep this unless a newer one is kept; of two threads either may come last."""
        if self.seen is None or self.seen.version < seen.version:
            self.seen = seen

    def at(self, connection: Connection, version: int) -> Seen:
        """Return what is there at a version, which the transaction sees."""
        seen = self.seen
        if seen is None or seen.version != version:
            seen = Seen.read(connection, version)
            self.put(seen)
        return seen

    def usage(self, seen: Seen, now_s: int, half_life_s: HalfLife) -> tuple[Usage, ...]:
        """Return what was used as it has decayed by now; within one second it is counted once."""
        used, at_s, usage = self._usage
        if used is not seen.used or at_s != now_s:
            usage = seen.usage(now_s, half_life_s)
            self._usage = seen.used, now_s, usage
        return usage


@contextmanager
def writing(database: Database, kept: Kept, *, now_s: int) -> Iterator[Write]:
    """Run a write transaction; one that changed nothing is rolled back, its version too."""
    with database.writing() as connection:
        write = Write(connection, kept, now_s)
        yield write
        if write.log:
            connection.execute(LOG, write.log)
        if not (write.log or write.changed):
            connection.rollback()
            return
        then = write.then()
    if then is not None:
        kept.put(then)


class Write:
    """A write transaction: what the store held before, what has changed since, and what is to be logged."""

    def __init__(self, connection: Connection, kept: Kept, now_s: int) -> None:
        self.connection = connection
        self.now_s = now_s
        self.version_before = connection.execute(NEXT_VERSION).scalar_one() - 1
        # Before anything else is written.
        self.world = kept.at(connection, self.version_before)
        self.log: list[dict[str, Any]] = []
        self.changed: dict[int, Session] = {}
        self.used: dict[tuple[str, str], tuple[float, int]] = {}
        self._only_sessions = True

    def then(self) -> Seen | None:
        """Return what the store holds once this is committed, or None where it has to be read."""
        return self.world.then(self.changed, self.used, self.connection) if self._only_sessions else None

    def one(self, session_id: int) -> Session:
        """Return the session with this id.

        Raises:
            UnknownSession: there is none.
        """
        live = self.world.sessions.get(session_id)
        if live is not None:
            return live
        found = ONE_SESSION.read(self.connection, session_id=session_id)
        if not found:
            raise UnknownSession(f"there is no session {session_id}")
        return found[0]

    def event(
        self,
        kind: str,
        session: Session | None = None,
        *,
        was: SessionState | None = None,
        reason: str | None = None,
    ) -> None:
        """Log a change; with ``was`` it is one of the session's state, to the one it has now."""
        if session is None:
            # Nodes, or quotas.
            self._only_sessions = False
        self.log.append(
            {
                "at_s": self.now_s,
                "session_id": session.id if session else None,
                "kind": kind,
                "from_state": was.value if was else None,
                "to_state": session.state.value if session and (was or kind == "submitted") else None,
                "reason": reason,
                "user_name": session.request.user if session else None,
            }
        )

    def save(self, changed: Sequence[Session]) -> None:
        """Write the columns that change in the life of a session. The shares are the caller's."""
        rows = [{"session_id": session.id, **life_values(session)} for session in changed]
        if rows:
            self.connection.execute(SAVE_SESSION, rows)
        self.changed.update((session.id, session) for session in changed)
