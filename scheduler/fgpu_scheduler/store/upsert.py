"""Inserting or replacing rows in one statement, so that two concurrent writers both succeed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def put(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert these complete rows, replacing rows with the same primary key."""
    new: postgresql.Insert | sqlite.Insert
    new = postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)
    keys = [column.name for column in table.primary_key]
    rest = {c.name: new.excluded[c.name] for c in table.columns if c.name not in keys}
    connection.execute(new.on_conflict_do_update(index_elements=keys, set_=rest), rows)
