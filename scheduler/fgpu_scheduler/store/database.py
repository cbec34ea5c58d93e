"""A SQLite or PostgreSQL database: connections, transactions, and errors as one plain line.

Transactions behave the same on both. A read transaction sees one instant. Write transactions run one after another: on
SQLite by ``BEGIN IMMEDIATE``, on PostgreSQL because each begins with an UPDATE of the meta row.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, make_url, select, text
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    InternalError,
    NoSuchModuleError,
    NotSupportedError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from fgpu_scheduler.errors import BadSettings, StoreUnavailable
from fgpu_scheduler.store import migrations
from fgpu_scheduler.store.schema import meta

LOCK_TIMEOUT_S = 10
"""How long a transaction waits for another's lock, and a connection for its server."""

TIMEOUTS = {
    "connect_timeout": LOCK_TIMEOUT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * 25,
}
"""Arguments of PostgreSQL's client: if the server's machine is cut off, the client notices after half a minute."""

UNAVAILABLE = OperationalError, InterfaceError, InternalError, NotSupportedError, PoolTimeout
"""The errors while the server is away. For a write to a standby the driver raises no OperationalError, and a pool without
a free connection raises SQLAlchemy's own timeout."""

READ_ONLY_SQLSTATES = "0A000", "25006"
"""PostgreSQL's codes for a write on a standby: for beginning it, and in a read-only transaction."""

MIGRATION_LOCK = 0x66677075
"""PostgreSQL's advisory lock while migrating: "fgpu" in ASCII."""


