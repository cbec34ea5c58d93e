"""What administrators change of the catalogue: kept in the database, laid over the file, and made here.

The file stays the source. What was changed lies over it key by key, so that all else follows the file when that
changes. An edit is checked exactly as an entry of the file is. An edit that has ceased to fit the file has no effect
and is reported. Pure, except `edit_catalogue`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from fgpu_scheduler import Audit, ImageEdit, ImageEdits, Store, value_words
from fgpuspawner.images.catalogue import (
    CatalogueError,
    checked,
    parse_catalogue,
    read_file,
    replace_file,
    rewritten,
)
from fgpuspawner.images.entry import Entry, changes_to, entry_of, shown
from fgpuspawner.images.model import Catalogue, FoundImage, Image
from fgpuspawner.images.needs import between_steps


class Source(StrEnum):
    """Where an image in force comes from."""

    FILE = "file"
    EDITED = "edited"
    """From the file, with changes from the database."""
    ADDED = "added"
    """Only in the database, as from `fgpu images scan --add`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key at which file and database differ; None for a missing value."""

    key: str
    in_file: object
    in_database: object

    def __str__(self) -> str:
        database, file = (value_words(self.key, value) for value in (self.in_database, self.in_file))
        return f"{self.key}: {database} (in the file: {file})"


@dataclass(frozen=True, slots=True)
class Listed:
    """An image in force and its sources. ``problem`` says why an edit of it has no effect, or is ""."""

    image: Image
    source: Source
    differences: tuple[Difference, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Merged:
    """The images in force, in their order.

    ``reordered``: another order than the file's. ``lost`` maps slugs to reasons: edits of images that
    have left the file, and added entries that cannot be read.
    """

    listed: tuple[Listed, ...]
    reordered: bool = False
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def catalogue(self) -> Catalogue:
        """The images alone."""
        return Catalogue(tuple(one.image for one in self.listed))

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the edits, one line each."""
        return (*(one.problem for one in self.listed if one.problem), *self.lost.values())


def said_by(edit: ImageEdit | None) -> dict[str, object]:
    """Return what an edit says of an image: what it changes, over the entry that was added."""
    return {} if edit is None else {**(edit.entry or {}), **edit.changes}


def merge(file: Catalogue, edits: Sequence[ImageEdit]) -> Merged:
    """Return the images in force, from the file's images and the database's edits."""
    by_slug = {edit.slug: edit for edit in edits}
    in_file = {image.slug: image for image in file.images}
    found = {slug: _edited(image, by_slug.get(slug)) for slug, image in in_file.items()}
    lost: dict[str, str] = {}
    for edit in edits:
        if edit.slug in in_file:
            continue
        if edit.entry is None:
            lost[edit.slug] = f"image {shown(edit.slug)} is not in the file any more, and was edited"
            continue
        try:
            found[edit.slug] = Listed(checked(changed(edit.entry, edit.changes)), Source.ADDED)
        except CatalogueError as e:
            lost[edit.slug] = str(e)
    found = _with_one_default(found, by_slug, in_file)
    order = _ordered([*found], {edit.slug: edit.position for edit in edits if edit.position is not None})
    kept = [slug for slug in order if slug in in_file]
    return Merged(tuple(found[slug] for slug in order), kept != [*in_file], lost)


def changed(entry: Entry, changes: Mapping[str, object]) -> dict[str, Any]:
    """Return the entry with these changes: None leaves a key out, and the slug stays."""
    together = {**entry, **changes, "slug": entry["slug"]}
    return {key: value for key, value in together.items() if value is not None}


def _edited(image: Image, edit: ImageEdit | None) -> Listed:
    if edit is None:
        return Listed(image, Source.FILE)
    try:
        # Where the file has taken in what was added before, that counts as changes of it.
        return _listed(image, checked(changed(entry_of(image), said_by(edit))))
    except CatalogueError as e:
        return Listed(image, Source.FILE, problem=f"the edit of it has no effect: {e}")


def _listed(image: Image, new: Image, problem: str = "") -> Listed:
    before, after = entry_of(image), entry_of(new)
    differences = tuple(
        Difference(key, before.get(key), value) for key, value in changes_to(before, after).items()
    )
    return Listed(new, Source.EDITED if differences else Source.FILE, differences, problem)


