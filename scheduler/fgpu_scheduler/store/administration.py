"""What administrators did: edits of the banner and of the image catalogue, and the audit log.

One table has all edits with their last author and time; those of quotas are read by `fgpu_scheduler.store.quotas`.

The service returns the banner as ``banner`` of ``GET me`` and shows it in its pages. The Hub's pages get it from
`fgpuspawner.hub.banner.banner_of_hub`, which never fails and never delays a page.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, delete, func, or_, select

from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.schema import audit, edits
from fgpu_scheduler.store.statements import put
from fgpu_scheduler.store.transaction import StorePart, Write, add_audit_line


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
    put(
        connection,
        edits,
        [{**known, "name": n, "fields": json.dumps(found)} for n, found in fields_of.items()],
    )


def delete_edit(connection: Connection, kind: EditKind, name: str) -> bool:
    """Delete the edit of a thing; return whether there was one."""
    at = (edits.c.kind == kind.value) & (edits.c.name == name)
    return bool(connection.execute(delete(edits).where(at)).rowcount)


# --- The banner ---

MOST_BANNER_TEXT = 500
_BANNER = "banner"


class BannerLevel(StrEnum):
    INFO = "info"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Notice:
    """The banner's plain text, and when it expires; None: when it is taken down."""

    text: str
    level: BannerLevel = BannerLevel.INFO
    until_at_s: int | None = None
    set_by: str = ""
    set_at_s: int = 0


class Banner(StorePart):
    """The administrators' one announcement on every page, until it expires or is taken down."""

    def at(self, now_s: int) -> Notice | None:
        """Return the banner shown at this time, or None."""
        with self._store.reading() as connection:
            found = read_edits(connection, EditKind.BANNER)
        for edit in found:
            text, level, until_at_s = (edit.fields[name] for name in ("text", "level", "until_at_s"))
            if until_at_s is None or until_at_s > now_s:
                return Notice(text, BannerLevel(level), until_at_s, edit.changed_by, edit.changed_at_s)
        return None

    def put(self, notice: Notice, *, by: str, now_s: int) -> None:
        """Show this banner instead of any other, and write it to the audit log.

        Raises:
            BadSettings: the text is empty or too long, or the banner has expired.
        """
        text = " ".join(notice.text.replace("\0", " ").split())
        if not text:
            raise BadSettings("text: the banner says nothing; write a sentence, or take it down")
        if len(text) > MOST_BANNER_TEXT:
            raise BadSettings(f"text: {len(text)} characters; a banner has at most {MOST_BANNER_TEXT}")
        if notice.until_at_s is not None and notice.until_at_s <= now_s:
            raise BadSettings("until: this instant has passed; choose a later one, or none")
        with self._store.writing_unversioned() as connection:
            fields = {"text": text, "level": notice.level.value, "until_at_s": notice.until_at_s}
            write_edits(connection, EditKind.BANNER, {_BANNER: fields}, by=by, now_s=now_s)
            add_audit_line(connection, by, "banner.set", _BANNER, f"{notice.level}: {text}", now_s=now_s)

    def take_down(self, *, by: str, now_s: int) -> None:
        """Delete the banner."""
        with self._store.writing_unversioned() as connection:
            if delete_edit(connection, EditKind.BANNER, _BANNER):
                add_audit_line(connection, by, "banner.clear", _BANNER, now_s=now_s)


# --- Images of the catalogue; the store does not interpret the entries ---


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


class ImageEdits(StorePart):
    """The image edits of an installation."""

    def all(self) -> tuple[ImageEdit, ...]:
        """Return every edit, by slug."""
        with self._store.reading() as connection:
            return _image_edits(connection)

    def put(self, edits: Sequence[ImageEdit], *, drop: Collection[str] = (), by: str, now_s: int) -> None:
        """Replace the edits of these images, and delete those of the images in ``drop``."""
        with self._store.writing(now_s=now_s) as write:
            for slug in sorted(drop):
                if delete_edit(write.connection, EditKind.IMAGE, slug):
                    write.audit(by, "image.back", f"image {slug}")
                    write.event("images", reason=f"{slug}: back to the file, by {by}")
            known = {one.slug: one for one in _image_edits(write.connection)}
            for edit in edits:
                _put_image_edit(edit, known.get(edit.slug), write, by)


