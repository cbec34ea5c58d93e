"""What administrators changed of the catalogue, in the store. What an entry means is not known here."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Row, delete, select

from fgpu_scheduler.store.audit import record
from fgpu_scheduler.store.durable import Durable
from fgpu_scheduler.store.schema import image_edits
from fgpu_scheduler.store.transaction import SqlWrite
from fgpu_scheduler.store.upsert import put


@dataclass(frozen=True, slots=True)
class ImageEdit:
    """What was changed of one image.

    ``entry`` is the whole entry of an image that is not in the file, as a table; None of one that is.
    ``changes`` are keys of the entry with what stands there in place of it; None: the key is left out.
    ``position`` is its place in the order, None: that of the file.
    """

    slug: str
    entry: Mapping[str, object] | None = None
    changes: Mapping[str, object] = field(default_factory=dict)
    position: int | None = None
    changed_by: str = ""
    changed_at_s: int = 0


FLAGS = ("default", "enabled", "hidden", "sudo")
"""The keys of an entry that say yes or no; of these only ``enabled`` is yes where it is left out."""


class ImageEdits:
    """The edits of one installation. Thread-safe, as its store is."""

    def __init__(self, store: Durable) -> None:
        self._store = store

    def all(self) -> tuple[ImageEdit, ...]:
        """Return every edit, by slug."""
        with self._store.reading() as connection:
            rows = connection.execute(select(image_edits).order_by(image_edits.c.slug)).all()
        return tuple(_edit(row) for row in rows)

    def put(self, edits: Sequence[ImageEdit], *, drop: Collection[str] = (), by: str, now_s: int) -> None:
        """Write these edits in place of what was edited of their images, and forget those of ``drop``."""
        with self._store.writing(now_s=now_s) as write:
            for slug in sorted(drop):
                gone = write.connection.execute(delete(image_edits).where(image_edits.c.slug == slug))
                if gone.rowcount:
                    record(
                        write.connection, actor=by, action="image.back", target=f"image {slug}", now_s=now_s
                    )
                    write.event("images", reason=f"{slug}: back to the file, by {by}")
            for edit in edits:
                _put(edit, write, by, now_s)


def _put(edit: ImageEdit, write: SqlWrite, by: str, now_s: int) -> None:
    found = select(image_edits).where(image_edits.c.slug == edit.slug)
    old = write.connection.execute(found).one_or_none()
    known = _edit(old) if old is not None else ImageEdit(edit.slug)
    values = _values(edit)
    if old is not None and values == _values(known):
        return
    row = {"slug": edit.slug, **values, "changed_by": by, "changed_at_s": now_s}
    put(write.connection, image_edits, [row])
    what = "moved" if (edit.entry, edit.changes) == (known.entry, known.changes) else "edited"
    write.event("images", reason=f"{edit.slug}: {what} by {by}")
    action = "image.move" if what == "moved" else "image.edit"
    details = _difference(known, edit)
    record(
        write.connection, actor=by, action=action, target=f"image {edit.slug}", details=details, now_s=now_s
    )


def _difference(before: ImageEdit, edit: ImageEdit) -> str:
    """Return what is written over the file now, and was not before, in words for the audit log."""
    old = {**(before.entry or {}), **before.changes}
    new = {**(edit.entry or {}), **edit.changes}
    changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
    said = [f"{key}: {value_words(key, value)}" for key, value in changed.items()]
    said += [f"{key}: as in the file" for key in old if key not in new]
    if edit.position != before.position:
        said.append("its place" if edit.position is not None else "its place: as in the file")
    return ", ".join(said)


def value_words(key: str, value: object) -> str:
    """Return the value of a key of an image's entry in words; None: the key is left out."""
    if key in FLAGS:
        return "yes" if (key == "enabled" if value is None else value) else "no"
    if isinstance(value, Mapping):
        value = [f"{name} {one}" for name, one in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return "none" if value in (None, "") else str(value)


def _values(edit: ImageEdit) -> dict[str, object]:
    return {
        "entry": None if edit.entry is None else json.dumps(edit.entry),
        "changes": json.dumps(edit.changes),
        "position": edit.position,
    }


def _edit(row: Row[tuple[object, ...]]) -> ImageEdit:
    return ImageEdit(
        row.slug,
        None if row.entry is None else json.loads(row.entry),
        json.loads(row.changes),
        row.position,
        row.changed_by,
        row.changed_at_s,
    )