def _with_one_default(
    found: Mapping[str, Listed], edits: Mapping[str, ImageEdit], in_file: Mapping[str, Image]
) -> dict[str, Listed]:
    """Return the images with one default: that of the newest edit that makes one, else that of the file, if any."""
    asked = [
        slug for slug, one in found.items() if one.image.default and said_by(edits.get(slug)).get("default")
    ]
    own_default = next((slug for slug, image in in_file.items() if image.default), "")
    chosen = max(asked, key=lambda slug: edits[slug].changed_at_s, default=own_default)
    result = {}
    for slug, one in found.items():
        image = replace(one.image, default=slug == chosen)
        own = in_file.get(slug)
        result[slug] = replace(one, image=image) if own is None else _listed(own, image, one.problem)
    return result


def _ordered(slugs: Sequence[str], positions: Mapping[str, int]) -> list[str]:
    """Return the slugs by their positions; a slug without one stays after its predecessor in ``slugs``."""
    order = sorted((slug for slug in slugs if slug in positions), key=lambda slug: (positions[slug], slug))
    for index, slug in enumerate(slugs):
        if slug not in positions:
            order.insert(order.index(slugs[index - 1]) + 1 if index else 0, slug)
    return order


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
}


@dataclass(frozen=True, slots=True)
class Update:
    """What to write to the database: edits to put, and the slugs of edits to drop."""

    put: tuple[ImageEdit, ...] = ()
    drop: tuple[str, ...] = ()


class Draft:
    """The catalogue as it is: what is done with it, and what has to be written for that.

    Every `Update` was checked whole. Raises `CatalogueError`, one line, where there is no such image or it cannot be.
    ``amounts`` are those of fGPU x 1000 that can be asked for, ascending: an image that is written names no other.
    """

    def __init__(self, file: Catalogue, edits: Sequence[ImageEdit], amounts: Sequence[int] = ()) -> None:
        self._file = file
        self._amounts = amounts
        self._edits = {edit.slug: edit for edit in edits}

    def do(self, action: Action, slug: str) -> Update:
        """Return what an action writes."""
        if action is Action.BACK and slug in self._edits:
            return Update(drop=(slug,))
        entry = self._entry(slug)
        match action:
            case Action.BACK:
                return Update()
            case Action.UP | Action.DOWN:
                return self._move(slug, -1 if action is Action.UP else 1)
            case Action.DEFAULT:
                update = self._whole(slug, {**entry, "default": True})
                # The newest that makes a default would win anyway; so that none is left that says otherwise.
                others = [e for e in self._edits.values() if e.slug != slug and said_by(e).get("default")]
                return replace(update, put=(*update.put, *map(_without_default, others)))
        return self._whole(slug, {**entry, **SETS[action]})

    def edit(self, slug: str, wanted: Entry) -> Update:
        """Return what makes this whole entry of an image."""
        self._entry(slug)
        self._check(checked({**wanted, "slug": slug}))
        return self._whole(slug, {**wanted, "slug": slug})

    def add(self, entries: Sequence[Entry]) -> Update:
        """Return the update that adds images to the catalogue. A slug that is taken is refused."""
        taken = {image.slug for image in self._file.images} | self._edits.keys()
        put = []
        for entry in entries:
            image = checked(entry)
            self._check(image)
            if image.slug in taken:
                raise CatalogueError(
                    f"image {shown(image.slug)}: slug: there is one already; slugs must differ"
                )
            taken.add(image.slug)
            put.append(ImageEdit(image.slug, entry_of(image)))
        return Update(tuple(put))

    def file_order(self) -> Update:
        """Return the update that drops all positions: the order is the file's again."""
        edits = [replace(edit, position=None) for edit in self._edits.values()]
        empty = [e.slug for e in edits if e.entry is None and not e.changes]
        return Update(tuple(e for e in edits if e.slug not in empty), tuple(empty))

    def _check(self, image: Image) -> None:
        if problem := between_steps(image, self._amounts):
            raise CatalogueError(problem)

    def _order(self) -> list[str]:
        return [one.image.slug for one in merge(self._file, [*self._edits.values()]).listed]

    def _entry(self, slug: str) -> Entry:
        """Return the entry in force."""
        own, edit = self._file.entry(slug), self._edits.get(slug)
        if own is None and (edit is None or edit.entry is None):
            there = ", ".join(self._order()) or "none"
            raise CatalogueError(f"there is no image {shown(slug)}; there are {there}")
        base = {} if own is None else entry_of(own)
        return changed({**base, "slug": slug}, said_by(edit))

    def _whole(self, slug: str, wanted: Entry) -> Update:
        image = checked(wanted)
        edit, own = self._edits.get(slug) or ImageEdit(slug), self._file.entry(slug)
        if own is None:
            return Update((replace(edit, entry=entry_of(image), changes={}),))
        changes = changes_to(entry_of(own), entry_of(image))
        if not changes and edit.position is None:
            return Update(drop=(slug,))
        return Update((replace(edit, entry=None, changes=changes),))

    def _move(self, slug: str, by: int) -> Update:
        order = self._order()
        if slug not in order:
            raise CatalogueError(f"image {shown(slug)} has no place: what was changed of it cannot be used")
        at = order.index(slug)
        to = at + by
        if not 0 <= to < len(order):
            return Update()
        order[at], order[to] = order[to], order[at]
        return Update(
            tuple(replace(self._edits.get(s) or ImageEdit(s), position=n) for n, s in enumerate(order))
        )


