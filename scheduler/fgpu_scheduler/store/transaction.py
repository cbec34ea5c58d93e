"""A write transaction of the store: the next version, the changes, and their events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection

from fgpu_scheduler.core.model import Session, SessionState, Usage
from fgpu_scheduler.core.usage import HalfLife
from fgpu_scheduler.errors import UnknownSession
from fgpu_scheduler.store.database import Database
from fgpu_scheduler.store.rows import Used, life_values, request_values, share_values
from fgpu_scheduler.store.schema import usage
from fgpu_scheduler.store.snapshot_cache import Contents
from fgpu_scheduler.store.statements import (
    FORGET_MESSAGE,
    HOLD,
    LOG,
    MESSAGE,
    NEXT_VERSION,
    ONE_SESSION,
    RELEASE,
    SUBMIT,
    read_asked,
    save_session,
)
from fgpu_scheduler.store.upsert import put

HEEDED_S = 180
"""How long an end message counts: the Hub ends a server within this time, and an older message is about no later end."""


class Newest:
    """The newest version that this process has seen."""

    def __init__(self) -> None:
        self.contents: Contents | None = None
        self._usage: tuple[Used, int, tuple[Usage, ...]] = ({}, 0, ())

    def put(self, contents: Contents) -> None:
        """Keep these contents unless newer ones are known: threads may call this in any order."""
        if self.contents is None or self.contents.version < contents.version:
            self.contents = contents

    def at(self, connection: Connection, version: int) -> Contents:
        """Return the contents at a version, which the transaction must see."""
        contents = self.contents
        if contents is None or contents.version != version:
            contents = Contents.read(connection, version)
            self.put(contents)
        return contents

    def usage(self, contents: Contents, now_s: int, half_life_s: HalfLife) -> tuple[Usage, ...]:
        """Return the usage decayed to now, cached for one second."""
        used, at_s, usage = self._usage
        if used is not contents.used or at_s != now_s:
            usage = contents.usage(now_s, half_life_s)
            self._usage = contents.used, now_s, usage
        return usage


@contextmanager
def writing(database: Database, newest: Newest, *, now_s: int) -> Iterator[SqlWrite]:
    """Run a write transaction; if it changed nothing, it is rolled back with its version."""
    with database.writing() as connection:
        write = SqlWrite(connection, newest, now_s)
        yield write
        if write.log:
            LOG.all(connection, write.log)
        if not (write.log or write.changed):
            connection.rollback()
            return
        then = write.then()
    if then is not None:
        newest.put(then)


class SqlWrite:
    """A `fgpu_scheduler.store.sessions.Write` in SQL, with its ``connection`` for other statements."""

    def __init__(self, connection: Connection, newest: Newest, now_s: int) -> None:
        self.connection = connection
        self.now_s = now_s
        before = NEXT_VERSION.one(connection, {}).scalar_one() - 1
        # Read the contents before anything else is written.
        self.world = newest.at(connection, before)
        self.log: list[dict[str, Any]] = []
        self.changed: dict[int, Session] = {}
        self.used: dict[tuple[str, str], tuple[float, int]] = {}
        self._only_sessions = True

    def then(self) -> Contents | None:
        if not self._only_sessions:
            return None
        return self.world.then(self.changed, self.used, partial(read_asked, self.connection))

    def one(self, session_id: int) -> Session:
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
        if session is None:
            # Nodes or quotas changed.
            self._only_sessions = False
        self.log.append(
            {
                "at_s": self.now_s,
                "session_id": session.id if session else None,
                "kind": kind,
                "from_state": was.value if was else None,
                "to_state": session.state.value if session and (was or kind == "submitted") else None,
                "reason": None if reason is None else str(reason),
                "user_name": session.request.user if session else None,
            }
        )

    def add(self, new: Session) -> Session:
        row = {**request_values(new.request), **life_values(new)}
        new = replace(new, id=SUBMIT.one(self.connection, row).scalar_one())
        self.changed[new.id] = new
        return new

    def save(self, changed: Sequence[Session]) -> None:
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for session in changed:
            # Only changed columns: each written column also writes its indexes.
            values = life_values(session, self.changed.get(session.id) or self.world.sessions.get(session.id))
            if values:
                alike.setdefault(tuple(values), []).append({**values, "session_id": session.id})
            self.changed[session.id] = session
        for columns, rows in alike.items():
            save_session(*columns).all(self.connection, rows)

    def give_shares(self, placed: Sequence[Session]) -> None:
        HOLD.all(self.connection, [row for session in placed for row in share_values(session)])

    def take_shares(self, session_id: int) -> None:
        RELEASE.one(self.connection, {"session_id": session_id})

    def set_used(self, user: str, resource_group: str, fgpu_milli_s: float) -> None:
        self.used[user, resource_group] = fgpu_milli_s, self.now_s
        row = {"user_name": user, "resource_group": resource_group, "fgpu_milli_s": fgpu_milli_s}
        put(self.connection, usage, [{**row, "at_s": self.now_s}])

    def take_message(self, session_id: int) -> str | None:
        own = {"session_id": session_id}
        found = MESSAGE.one(self.connection, own).one_or_none()
        if found is None:
            return None
        FORGET_MESSAGE.one(self.connection, own)
        return str(found.message) if self.now_s - found.said_at_s <= HEEDED_S else None
