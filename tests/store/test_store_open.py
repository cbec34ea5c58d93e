"""Opening and migrating a database, and the one-line errors of databases that cannot be used."""

from __future__ import annotations

import re
import shutil
import socket
import sqlite3
import threading
import traceback
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from sqlalchemy import Column, Connection, MetaData, Text, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from store_worlds import ask, opened, postgres_url

from fgpu_scheduler.errors import BadSettings, StoreUnavailable
from fgpu_scheduler.store import migrations
from fgpu_scheduler.store.database import one_line
from fgpu_scheduler.store.migrations import VERSION_TABLE, schema_revision
from fgpu_scheduler.store.schema import metadata
from fgpu_scheduler.store.setups import Setups
from fgpu_scheduler.store.store import Store

PASSWORD = "swordfish"


def refused(url: str, *, readonly: bool = False) -> str:
    """Return the one-line error of opening the store."""
    store = Store(url)
    with pytest.raises(StoreUnavailable) as raised:
        store.connect_readonly() if readonly else store.open()
    line = str(raised.value)
    assert "\n" not in line
    assert PASSWORD not in line
    return line


LATER = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "2099.01", "2026.11.28.4"
def upgrade():
    op.add_column("fgpu_nodes", sa.Column("rack", sa.Text))
"""


def test_later_revision_gives_an_old_database_the_tables_of_a_new_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(url) as store:
        session = store.submit([ask()], now_s=1)[0]
    later = tmp_path / "later"
    shutil.copytree(Path(migrations.__file__).parent, later)
    (later / "versions/later.py").write_text(LATER)
    tables = MetaData()
    for table in metadata.sorted_tables:
        table.to_metadata(tables)
    tables.tables["fgpu_nodes"].append_column(Column("rack", Text))
    monkeypatch.setattr(migrations, "__file__", str(later / "__init__.py"))
    monkeypatch.setattr(migrations, "metadata", tables)
    assert "not migrated yet" in refused(url, readonly=True)
    with opened(url) as store, store._database.writing() as connection:
        assert store.session(session.id) == session
        migrated = _tables(connection)
        everything = MetaData()
        everything.reflect(connection)
        everything.drop_all(connection)
    assert "rack TEXT" in str(migrated) or "rack text" in str(migrated)
    with opened(url) as store, store._database.reading() as connection:
        assert _tables(connection) == migrated


def _tables(connection: Connection) -> dict[str, set[str]]:
    """Return the columns, constraints and indexes of each of our tables, as the database describes them."""
    if connection.dialect.name == "sqlite":
        rows = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")).all()
        found = {name: {part.strip(" \t)") for part in re.split(r"[,\n]", sql)} - {""} for name, sql in rows}
    else:
        parts = (
            "SELECT table_name, concat_ws(' ', column_name, data_type, is_nullable, column_default)"
            " FROM information_schema.columns WHERE table_schema = current_schema()",
            "SELECT conrelid::regclass::text, conname || ' ' || pg_get_constraintdef(oid)"
            " FROM pg_constraint WHERE connamespace = current_schema()::regnamespace",
            "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = current_schema()",
        )
        found = {}
        for part in parts:
            for table, words in connection.execute(text(part)):
                found.setdefault(table, set()).add(words)
    return {name: words for name, words in found.items() if VERSION_TABLE not in name}


def test_opening_again_keeps_everything(url: str) -> None:
    with opened(url) as store:
        installation_id, session = store.installation_id, store.submit([ask()], now_s=1)[0]
    assert len(installation_id) == 12
    assert int(installation_id, 16) >= 0
    with opened(url) as store:
        assert store.installation_id == installation_id
        assert store.session(session.id) == session
        store.close()
        store.close()
        store.open()
        assert store.installation_id == installation_id


def test_a_store_that_is_not_open_says_so() -> None:
    store = Store("sqlite://")
    with pytest.raises(StoreUnavailable, match="is not open"):
        store.version()
    with pytest.raises(StoreUnavailable, match="is not open"):
        store.submit([ask()], now_s=1)


def test_read_only_store_writes_nothing(url: str) -> None:
    with opened(url) as hub:
        service = Store(url)
        service.connect_readonly()
        with pytest.raises(StoreUnavailable, match="not open for writing"):
            service.submit([ask()], now_s=1)
        service.close()
        assert hub.snapshot(1).sessions == ()


def test_read_only_store_creates_and_migrates_nothing(url: str) -> None:
    line = refused(url, readonly=True)
    assert "the Hub" in line
    if url.startswith("sqlite"):
        assert not Path(make_url(url).database or "").exists()
        sqlite3.connect(make_url(url).database or "").close()
        assert "not migrated yet" in refused(url, readonly=True)


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("revision", ["0015", "0001", "9999"])
def test_another_schema_is_refused(url: str, readonly: bool, revision: str) -> None:
    with opened(url) as store, store._database.writing() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))
        before = _tables(connection)
    line = refused(url, readonly=readonly)
    assert (
        f" has schema {revision}, and this version of fgpuspawner needs {schema_revision()}; use the" in line
    )
    assert "start with an empty database: m" in line
    assert "or set c.FGPU.db_url to another one" in line
    engine = create_engine(url)
    with engine.connect() as connection:
        assert _tables(connection) == before, "nothing was changed"
    engine.dispose()


def test_unreachable_server_gives_a_one_line_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        line = refused(f"postgresql+psycopg://hub:{PASSWORD}@127.0.0.1:{port}/fgpu")
    assert line.startswith(f"postgresql+psycopg://hub:***@127.0.0.1:{port}/fgpu: ")
    assert "refused" in line


def test_unknown_user_gives_a_one_line_error() -> None:
    url = make_url(postgres_url()).set(username="nobody_of_this_name", password=PASSWORD)
    line = refused(url.render_as_string(hide_password=False))
    assert "nobody_of_this_name" in line
    assert refused(url.set(password=None).update_query_dict({"password": PASSWORD}).render_as_string())


def test_error_that_repeats_the_password_hides_it() -> None:
    url = make_url(f"postgresql+psycopg://hub:{PASSWORD}@db/fgpu")
    with pytest.raises(StoreUnavailable) as raised, one_line(url, DBAPIError):
        raise DBAPIError("", {}, Exception(f'authentication failed for user "hub" ({PASSWORD})'))
    assert str(raised.value).endswith('failed for user "hub" (***)')


@pytest.mark.parametrize(
    "url", [f"mysql://hub:{PASSWORD}@db/fgpu", f"//hub:{PASSWORD}@db", f"db2://x:{PASSWORD}@y"]
)
def test_a_url_that_cannot_be_used_is_refused_without_the_password(url: str) -> None:
    with pytest.raises(BadSettings) as raised:
        Store(url)
    assert PASSWORD not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        # Even root cannot create files in /proc.
        ("/proc/fgpu.sqlite", "sqlite:////proc/fgpu.sqlite: unable to open database file"),
        ("{folder}/missing/fgpu.sqlite", "unable to open database file"),
        ("{folder}", "unable to open database file"),
        ("{folder}/notes.txt", "file is not a database"),
    ],
)
def test_file_that_cannot_be_used_gives_a_one_line_error(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "notes.txt").write_text("These are notes. " * 100)
    assert words in refused(f"sqlite:///{path.format(folder=tmp_path)}")


def test_new_database_is_opened_once_another_process_lets_go_of_it(tmp_path: Path) -> None:
    path = tmp_path / "fgpu.sqlite"
    # Not yet a write-ahead log, and SQLite does not wait for the other one's end before it becomes one.
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("PRAGMA user_version = 1")
        other.execute("BEGIN IMMEDIATE")
        asked = threading.Timer(0.3, other.execute, ["COMMIT"])
        asked.start()
        with opened(f"sqlite:///{path}") as store:
            assert store.version() == 1
        asked.join()


def test_locked_database_gives_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "fgpu.sqlite"
    with opened(f"sqlite:///{path}"):
        pass
    with opened(f"sqlite:///{path}?timeout=0.01") as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            store.submit([ask()], now_s=1)
        # Readers are not blocked.
        assert store.snapshot(1).sessions == ()
        other.execute("ROLLBACK")
        other.close()
        assert store.submit([ask()], now_s=1)


def test_error_of_a_write_does_not_repeat_its_values(tmp_path: Path) -> None:
    path, secret = tmp_path / "fgpu.sqlite", "".join(("s3", "cret"))
    with opened(f"sqlite:///{path}") as store:
        other = sqlite3.connect(path)
        other.execute("CREATE TRIGGER t BEFORE INSERT ON fgpu_setups BEGIN SELECT RAISE(ABORT, 'full'); END")
        other.close()
        with pytest.raises((StoreUnavailable, DBAPIError)) as raised:
            Setups(store).put("alice", {"WANDB_API_KEY": secret}, secret, now_s=1)
    assert "full" in (trace := "".join(traceback.format_exception(raised.value)))
    assert secret not in trace


def test_exhausted_connection_pool_gives_a_one_line_error(url: str) -> None:
    with opened(url) as store, ExitStack() as held:
        pool = store._database._reader.pool
        pool._timeout = 0.01
        for _ in range(pool.size() + pool._max_overflow):
            held.enter_context(store._database.reading())
        with pytest.raises(StoreUnavailable, match="QueuePool limit"):
            store.version()
        with pytest.raises(StoreUnavailable, match="QueuePool limit"):
            store.submit([ask()], now_s=1)
