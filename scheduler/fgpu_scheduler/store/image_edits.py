"""Administrators' edits of the image catalogue. The store does not interpret the entries."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fgpu_scheduler.store.audit import record
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.edits import Edit, EditKind, delete_edit, read_edits, write_edits
from fgpu_scheduler.store.transaction import SqlWrite


@dataclass(frozen=True, slots=True)
class ImageEdit:
    """The edit of one image.

    ``entry`` is the whole entry of an image that is not in the file, else None. ``changes`` are the changed keys of the
    entry with their values; None removes a key. ``position`` is its place in the order; None is that of the file.
    """

    slug: str
    entry: Mapping[str, object] | None = None
    changes: Mapping[str, object] = field(default_factory=dict)
    position: int | None = None
    changed_by: str = ""
    changed_at_s: int = 0


FLAGS = ("default", "enabled", "hidden", "sudo")
"""The boolean keys of an entry. By default ``enabled`` is true and the others are false."""


class ImageEdits:
    """The image edits of an installation. Thread-safe."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def all(self) -> tuple[ImageEdit, ...]:
        """Return every edit, by slug."""
        with self._store.reading() as connection:
            return tuple(map(_edit, read_edits(connection, EditKind.IMAGE)))

    def put(self, edits: Sequence[ImageEdit], *, drop: Collection[str] = (), by: str, now_s: int) -> None:
        """Replace the edits of these images, and delete those of the images in ``drop``."""
        with self._store.writing(now_s=now_s) as write:
            for slug in sorted(drop):
                if delete_edit(write.connection, EditKind.IMAGE, slug):
                    record(
                        write.connection, actor=by, action="image.back", target=f"image {slug}", now_s=now_s
                    )
                    write.event("images", reason=f"{slug}: back to the file, by {by}")
            known = {one.name: _edit(one) for one in read_edits(write.connection, EditKind.IMAGE)}
            for edit in edits:
                _put(edit, known.get(edit.slug), write, by, now_s)


def _put(edit: ImageEdit, old: ImageEdit | None, write: SqlWrite, by: str, now_s: int) -> None:
    fields = {"entry": edit.entry, "changes": edit.changes, "position": edit.position}
    if old is not None and json.dumps(fields) == json.dumps({name: getattr(old, name) for name in fields}):
        return
    known = old or ImageEdit(edit.slug)
    write_edits(write.connection, EditKind.IMAGE, {edit.slug: fields}, by=by, now_s=now_s)
    what = "moved" if (edit.entry, edit.changes) == (known.entry, known.changes) else "edited"
    write.event("images", reason=f"{edit.slug}: {what} by {by}")
    action = "image.move" if what == "moved" else "image.edit"
    details = _difference(known, edit)
    record(
        write.connection, actor=by, action=action, target=f"image {edit.slug}", details=details, now_s=now_s
    )


def _difference(before: ImageEdit, edit: ImageEdit) -> str:
    """Return the difference between two edits of an image, in words for the audit log."""
    old = {**(before.entry or {}), **before.changes}
    new = {**(edit.entry or {}), **edit.changes}
    changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
    said = [f"{key}: {value_words(key, value)}" for key, value in changed.items()]
    said += [f"{key}: as in the file" for key in old if key not in new]
    if edit.position != before.position:
        said.append("its place" if edit.position is not None else "its place: as in the file")
    return ", ".join(said)


def value_words(key: str, value: object) -> str:
    """Return the value of an entry's key in words; None is an absent key."""
    if key in FLAGS:
        return "yes" if (key == "enabled" if value is None else value) else "no"
    if isinstance(value, Mapping):
        value = [f"{name} {one}" for name, one in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return "none" if value in (None, "") else str(value)


def _edit(edit: Edit) -> ImageEdit:
    return ImageEdit(edit.name, **edit.fields, changed_by=edit.changed_by, changed_at_s=edit.changed_at_s)
