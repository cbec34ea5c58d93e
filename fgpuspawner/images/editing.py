"""What an administrator does with an image, as changes of the database: each is checked whole before it is written.

Pure, but for `Editor`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fgpu_scheduler.image_edits import ImageEdit, ImageEdits
from fgpu_scheduler.store import Store
from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.entry import Entry, entry_of
from fgpuspawner.images.merging import changed, changes_to, checked, merge
from fgpuspawner.images.model import Catalogue
from fgpuspawner.images.saying import shown


class Action(StrEnum):
    """What can be done with an image in one word."""

    ENABLE = "enable"
    DISABLE = "disable"
    HIDE = "hide"
    SHOW = "show"
    DEFAULT = "default"
    UP = "up"
    DOWN = "down"
    BACK = "back"
    """Back to the file: what was changed of it, its place too, is forgotten; what only the database has is gone."""


SETS: Mapping[Action, Mapping[str, object]] = {
    Action.ENABLE: {"enabled": True},
    Action.DISABLE: {"enabled": False},
    Action.HIDE: {"hidden": True},
    Action.SHOW: {"hidden": False},
    Action.DEFAULT: {"default": True},
}


@dataclass(frozen=True, slots=True)
class Update:
    """What is to be written: edits to put, and slugs whose edits are to be dropped."""

    put: tuple[ImageEdit, ...] = ()
    drop: tuple[str, ...] = ()


def done(action: Action, slug: str, file: Catalogue, edits: Sequence[ImageEdit]) -> Update:
    """Return what an action writes.

    Raises:
        CatalogueError: there is no such image, or it cannot be done; one line.
    """
    known = {edit.slug: edit for edit in edits}
    if action is Action.BACK:
        if slug in known:
            return Update(drop=(slug,))
        _entry(slug, file, known)
        return Update()
    if action in SETS:
        return _set(slug, SETS[action], file, known)
    return _moved(slug, -1 if action is Action.UP else 1, file, edits)


def edited(slug: str, wanted: Entry, file: Catalogue, edits: Sequence[ImageEdit]) -> Update:
    """Return what makes this whole entry of an image.

    Raises:
        CatalogueError: there is no such image, or the entry cannot be used; one line.
    """
    known = {edit.slug: edit for edit in edits}
    _entry(slug, file, known)
    return _whole(slug, {**wanted, "slug": slug}, file, known)


def added(entries: Sequence[Entry], file: Catalogue, edits: Sequence[ImageEdit]) -> Update:
    """Return what adds images to the catalogue.

    Raises:
        CatalogueError: an entry cannot be used, or its slug is taken; one line.
    """
    taken = {image.slug for image in file.images} | {edit.slug for edit in edits}
    put = []
    for entry in entries:
        image = checked(entry)
        if image.slug in taken:
            raise CatalogueError(f"image {shown(image.slug)}: slug: there is one already; slugs must differ")
        taken.add(image.slug)
        put.append(ImageEdit(image.slug, entry_of(image)))
    return Update(tuple(put))


def _entry(slug: str, file: Catalogue, known: Mapping[str, ImageEdit]) -> Entry:
    """Return the entry in force."""
    own = file.entry(slug)
    edit = known.get(slug)
    if own is None and (edit is None or edit.entry is None):
        there = [one.image.slug for one in merge(file, list(known.values())).listed]
        raise CatalogueError(f"there is no image {shown(slug)}; there are {', '.join(there) or 'none'}")
    base: Entry = {**(entry_of(own) if own is not None else {}), **((edit and edit.entry) or {})}
    return changed(base, edit.changes if edit is not None else {})


def _set(slug: str, changes: Entry, file: Catalogue, known: Mapping[str, ImageEdit]) -> Update:
    update = _whole(slug, {**_entry(slug, file, known), **changes}, file, known)
    if "default" not in changes:
        return update
    # The newest that makes a default would win anyway; so that none is left that says otherwise.
    others = [e for e in known.values() if e.slug != slug and {**(e.entry or {}), **e.changes}.get("default")]
    return Update((*update.put, *(_without_default(edit) for edit in others)), update.drop)


def _without_default(edit: ImageEdit) -> ImageEdit:
    entry, changes = (
        None if table is None else {key: value for key, value in table.items() if key != "default"}
        for table in (edit.entry, edit.changes)
    )
    return replace(edit, entry=entry, changes=changes or {})


def _whole(slug: str, wanted: Entry, file: Catalogue, known: Mapping[str, ImageEdit]) -> Update:
    image = checked(wanted)
    edit, own = known.get(slug) or ImageEdit(slug), file.entry(slug)
    if own is None:
        return Update((replace(edit, entry=entry_of(image), changes={}),))
    changes = changes_to(entry_of(own), entry_of(image))
    if not changes and edit.position is None:
        return Update(drop=(slug,))
    return Update((replace(edit, entry=None, changes=changes),))


def _moved(slug: str, by: int, file: Catalogue, edits: Sequence[ImageEdit]) -> Update:
    known = {edit.slug: edit for edit in edits}
    order = [one.image.slug for one in merge(file, edits).listed]
    _entry(slug, file, known)
    if slug not in order:
        raise CatalogueError(f"image {shown(slug)} has no place: what was changed of it cannot be used")
    at = order.index(slug)
    to = at + by
    if not 0 <= to < len(order):
        return Update()
    order[at], order[to] = order[to], order[at]
    return Update(tuple(replace(known.get(s) or ImageEdit(s), position=n) for n, s in enumerate(order)))


class Editor:
    """Writes what administrators do, with the newest edits of the database before it. Blocks."""

    def __init__(self, store: Store, file: Catalogue) -> None:
        self._edits = ImageEdits(store)
        self._file = file

    def do(self, action: Action, slug: str, *, by: str) -> None:
        """Do something with an image; see `done`."""
        self._write(done(action, slug, self._file, self._edits.all()), by)

    def edit(self, slug: str, wanted: Entry, *, by: str) -> None:
        """Make this entry of an image; see `edited`."""
        self._write(edited(slug, wanted, self._file, self._edits.all()), by)

    def add(self, entries: Sequence[Entry], *, by: str) -> None:
        """Add images; see `added`."""
        self._write(added(entries, self._file, self._edits.all()), by)

    def file_order(self, *, by: str) -> None:
        """Forget every place that was given: the order is the file's again."""
        edits = [replace(edit, position=None) for edit in self._edits.all()]
        empty = [e.slug for e in edits if e.entry is None and not e.changes]
        self._write(Update(tuple(e for e in edits if e.slug not in empty), tuple(empty)), by)

    def _write(self, update: Update, by: str) -> None:
        self._edits.put(update.put, drop=update.drop, by=by, now_s=int(time.time()))
