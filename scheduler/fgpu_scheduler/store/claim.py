"""The claim of a Hub on its database: a second Hub would end sessions that it did not launch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from fgpu_scheduler.errors import BadSettings, StoreUnavailable
from fgpu_scheduler.store.database import TIMEOUTS, UNAVAILABLE, Database, one_line, requiring_driver, shown
from fgpu_scheduler.store.schema import meta

HUB_LOCK = 0x66677068
"""PostgreSQL's advisory lock of a database's Hub: "fgph" in ASCII."""
TRY_LOCK = f"""
SELECT pg_try_advisory_lock(:key, hashtext(coalesce(
    (SELECT nspname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace
     WHERE pg_class.oid = to_regclass('{meta.name}')), current_schema())))
"""
"""Several installations can share a database, each in its own schema. URLs with different search paths can lead to the
same tables, so the lock is for the schema in which the tables are found."""
LOCK_WAIT_S = 15.0
"""Seconds that PostgreSQL may take to notice that the process with the lock has ended."""
SERVER_KEEPALIVES = "tcp_keepalives_idle = 10", "tcp_keepalives_interval = 5", "tcp_keepalives_count = 3"
"""Settings of the connection: if a Hub's machine is cut off, the server frees its lock after half a minute."""


class Claim:
    """The claim of a Hub on a database, which ends with the process. Use it in one thread at a time.

    On SQLite it is a lock on the database's file itself, so links and other paths lead to the same lock. On PostgreSQL it
    is an advisory lock of one connection, which must lead to the server and not to a transaction pool.
    """

    def __init__(self, url: str) -> None:
        """Parse the URL without I/O; raises as `Database` does."""
        Database(url)
        self._url = make_url(url)
        self._file: int | None = None
        self._connection: Connection | None = None

    def take(self) -> None:
        """Take the claim, keep it, or take it again after a restart of PostgreSQL.

        Raises:
            BadSettings: another process holds it, or the database's driver is not installed.
            StoreUnavailable: the database does not answer.
        """
        if self._url.get_backend_name() == "sqlite":
            if self._url.database not in (None, "", ":memory:"):
                if self._file is None:
                    self._file = _private(Path(str(self._url.database)))
                _lock(self._file, Path(str(self._url.database)), self._taken())
            return
        with one_line(self._url, *UNAVAILABLE, DBAPIError):
            if self._connection is not None:
                try:
                    # Again: when the tables are created, they may be in another schema than before.
                    if self._connection.execute(text(TRY_LOCK), {"key": HUB_LOCK}).scalar_one():
                        return
                    raise BadSettings(self._taken())
                except DBAPIError:
                    self.close()
            self._take_lock()

    def close(self) -> None:
        """Give the claim back. Idempotent."""
        if self._file is not None:
            # Do not close the file: that would release the locks of SQLite's own connections to it (POSIX locks).
            fcntl.flock(self._file, fcntl.LOCK_UN)
        if self._connection is not None:
            with contextlib.suppress(DBAPIError):
                self._connection.close()
        self._connection = None

    def _take_lock(self) -> None:
        arguments = {name: value for name, value in TIMEOUTS.items() if name not in self._url.query}
        # The lock belongs to the connection: no pool may reuse that, and no transaction may stay open on it.
        with requiring_driver():
            engine = create_engine(
                self._url, connect_args=arguments, poolclass=NullPool, isolation_level="AUTOCOMMIT"
            )
        connection = engine.connect()
        try:
            for setting in SERVER_KEEPALIVES:
                connection.execute(text(f"SET {setting}"))
            until_s = time.monotonic() + LOCK_WAIT_S
            while not connection.execute(text(TRY_LOCK), {"key": HUB_LOCK}).scalar_one():
                if time.monotonic() > until_s:
                    raise BadSettings(self._taken())
                time.sleep(0.2)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _taken(self) -> str:
        return (
            f"c.FGPU.db_url: another Hub serves the sessions of {shown(self._url)}; end it, or give this one "
            "another database"
        )


def lock_file(path: Path, taken: str) -> IO[str]:
    """Return an open file with a lock, which is held until the file is closed or this process ends.

    Raises:
        BadSettings: another process holds the lock; the message is ``taken``.
        StoreUnavailable: the file cannot be created or locked.
    """
    file = os.fdopen(_private(path), "w")
    try:
        _lock(file.fileno(), path, taken)
    except BaseException:
        file.close()
        raise
    return file


def _private(path: Path) -> int:
    """Open or create a file, closed to other users than owner and group. SQLite copies the mode to its journals."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise StoreUnavailable(f"{path}: {e.strerror}") from e
    with contextlib.suppress(PermissionError):
        os.fchmod(file, os.fstat(file).st_mode & 0o770)
    return file


def _lock(file: int, path: Path, taken: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadSettings(taken) from None
    except OSError as e:
        raise StoreUnavailable(
            f"{path} cannot be locked ({e.strerror}); move it to a disk of this machine"
        ) from e
