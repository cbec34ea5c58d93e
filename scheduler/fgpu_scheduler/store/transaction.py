"""Transactions of the store: a read sees one instant; a write makes the next version, with an event for each change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, insert, update

from fgpu_scheduler.core.model import Request, Session, SessionState
from fgpu_scheduler.errors import StaleVersion, UnknownSession
from fgpu_scheduler.store import statements
from fgpu_scheduler.store.database import Database
from fgpu_scheduler.store.rows import life_values, request_values, share_values
from fgpu_scheduler.store.schema import audit, meta, usage
from fgpu_scheduler.store.snapshot_cache import Contents, ContentsCache
from fgpu_scheduler.store.statements import put, read_asked, save_session

END_MESSAGE_VALID_S = 180
"""How long an end message counts: the Hub ends a server within this time, and an older message is about no later end."""
MOST_ACTOR, MOST_TARGET, MOST_DETAILS = 255, 500, 2000
"""The longest texts of an audit line: users write parts of them."""


class StoreConnection:
    """The database of one installation. Thread-safe; other processes may use the same database.

    Every read or write through it raises `StoreUnavailable` if the database does not answer; nothing was written then.
    """

    def __init__(self, url: str) -> None:
        """Parse the URL without I/O; raises as `Database` does."""
        self._database = Database(url)
        self._cache = ContentsCache()
        self._installation_id = ""

    def on_transaction(self, called: Callable[[str, float], None]) -> None:
        """Call ``called`` after each transaction: ``read`` or ``write``, and the seconds from request to end."""
        self._database.on_transaction = called

    def open(self) -> None:
        """Connect and bring the schema up to date.

        Raises:
            StoreUnavailable: unreachable, or of a newer version; one line, without the password.
        """
        self._installation_id = self._database.open(migrate=True)

    def connect_readonly(self) -> None:
        """Connect for reading, without migrating. Writes then raise `StoreUnavailable`.

        Raises:
            StoreUnavailable: unreachable, or not of this version; one line, without the password.
        """
        self._installation_id = self._database.open(migrate=False)

    def connect(self) -> None:
        """Connect as `connect_readonly` does, and for writing too: for processes other than the Hub."""
        self._installation_id = self._database.open(migrate=False, write=True)

    def check_writable(self) -> None:
        """Try a write and roll it back.

        Raises:
            StoreUnavailable: writing is impossible; one line, without the password.
        """
        with self._database.writing() as connection:
            connection.execute(update(meta).values(version=meta.c.version))
            connection.rollback()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._database.close()
        self._cache = ContentsCache()

    @property
    def installation_id(self) -> str:
        """Twelve random hex digits, created with the database, that mark what this installation launches."""
        return self._installation_id

    def reading(self) -> AbstractContextManager[Connection]:
        """Begin a read transaction, which sees one instant."""
        return self._database.reading()

    @contextmanager
    def writing(self, *, now_s: int) -> Iterator[Write]:
        """Begin a write transaction; if it changes nothing, it is rolled back with its version."""
        with self._database.writing() as connection:
            write = Write(connection, self._cache, now_s)
            yield write
            if write.log:
                statements.LOG.all(connection, write.log)
            if not (write.log or write.changed):
                connection.rollback()
                return
            then = write.then()
        if then is not None:
            self._cache.put(then)

    def writing_unversioned(self) -> AbstractContextManager[Connection]:
        """Begin a write transaction on data that no plan uses: it changes no version and logs nothing."""
        return self._database.writing()


class StorePart:
    """A subject of the store with its own reads and writes. Thread-safe; each method is one transaction."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store