class Database:
    """The database of a URL. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Parse the URL without I/O: ``sqlite:///path``, ``sqlite://`` (in memory) or ``postgresql://...``.

        Raises:
            BadSettings: the URL is invalid, or its database is not supported.
        """
        try:
            self._url = make_url(url)
            self._backend = self._url.get_backend_name()
        except (ArgumentError, NoSuchModuleError, ValueError):
            # Do not quote the text: it may contain the password.
            raise BadSettings("the database URL cannot be read; one is sqlite:////srv/fgpu.sqlite") from None
        if self._backend not in ("sqlite", "postgresql"):
            meant = "; write postgresql+psycopg://" if self._backend == "postgres" else ""
            raise BadSettings(f"the database may be SQLite or PostgreSQL, and not {self._backend}{meant}")
        if self._is_sqlite and self._url.host:
            raise BadSettings(
                "the database URL of SQLite has too few slashes: three before a path from here, four before one from "
                f"the root; write sqlite:///{self._url.host}/{self._url.database or ''} or sqlite:////srv/fgpu.sqlite"
            )
        if self._is_sqlite and "uri" in self._url.query:
            raise BadSettings(
                "the database URL of SQLite names a path, without uri=: sqlite:////srv/fgpu.sqlite"
            )
        #: The engines for reading and for writing; None while that is not open.
        self._reader: Engine | None = None
        self._writer: Engine | None = None
        # A database in memory has one connection, so one transaction at a time.
        self._turn: AbstractContextManager[Any] = threading.Lock() if self._in_memory else nullcontext()
        self.on_transaction: Callable[[str, float], None] = lambda kind, took_s: None
        """Called in its thread after each successful transaction: ``read`` or ``write``, and its seconds."""

    @property
    def _is_sqlite(self) -> bool:
        return self._backend == "sqlite"

    @property
    def _in_memory(self) -> bool:
        return self._is_sqlite and self._url.database in (None, "", ":memory:")

    def open(self, *, migrate: bool, write: bool = False) -> str:
        """Connect, migrate or only check the schema, and return the installation's id.

        Without ``migrate`` the database is opened for reading, unless ``write``.

        Raises:
            StoreUnavailable: unreachable, or of another schema; one line, without the password.
            BadSettings: the database's driver is not installed.
        """
        self.close()
        try:
            with one_line(self._url, DBAPIError):
                return self._prepared() if migrate else self._checked(write=write)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every connection; `open` opens the database again. Idempotent."""
        for engine in filter(None, (self._reader, self._writer)):
            engine.dispose()
        self._reader = self._writer = None

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Run a read transaction, which sees one instant."""
        began_s = time.monotonic()
        with self._turn, one_line(self._url, *UNAVAILABLE):
            if self._reader is None:
                raise StoreUnavailable(f"{shown(self._url)} is not open")
            with self._reader.connect() as connection:
                if not self._in_memory:
                    # In memory the lock keeps writers out.
                    self._begin(connection, "BEGIN")
                yield connection
        self.on_transaction("read", time.monotonic() - began_s)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Run a write transaction: it is committed unless the body raises or rolls back."""
        began_s = time.monotonic()
        with self._turn, one_line(self._url, *UNAVAILABLE):
            if self._writer is None:
                raise StoreUnavailable(f"{shown(self._url)} is not open for writing")
            with self._writer.connect() as connection:
                self._begin(connection, "BEGIN IMMEDIATE")
                yield connection
                connection.commit()
        self.on_transaction("write", time.monotonic() - began_s)

    def _begin(self, connection: Connection, statement: str) -> None:
        if self._is_sqlite:
            # Not in a listener of SQLAlchemy's "begin" event: with one, every statement looks for listeners.
            connection.exec_driver_sql(statement)

    def _prepared(self) -> str:
        engine = self._new_engine()
        if self._is_sqlite and not self._in_memory:
            self._use_wal(engine)
        self._writer = self._with_mode(engine, write=True)
        with self._writer.begin() as connection:
            self._begin(connection, "BEGIN IMMEDIATE")
            if not self._is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            with self._known_schema():
                migrations.upgrade(connection)
            found = connection.execute(select(meta.c.installation_id)).scalar_one_or_none()
            if found is None:
                found = secrets.token_hex(6)
                connection.execute(insert(meta).values(id=1, version=1, installation_id=found))
        return str(found)

    def _checked(self, *, write: bool) -> str:
        # Connecting would create an empty file.
        if self._is_sqlite and not self._in_memory and not os.path.exists(self._url.database or ""):
            raise StoreUnavailable(f"{shown(self._url)} does not exist yet; the Hub makes it when it starts")
        engine = self._new_engine()
        with self.reading() as connection, self._known_schema():
            if not migrations.is_current(connection):
                raise StoreUnavailable(
                    f"{shown(self._url)} is not migrated yet; the Hub does it when it starts"
                )
            found = str(connection.execute(select(meta.c.installation_id)).scalar_one())
        if write:
            self._writer = self._with_mode(engine, write=True)
        return found

    def _new_engine(self) -> Engine:
        """Create the engine, which connects on first use, and its reading side."""
        # Arguments in the URL's query, such as "connect_timeout", take precedence.
        known = {"timeout": LOCK_TIMEOUT_S} if self._is_sqlite else TIMEOUTS
        arguments = {name: value for name, value in known.items() if name not in self._url.query}
        options: dict[str, Any] = {}
        if self._in_memory:
            options["poolclass"] = StaticPool
            arguments["check_same_thread"] = False
        elif not self._is_sqlite:
            # Test each connection before use: a restart of the server must not fail the next spawn.
            options["pool_pre_ping"] = True
        with requiring_driver():
            engine = create_engine(self._url, connect_args=arguments, hide_parameters=True, **options)
        event.listen(engine, "connect", _set_up_sqlite if self._is_sqlite else _set_up_postgresql)
        if not self._is_sqlite:
            event.listen(engine, "handle_error", _disconnect_from_standby)
        self._reader = self._with_mode(engine, write=False)
        return engine

    def _with_mode(self, engine: Engine, *, write: bool) -> Engine:
        if self._is_sqlite:
            return engine  # `_begin` chooses the mode of each transaction.
        # Writers wait for the lock on the meta row, and must then see what the previous writer committed.
        level = "READ COMMITTED" if write else "REPEATABLE READ"
        return engine.execution_options(isolation_level=level, postgresql_readonly=not write)

    def _use_wal(self, engine: Engine) -> None:
        """Use a write-ahead log, so that writers do not block readers. The file keeps this mode."""
        until_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                with engine.connect() as connection:
                    mode = connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar_one()
                break
            except OperationalError as e:
                # SQLite does not wait here for another process that does the same with a new file.
                is_busy = getattr(e.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > until_s:
                    raise
                time.sleep(0.05)
        if mode != "wal":
            raise StoreUnavailable(
                f"{shown(self._url)}: SQLite cannot use WAL here; is it a network file system?"
            )

    @contextmanager
    def _known_schema(self) -> Iterator[None]:
        """Turn `UnknownSchema` into `StoreUnavailable` with the remedy."""
        try:
            yield
        except migrations.UnknownSchema as e:
            needed = migrations.schema_revision()
            empty = "move the file away" if self._is_sqlite else "make one with createdb"
            raise StoreUnavailable(
                f"{shown(self._url)} has schema {e}, and this version of fgpuspawner needs {needed}; use the version "
                f"that wrote it, or start with an empty database: {empty}, or set c.FGPU.db_url to another one"
            ) from None


@contextmanager
def requiring_driver() -> Iterator[None]:
    """Turn a missing database driver into `BadSettings`."""
    try:
        yield
    except ImportError as e:
        raise BadSettings(
            f"the database's driver is not installed ({e.name}): pip install 'fgpuspawner[postgresql]'"
        ) from e


@contextmanager
def one_line(url: URL, *errors: type[SQLAlchemyError]) -> Iterator[None]:
    """Turn a database's errors into a one-line `StoreUnavailable` that names the database without its password."""
    try:
        yield
    except errors as e:
        said = " ".join(str(e.orig if isinstance(e, DBAPIError) else e).split())
        if url.password:
            said = said.replace(str(url.password), "***")
        raise StoreUnavailable(f"{shown(url)}: {said[:300]}") from e


def shown(url: URL) -> str:
    """Return a database's URL without its password and without its query, which may have a password too."""
    return url.set(query={}).render_as_string(hide_password=True)


def _set_up_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    # The driver begins transactions late and only for writes, so `Database._begin` does it instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    # In WAL mode the kernel has a commit when it returns, so it survives a SIGKILL of this process. Only a crash of the
    # machine can lose the last commits (it never corrupts the file), and it also ends the sessions that they allocated.
    # FULL would wait for the disk at each commit.
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _set_up_postgresql(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_S}s'")
    cursor.close()
    connection.commit()


def _disconnect_from_standby(context: ExceptionContext) -> None:
    # Drop the pool's connections to a standby: the same address may lead to the new primary by now.
    if getattr(context.original_exception, "sqlstate", None) in READ_ONLY_SQLSTATES:
        context.is_disconnect = True
