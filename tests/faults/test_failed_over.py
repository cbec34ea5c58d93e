"""The database's address leads to a standby: it reads, and cannot be written to until it is promoted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from fgpu_scheduler import Request, Store, StoreUnavailable
from outages import OwnPostgres


class FailingOver(OwnPostgres):
    """A database server that its standby can replace."""

    def become_standby(self) -> None:
        """Start it again as one that follows another server, which there is not."""
        self.stop()
        data = Path((self._folder / "postgres.data").read_text().strip())
        (data / "standby.signal").touch()
        shutil.chown(data / "standby.signal", data.owner(), data.group())
        self.url = self.start()

    def promote(self) -> None:
        """Have it be the server that is written to."""
        engine = create_engine(self.url)
        with engine.connect() as connection:
            assert connection.execute(text("SELECT pg_promote()")).scalar_one()
        engine.dispose()


def connection_of(store: Store) -> int:
    """Return the number of the server's process that answers what is read."""
    with store._database.reading() as connection:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


def test_standby_database_counts_as_silent() -> None:
    server = FailingOver()
    store = Store(server.start())
    asked = Request("alice", "", "python", "default", 500, 100, 256)
    try:
        store.open()
        server.become_standby()
        before = connection_of(store)
        with pytest.raises(StoreUnavailable, match="during recovery"):
            store.submit([asked], now_s=1)
        assert connection_of(store) != before, "the address may lead elsewhere by now"
        server.promote()
        assert [s.request for s in store.submit([asked], now_s=1)] == [asked]
    finally:
        store.close()
        server.close()