def _without_default(edit: ImageEdit) -> ImageEdit:
    entry = edit.entry and {key: value for key, value in edit.entry.items() if key != "default"}
    changes = {key: value for key, value in edit.changes.items() if key != "default"}
    return replace(edit, entry=entry, changes=changes)


def edit_catalogue(
    store: Store,
    file: Catalogue,
    change: Callable[[Draft], Update],
    *,
    by: str,
    amounts: Sequence[int] = (),
    only_check: bool = False,
) -> None:
    """Write what ``change`` makes of the newest edits in the database; see `Draft`. Blocks."""
    edits = ImageEdits(store)
    update = change(Draft(file, edits.all(), amounts))
    if only_check:
        return
    edits.put(update.put, drop=update.drop, by=by, now_s=int(time.time()))


def write_to_file(store: Store, path: Path, *, by: str, without: str = "") -> None:
    """Write the database's changes into the catalogue's file, and drop them; or only remove one image. Blocks.

    Raises:
        CatalogueError: the file cannot be written, or cannot do without that image.
    """
    edits, raw = ImageEdits(store), read_file(path)
    file, changes = parse_catalogue(raw, name=path.name), edits.all()
    if without:
        wanted = Catalogue(tuple(image for image in file.images if image.slug != without))
        drop = [edit.slug for edit in changes if edit.slug == without]
        if not any(image.default for image in wanted.images):
            raise CatalogueError(
                f"image {shown(without)}: it is the default in {path.name}; make another the default there"
            )
    else:
        merged = merge(file, changes)
        if merged.problems:
            raise CatalogueError(f"first discard the change that has no effect: {merged.problems[0]}")
        wanted, drop = merged.catalogue, [edit.slug for edit in changes]
    replace_file(path, rewritten(raw, wanted, name=path.name))
    now_s = int(time.time())
    change = (
        f"image {without} is removed" if without else f"with the changes of {', '.join(drop) or 'no image'}"
    )
    Audit(store).add(actor=by, action="image.write", target=path.name, details=change, now_s=now_s)
    # An edit that stays after a failure here says what the file says.
    edits.put((), drop=drop, by=by, now_s=now_s)


def pinned(image: Image, found: Mapping[str, FoundImage]) -> tuple[dict[str, Any], str]:
    """Return the entry that pins an image to what was found, by engine, and a message about it.

    An image from a registry is pinned by the registry's digest, in the reference, so that an engine that does not
    have it can still pull the same. An image built there has no digest and is pinned by its id.
    """
    if not found:
        raise CatalogueError(
            f"image {shown(image.slug)}: no engine has {image.reference}; pull or build it first"
        )
    name = image.reference.partition("@")[0]
    which = {_digest(name, one) for one in found.values()}
    if len(which) == 1 and None not in which:
        reference = f"{name}@{which.pop()}"
        return entry_of(replace(image, reference=reference, digest="")), f"pinned to {reference}"
    ids = {one.image_id for one in found.values()}
    if len(ids) > 1:
        has = "; ".join(f"{engine}: {one.image_id}" for engine, one in found.items())
        raise CatalogueError(
            f"image {shown(image.slug)}: the engines have different images under {image.reference} ({has}); "
            "remove the wrong one"
        )
    (image_id,) = ids
    said = f"it came from no registry, so it is pinned by its id {image_id}; every engine must have that very image"
    return entry_of(replace(image, digest=image_id)), said


def _digest(name: str, found: FoundImage) -> str | None:
    """Return the digest that a registry knows it by, of the repository of this name."""
    head, slash, last = name.rpartition("/")
    # As engines list it: without a tag, and ``docker.io/library/`` is never said.
    repository = f"{head}{slash}{last.partition(':')[0]}".removeprefix("docker.io/").removeprefix("library/")
    known = (one.partition("@") for one in found.digests)
    return next(
        (digest for of, _, digest in known if of == repository and digest.startswith("sha256:")), None
    )