def _image_edits(connection: Connection) -> tuple[ImageEdit, ...]:
    return tuple(
        ImageEdit(edit.name, **edit.fields, changed_by=edit.changed_by, changed_at_s=edit.changed_at_s)
        for edit in read_edits(connection, EditKind.IMAGE)
    )


def _put_image_edit(edit: ImageEdit, old: ImageEdit | None, write: Write, by: str) -> None:
    fields = {"entry": edit.entry, "changes": edit.changes, "position": edit.position}
    if old is not None and json.dumps(fields) == json.dumps({name: getattr(old, name) for name in fields}):
        return
    known = old or ImageEdit(edit.slug)
    write_edits(write.connection, EditKind.IMAGE, {edit.slug: fields}, by=by, now_s=write.now_s)
    is_moved = (edit.entry, edit.changes) == (known.entry, known.changes)
    write.event("images", reason=f"{edit.slug}: {'moved' if is_moved else 'edited'} by {by}")
    action = "image.move" if is_moved else "image.edit"
    write.audit(by, action, f"image {edit.slug}", _difference(known, edit))


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
    if key in ("default", "enabled", "hidden", "sudo"):
        # By default ``enabled`` is true and the others are false.
        return "yes" if (key == "enabled" if value is None else value) else "no"
    if isinstance(value, Mapping):
        value = [f"{name} {one}" for name, one in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return "none" if value in (None, "") else str(value)


# --- The log of what administrators did: lines are added and never changed ---


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of the log. ``action`` is a word such as "node.cordon"; ``target`` is what it was done to.

    ``resource_group`` is the target's group at that time, None if it had none, such as the banner.
    """

    id: int
    at_s: int
    actor: str
    action: str
    target: str
    details: str
    resource_group: str | None = None


class Audit(StorePart):
    """The audit log of an installation."""

    def add(
        self,
        *,
        actor: str,
        action: str,
        target: str,
        group: str | None = None,
        details: str = "",
        now_s: int,
    ) -> None:
        """Add a line in its own transaction, after the action. ``group`` is the target's resource group."""
        with self._store.writing_unversioned() as connection:
            add_audit_line(connection, actor, action, target, details, group, now_s=now_s)

    def lines(
        self,
        *,
        limit: int,
        before_id: int | None = None,
        actor: str = "",
        action: str = "",
        text: str = "",
        groups: Collection[str] | None = None,
    ) -> tuple[AuditLine, ...]:
        """Return the newest lines before an id, newest first, filtered by each argument that is given.

        ``action`` also matches actions that begin with it and a dot; ``text`` is searched in target and details, ignoring
        case.
        """
        found = select(audit).order_by(audit.c.id.desc()).limit(limit)
        if before_id is not None:
            found = found.where(audit.c.id < before_id)
        if actor:
            found = found.where(audit.c.actor == actor)
        if action:
            of_kind = audit.c.action.startswith(f"{action}.", autoescape=True)
            found = found.where(or_(audit.c.action == action, of_kind))
        if groups is not None:
            found = found.where(audit.c.resource_group.in_(groups))
        if text:
            # SQLite lowers only ASCII letters, so others are also searched as they were written.
            found = found.where(
                or_(
                    *(
                        column.contains(given, autoescape=True)
                        for c in (audit.c.target, audit.c.details)
                        for column, given in ((func.lower(c), text.lower()), (c, text))
                    )
                )
            )
        with self._store.reading() as connection:
            return tuple(AuditLine(*row) for row in connection.execute(found))
