"""Dumps a database in use into one consistent file, and restores it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from sqlalchemy import URL, NullPool, create_engine, inspect, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from fgpu_scheduler import BadSettings, FGPUError

SQLITE, POSTGRESQL = "sqlite", "postgresql"


class BackupFailed(FGPUError):
    """A backup could not be made or restored, or is damaged. The message is one line."""

    code = "backup_failed"


def kind_of(url: str, setting: str) -> str:
    """Return "sqlite" or "postgresql"."""
    try:
        found = make_url(url)
        kind = found.get_backend_name()
    except (ArgumentError, ValueError):
        raise BadSettings(f"{setting}: the URL cannot be read") from None
    if kind not in (SQLITE, POSTGRESQL):
        raise BadSettings(f"{setting}: {kind} is not backed up by this command; use its own tools")
    if kind == SQLITE and found.database in (None, "", ":memory:"):
        raise BadSettings(f"{setting}: this database is in memory, and ends with its program")
    return kind


def dump(url: str, to: Path, *, setting: str) -> None:
    """Write a consistent copy of a database into a new file; writers can continue."""
    if kind_of(url, setting) == POSTGRESQL:
        _tool("pg_dump", make_url(url), "--format=custom", "--no-owner", "--no-privileges", f"--file={to}")
        return
    path = file_of(url)
    if not path.exists():
        raise BackupFailed(f"{setting}: there is no {path}; no Hub has used it so far")
    try:
        with (
            closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(to)) as target,
        ):
            source.backup(target)
            # Otherwise a reader of the copy would create further files beside it.
            target.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as e:
        raise BackupFailed(f"{path}: {e}") from None


def check(file: Path, kind: str) -> None:
    """Check that a database can be restored from this file; raises BackupFailed if it is damaged."""
    if kind == POSTGRESQL:
        _run("pg_restore", {}, "--file=/dev/null", str(file))
        return
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (said,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.Error as e:
        said = str(e)
    if said != "ok":
        raise BackupFailed(f"{file.name} is damaged: {said}")


def check_free(url: str, *, setting: str) -> None:
    """Check that a database can be restored here: SQLite's file may exist, PostgreSQL's database must be empty."""
    if kind_of(url, setting) == SQLITE:
        return
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            tables = inspect(connection).get_table_names()
    except DBAPIError as e:
        raise BackupFailed(f"{setting}: {' '.join(str(e.orig).split())}") from None
    if tables:
        raise BackupFailed(
            f"{setting}: {make_url(url).database} holds {len(tables)} tables; make an empty database (createdb), and "
            "name that one here"
        )


def put_back(file: Path, url: str, *, setting: str, aside: str) -> Path | None:
    """Restore a database from this file. Call `check_free` before; nothing else may use the database.

    Returns the previous SQLite file, which gets the suffix ``aside``; None if there was none.
    """
    if kind_of(url, setting) == POSTGRESQL:
        _tool(
            *("pg_restore", make_url(url), "--no-owner", "--no-privileges"),
            *("--exit-on-error", "--single-transaction", str(file)),
        )
        return None
    path = file_of(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as source:
        draft.unlink(missing_ok=True)
        # It contains hashes of tokens, and names.
        draft.touch(mode=0o600)
        with closing(sqlite3.connect(draft)) as target:
            source.backup(target)
    kept = None
    if path.exists() and path.stat().st_size:  # An empty file is only a lock.
        kept = path.with_name(f"{path.name}{aside}")
        # These belong to the old database.
        for suffix in ("-wal", "-shm"):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                beside.rename(kept.with_name(kept.name + suffix))
        path.rename(kept)
    draft.rename(path)
    return kept


def file_of(url: str) -> Path:
    return Path(str(make_url(url).database))


def _tool(program: str, url: URL, *arguments: str) -> None:
    """Run a PostgreSQL tool on a database, with the password hidden from the process list."""
    shown = url.set(drivername="postgresql", password=None)
    env = {} if url.password is None else {"PGPASSWORD": str(url.password)}
    if "password" in shown.query:
        env["PGPASSWORD"] = str(shown.query["password"])
        shown = shown.difference_update_query(["password"])
    _run(program, env, f"--dbname={shown.render_as_string(hide_password=False)}", *arguments)


def _run(program: str, env: dict[str, str], *arguments: str) -> None:
    try:
        done = subprocess.run(
            [program, *arguments],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise BackupFailed(
            f"{program} is not installed; it is in Debian's package postgresql-client"
        ) from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]
        raise BackupFailed(f"{program}: {said.removeprefix(f'{program}: ')}")
