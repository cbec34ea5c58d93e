"""Everything of one database into another, empty one of either kind: the installation stays the same."""

from __future__ import annotations

from contextlib import closing

from sqlalchemy import Connection, Table, delete, func, insert, inspect, select, text

from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.database import Database
from fgpu_scheduler.store.schema import meta, metadata, sessions

AT_A_TIME = 1000


def copy_database(source_url: str, target_url: str) -> int:
    """Copy all rows, and where the ids go on, into a database that no Hub has used, and return the number of sessions.

    No Hub may serve either of them meanwhile. The target is as it was if anything fails.

    Raises:
        BadSettings: a URL cannot be read, or the target holds sessions.
        StoreUnavailable: one of them does not answer, or the source is not of this version; one line, no password.
    """
    with closing(Database(source_url)) as source, closing(Database(target_url)) as target:
        source.open(migrate=False)
        target.open(migrate=True)
        with source.reading() as old, target.writing() as new:
            if new.execute(select(func.count()).select_from(sessions)).scalar_one():
                raise BadSettings("the database that is copied to holds sessions already; make an empty one")
            new.execute(delete(meta))
            for table in metadata.sorted_tables:
                rows = old.execution_options(stream_results=True).execute(select(table)).mappings()
                for some in rows.partitions(AT_A_TIME):
                    new.execute(insert(table), [dict(row) for row in some])
                _go_on(old, new, table)
            return int(new.execute(select(func.count()).select_from(sessions)).scalar_one())


def _go_on(old: Connection, new: Connection, table: Table) -> None:
    """Have the new table give no id that the old one has given, also to what is forgotten by now."""
    column = table.autoincrement_column
    if column is None:
        return
    last = max(_last(old, table, column.name), int(old.execute(select(func.max(column))).scalar() or 0))
    if last == 0:
        return
    if new.dialect.name == "sqlite":
        # Only a table that never gives an id again keeps its last one.
        if table.dialect_options["sqlite"]["autoincrement"]:
            new.execute(text("DELETE FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
            new.execute(
                text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :last)"),
                {"name": table.name, "last": last},
            )
        return
    new.execute(
        text("SELECT setval(pg_get_serial_sequence(:name, :column), :last)"),
        {"name": table.name, "column": column.name, "last": last},
    )


def _last(connection: Connection, table: Table, column: str) -> int:
    """Return the last id that a table has given, 0 where none is kept."""
    if connection.dialect.name == "sqlite":
        if not inspect(connection).has_table("sqlite_sequence"):
            return 0
        asked = text("SELECT seq FROM sqlite_sequence WHERE name = :name")
        return int(connection.execute(asked, {"name": table.name}).scalar() or 0)
    name = connection.execute(
        text("SELECT pg_get_serial_sequence(:name, :column)"), {"name": table.name, "column": column}
    ).scalar()
    if name is None:
        return 0
    # It is the database's own answer, quoted.
    return int(
        connection.execute(
            text(f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {name}")
        ).scalar()
        or 0
    )
