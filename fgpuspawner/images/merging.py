"""The catalogue in force: the file's entries, with what administrators changed of them in the database. Pure.

The file stays the source. What was changed lies over it key by key, so that all else follows the file when that
changes. An edit is checked exactly as an entry of the file is: one that does not fit the file any more has no effect,
and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NoReturn

from fgpu_scheduler.image_edits import ImageEdit
from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.entry import Entry, entry_of, read_entry
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.saying import shown
from fgpuspawner.images.values import path_shown


class Source(StrEnum):
    """Where an image in force comes from."""

    FILE = "file"
    EDITED = "edited"
    """From the file, with changes from the database."""
    ADDED = "added"
    """Only in the database, as from `fgpu images scan --add`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key at which file and database differ; None where there is nothing at it."""

    key: str
    in_file: object
    in_database: object

    def __str__(self) -> str:
        return f"{self.key}: {_said(self.in_database)}, in the file {_said(self.in_file)}"


@dataclass(frozen=True, slots=True)
class Listed:
    """An image in force, and how it came about. ``problem``: why an edit of it has no effect, or ""."""

    image: Image
    source: Source
    differences: tuple[Difference, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Merged:
    """The images in force, in their order.

    ``reordered``: another order than the file's. ``lost`` are the slugs of edits of images that the file does not have
    any more, and of added entries that cannot be read, each with why.
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


def merge(file: Catalogue, edits: Sequence[ImageEdit]) -> Merged:
    """Return what is in force where the file has these images, and the database these edits."""
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


def checked(entry: Entry) -> Image:
    """Return the image of an entry of the database.

    Raises:
        CatalogueError: anything is wrong with it; one line.
    """

    def refuse(path: tuple[str, ...], problem: str) -> NoReturn:
        said = f"image {shown(entry.get('slug'))}: {path_shown(path)}: {problem}"
        raise CatalogueError(" ".join(said.split()))

    return read_entry(entry, refuse)


def changes_to(entry: Entry, wanted: Entry) -> dict[str, object]:
    """Return the changes that make ``wanted`` of an entry."""
    keys = [key for key in (*wanted, *entry) if key != "slug" and wanted.get(key) != entry.get(key)]
    return {key: wanted.get(key) for key in dict.fromkeys(keys)}


def _edited(image: Image, edit: ImageEdit | None) -> Listed:
    if edit is None:
        return Listed(image, Source.FILE)
    entry = entry_of(image)
    try:
        # Where the file has taken in what was added before, that counts as changes of it.
        new = checked(changed(entry, {**(edit.entry or {}), **edit.changes}))
    except CatalogueError as e:
        return Listed(image, Source.FILE, problem=f"the edit of it has no effect: {e}")
    return _listed(image, new)


def _listed(image: Image, new: Image, problem: str = "") -> Listed:
    before, after = entry_of(image), entry_of(new)
    differences = tuple(
        Difference(key, before.get(key), after.get(key))
        for key in dict.fromkeys((*after, *before))
        if before.get(key) != after.get(key)
    )
    return Listed(new, Source.EDITED if differences else Source.FILE, differences, problem)


def _with_one_default(
    found: Mapping[str, Listed], edits: Mapping[str, ImageEdit], in_file: Mapping[str, Image]
) -> dict[str, Listed]:
    """Return the images with one default: that of the newest edit that makes one, else that of the file, if any."""
    asked = [
        slug
        for slug, one in found.items()
        if one.image.default
        and slug in edits
        and {**(edits[slug].entry or {}), **edits[slug].changes}.get("default")
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
    """Return the slugs by their positions; one without comes after whom it follows in ``slugs``."""
    order = sorted((slug for slug in slugs if slug in positions), key=lambda slug: (positions[slug], slug))
    for index, slug in enumerate(slugs):
        if slug not in positions:
            order.insert(order.index(slugs[index - 1]) + 1 if index else 0, slug)
    return order


def _said(value: object) -> str:
    return "nothing" if value is None else shown(value)
