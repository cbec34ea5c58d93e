"""A Hub claims its database for itself while it lives."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from store_worlds import opened

from fgpu_scheduler import BadSettings
from fgpu_scheduler.store import claim as module
from fgpu_scheduler.store.claim import Claim


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for a lock: on a busy machine PostgreSQL frees it long after its connection has ended."""
    monkeypatch.setattr(module, "LOCK_WAIT_S", 60)


def refusal(claim: Claim) -> str:
    """Return the message with which a claim is refused, without waiting for the lock."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "LOCK_WAIT_S", 0)
        with pytest.raises(BadSettings) as found:
            claim.take()
    return str(found.value)


@pytest.fixture
def first(url: str) -> Iterator[Claim]:
    claim = Claim(url)
    claim.take()
    yield claim
    claim.close()


@pytest.fixture
def second(url: str) -> Iterator[Claim]:
    claim = Claim(url)
    yield claim
    claim.close()


def test_second_claim_is_refused_naming_the_database_and_the_remedy(first: Claim, second: Claim) -> None:
    said = refusal(second)
    assert re.search(r"another Hub serves the sessions of \S+; end it, or give this one", said)


def test_holder_can_take_the_claim_again(first: Claim) -> None:
    first.take()


def test_claim_is_free_once_its_holder_ends(first: Claim, second: Claim) -> None:
    first.close()
    second.take()
    assert refusal(first)


@pytest.mark.parametrize(
    "linked",
    [os.symlink, os.link, lambda file, to: to.symlink_to(Path("..", file.parent.name, file.name))],
    ids=["symbolic link", "hard link", "relative link"],
)
def test_second_claim_is_refused_for_every_path_to_the_file(
    tmp_path: Path, linked: Callable[[Path, Path], None]
) -> None:
    file = tmp_path / "fgpu.sqlite"
    first = Claim(f"sqlite:///{file}")
    first.take()
    linked(file, tmp_path / "other.sqlite")
    assert "another Hub serves" in refusal(Claim(f"sqlite:///{tmp_path / 'other.sqlite'}"))
    assert "another Hub serves" in refusal(
        Claim(f"sqlite+pysqlite:///{tmp_path}/../{tmp_path.name}/fgpu.sqlite?timeout=3")
    )
    first.close()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_second_claim_is_refused_for_every_search_path_to_the_tables(url: str) -> None:
    schema = f"elsewhere_{os.getpid()}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        own = connection.execute(text("SELECT current_schema()")).scalar_one()
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    first, second = (
        Claim(url),
        Claim(
            make_url(url)
            .update_query_dict({"options": f"-csearch_path={schema},{own}"})
            .render_as_string(hide_password=False)
        ),
    )
    try:
        with opened(url):
            first.take()
            assert refusal(second)
    finally:
        first.close()
        with engine.connect() as connection:
            connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
        engine.dispose()


def test_closing_a_claim_keeps_sqlite_locks_on_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "fgpu.sqlite"
    claim = Claim(f"sqlite:///{file}")
    claim.take()
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("CREATE TABLE t (x)")
        writer.execute("BEGIN IMMEDIATE")
        claim.close()
        write = f"import sqlite3; sqlite3.connect({str(file)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
        other = subprocess.run([sys.executable, "-c", write], capture_output=True, text=True, check=False)
    assert "database is locked" in other.stderr


def test_database_files_are_closed_to_other_users(tmp_path: Path) -> None:
    file = tmp_path / "fgpu.sqlite"
    Claim(f"sqlite:///{file}").take()
    with opened(f"sqlite:///{file}"):
        assert {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {
            "fgpu.sqlite": 0,
            "fgpu.sqlite-shm": 0,
            "fgpu.sqlite-wal": 0,
        }
    # A file that an earlier version made.
    again = Claim(f"sqlite:///{tmp_path / 'earlier.sqlite'}")
    (tmp_path / "earlier.sqlite").touch(mode=0o644)
    again.take()
    assert (tmp_path / "earlier.sqlite").stat().st_mode & 0o007 == 0


def test_claim_is_retaken_after_postgresql_restarts_unless_another_was_faster(url: str) -> None:
    if make_url(url).get_backend_name() != "postgresql":
        pytest.skip("a file's lock is not cut by anybody")
    first, second = Claim(url), Claim(url)
    first.take()
    cut(url)
    first.take()
    assert refusal(second)
    cut(url)
    second.take()
    assert refusal(first)
    second.close()
    first.take()
    first.close()


def cut(url: str) -> None:
    """End the connection that holds the claim, as a restart of the server does."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        ended = (
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' "
                    "AND classid = :key "
                    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
                    "AND objid = (hashtext(current_schema())::bigint & 4294967295)"
                ),
                {"key": module.HUB_LOCK},
            )
            .scalars()
            .all()
        )
    engine.dispose()
    assert ended == [True]