class Write:
    """One write: the store's contents before it, the changes, and their events."""

    def __init__(self, connection: Connection, cache: ContentsCache, now_s: int) -> None:
        #: For statements that no method runs.
        self.connection = connection
        self.now_s = now_s
        before = statements.NEXT_VERSION.one(connection, {}).scalar_one() - 1
        #: The contents and version before the write. They are read before anything else is written.
        self.world = cache.at(connection, before)
        #: The rows of events.
        self.log: list[dict[str, Any]] = []
        #: The new and changed sessions, by id, and the changed usage.
        self.changed: dict[int, Session] = {}
        self.used: dict[tuple[str, str, str], tuple[float, int]] = {}
        self._only_sessions = True

    def then(self) -> Contents | None:
        """Return the contents after this write, or None if they must be read from the database."""
        if not self._only_sessions:
            return None
        return self.world.then(self.changed, self.used, partial(read_asked, self.connection))

    def check_version(self, version: int) -> None:
        """Raise `StaleVersion` unless the store is at this version, on which a change was decided."""
        if self.world.version != version:
            raise StaleVersion(f"planned on version {version}; the store is at {self.world.version}")

    def one(self, session_id: int) -> Session:
        """Return the session with this id as it was before, or raise `UnknownSession`."""
        found = self.world.sessions.get(session_id)
        found = found or statements.ONE_SESSION.first(self.connection, session_id=session_id)
        if found is None:
            raise UnknownSession(f"there is no session {session_id}")
        return found

    def event(
        self,
        kind: str,
        session: Session | None = None,
        *,
        was: SessionState | None = None,
        reason: str | None = None,
    ) -> None:
        """Log a change; with ``was`` it is a transition from that state to the session's state."""
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

    def audit(self, by: str, action: str, target: str, details: str = "", group: str | None = None) -> None:
        """Add a line to the audit log."""
        add_audit_line(self.connection, by, action, target, details, group, now_s=self.now_s)

    def add(self, new: Session) -> Session:
        """Add and log a new session, and return it with its id."""
        row = {**request_values(new.request), **life_values(new)}
        new = replace(new, id=statements.SUBMIT.one(self.connection, row).scalar_one())
        self.changed[new.id] = new
        self.event("submitted", new, reason=None if new.replaces is None else f"replaces {new.replaces}")
        return new

    def save(self, changed: Sequence[Session]) -> None:
        """Write the changed sessions, except their shares: `give_shares` and `take_shares` write those."""
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for session in changed:
            # Only changed columns: each written column also writes its indexes.
            values = life_values(session, self.changed.get(session.id) or self.world.sessions.get(session.id))
            if values:
                alike.setdefault(tuple(values), []).append({**values, "session_id": session.id})
            self.changed[session.id] = session
        for columns, rows in alike.items():
            save_session(*columns).all(self.connection, rows)

    def save_one(self, new: Session, kind: str, reason: str | None = None) -> Session:
        """Write one changed session with an event of this kind, and return it."""
        self.save([new])
        self.event(kind, new, reason=reason)
        return new

    def give_shares(self, placed: Sequence[Session]) -> None:
        """Write the shares of sessions that had none."""
        statements.HOLD.all(self.connection, [row for session in placed for row in share_values(session)])

    def take_shares(self, session_id: int) -> None:
        """Delete the shares of a session."""
        statements.RELEASE.one(self.connection, {"session_id": session_id})

    def set_used(self, asked: Request, fgpu_milli_s: float) -> None:
        """Set the usage of the ended sessions of a request's user and account in its group, decayed to now."""
        user, group, account = own = asked.user, asked.resource_group, asked.account
        self.used[own] = fgpu_milli_s, self.now_s
        row = {"user_name": user, "resource_group": group, "account": account, "fgpu_milli_s": fgpu_milli_s}
        put(self.connection, usage, [{**row, "at_s": self.now_s}])

    def take_message(self, session_id: int) -> str | None:
        """Return and delete an administrator's message to the owner of a session that ends now."""
        own = {"session_id": session_id}
        found = statements.MESSAGE.one(self.connection, own).one_or_none()
        if found is None:
            return None
        statements.FORGET_MESSAGE.one(self.connection, own)
        return str(found.message) if self.now_s - found.said_at_s <= END_MESSAGE_VALID_S else None


def add_audit_line(
    connection: Connection,
    by: str,
    action: str,
    target: str,
    details: str = "",
    group: str | None = None,
    *,
    now_s: int,
) -> None:
    """Add a line to the audit log in the action's transaction. ``group`` is the target's resource group."""
    values = {
        "at_s": now_s,
        "actor": _line(by, MOST_ACTOR),
        "action": action,
        "target": _line(target, MOST_TARGET),
        "resource_group": group,
        "details": _line(details, MOST_DETAILS),
    }
    connection.execute(insert(audit).values(values))


def _line(text: str, most: int) -> str:
    """Return the text as one line of at most ``most`` characters, without zero characters, which PostgreSQL refuses."""
    line = " ".join(text.replace("\0", " ").split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
