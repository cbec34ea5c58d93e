"""A database with the scheduler's tables: connecting to it, and its transactions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from sqlalchemy import Connection, update

from fgpu_scheduler.store.database import Database
from fgpu_scheduler.store.schema import meta
from fgpu_scheduler.store.transaction import Newest, SqlWrite, writing


class StoreConnection:
    """The database of one installation. Thread-safe; other processes may use the same one.

    Whatever reads or writes it, here or in a class that is given it, raises `StoreUnavailable` where the database does
    not answer; then nothing was written.
    """

    def __init__(self, url: str) -> None:
        """Take the database's URL: ``sqlite:///path``, ``sqlite://`` (in memory) or ``postgresql://...``.

        Raises:
            BadSettings: the URL cannot be read, or names another kind of database. No I/O happens here.
        """
        self._database = Database(url)
        self._newest = Newest()
        self._installation_id = ""

    def tell_transactions(self, told: Callable[[str, float], None]) -> None:
        """Have ``told`` know of each transaction: ``read`` or ``write``, and the seconds from asking to its end."""
        self._database.on_transaction = told

    def open(self) -> None:
        """Connect and bring the schema up to date.

        Raises:
            StoreUnavailable: unreachable, or of a newer version; one line, without the password.
        """
        self._installation_id = self._database.open(migrate=True)

    def connect_readonly(self) -> None:
        """Connect for reading, without migrating. What writes then raises `StoreUnavailable`.

        Raises:
            StoreUnavailable: unreachable, or not (yet) of this version; one line, without the password.
        """
        self._installation_id = self._database.open(migrate=False)

    def connect(self) -> None:
        """Connect for reading and writing, without migrating: for others than the process that schedules.

        Raises:
            StoreUnavailable: unreachable, or not (yet) of this version; one line, without the password.
        """
        self._installation_id = self._database.open(migrate=False, write=True)

    def check_writable(self) -> None:
        """Return if a transaction could be written now; it changes nothing.

        Raises:
            StoreUnavailable: it could not; one line, without the password.
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
        """Twelve random hex digits, made with the database: they mark what this installation launches."""
        return self._installation_id

    def reading(self) -> AbstractContextManager[Connection]:
        """Begin a transaction that sees one instant. What goes wrong is raised as `StoreUnavailable`."""
        return self._database.reading()

    def writing(self, *, now_s: int) -> AbstractContextManager[SqlWrite]:
        """Begin a write transaction: another version, with an event for each change. One without any is undone."""
        return writing(self._database, self._newest, now_s=now_s)

    def writing_unversioned(self) -> AbstractContextManager[Connection]:
        """Begin a write transaction on what no plan is made of: the store's version stays, and nothing is logged."""
        return self._database.writing()
