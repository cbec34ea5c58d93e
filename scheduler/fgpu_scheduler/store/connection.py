"""The connection of an installation to its database, and transactions on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from sqlalchemy import Connection, update

from fgpu_scheduler.store.database import Database
from fgpu_scheduler.store.schema import meta
from fgpu_scheduler.store.transaction import Newest, SqlWrite, writing


class StoreConnection:
    """The database of one installation. Thread-safe; other processes may use the same database.

    Every read or write through it raises `StoreUnavailable` if the database does not answer; nothing was written then.
    """

    def __init__(self, url: str) -> None:
        """Parse the URL without I/O; raises as `Database` does."""
        self._database = Database(url)
        self._newest = Newest()
        self._installation_id = ""

    def tell_transactions(self, told: Callable[[str, float], None]) -> None:
        """Call ``told`` after each transaction: ``read`` or ``write``, and the seconds from request to end."""
        self._database.on_transaction = told

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
        """Connect for reading and writing, without migrating: for processes other than the Hub.

        Raises:
            StoreUnavailable: unreachable, or not of this version; one line, without the password.
        """
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
        self._newest = Newest()

    @property
    def installation_id(self) -> str:
        """Twelve random hex digits, created with the database, that mark what this installation launches."""
        return self._installation_id

    def reading(self) -> AbstractContextManager[Connection]:
        """Begin a read transaction, which sees one instant."""
        return self._database.reading()

    def writing(self, *, now_s: int) -> AbstractContextManager[SqlWrite]:
        """Begin a write transaction: a new version with an event for each change, undone if nothing changes."""
        return writing(self._database, self._newest, now_s=now_s)

    def writing_unversioned(self) -> AbstractContextManager[Connection]:
        """Begin a write transaction on data that no plan uses: it changes no version and logs nothing."""
        return self._database.writing()
