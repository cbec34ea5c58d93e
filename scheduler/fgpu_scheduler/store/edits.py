"""The table of administrators' edits: one row for each edited thing, with its last author and time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, delete, select

from fgpu_scheduler.store.schema import edits
from fgpu_scheduler.store.upsert import put


class EditKind(StrEnum):
    BANNER = "banner"
    IMAGE = "image"
    QUOTA = "quota"


@dataclass(frozen=True, slots=True)
class Edit:
    """The edited fields of one thing, as in JSON, with the last author and time."""

    name: str
    fields: dict[str, Any]
    changed_by: str
    changed_at_s: int


def read_edits(connection: Connection, kind: EditKind) -> tuple[Edit, ...]:
    """Return the edits of this kind, by name."""
    columns = edits.c.name, edits.c.fields, edits.c.changed_by, edits.c.changed_at_s
    found = connection.execute(select(*columns).where(edits.c.kind == kind.value))
    # Sorted here: the order of texts depends on a PostgreSQL database's collation.
    return tuple(Edit(row[0], json.loads(row[1]), row[2], row[3]) for row in sorted(found))


def write_edits(
    connection: Connection,
    kind: EditKind,
    fields_of: Mapping[str, Mapping[str, object]],
    *,
    by: str,
    now_s: int,
) -> None:
    """Write the fields of things, by name, and replace their earlier edits."""
    known = {"kind": kind.value, "changed_by": by, "changed_at_s": now_s}
    rows = [{**known, "name": name, "fields": json.dumps(fields)} for name, fields in fields_of.items()]
    if rows:
        put(connection, edits, rows)


def delete_edit(connection: Connection, kind: EditKind, name: str) -> bool:
    """Delete the edit of a thing; return whether there was one."""
    at = (edits.c.kind == kind.value) & (edits.c.name == name)
    return bool(connection.execute(delete(edits).where(at)).rowcount)
