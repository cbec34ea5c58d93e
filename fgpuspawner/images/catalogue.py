"""The image catalogue: images/catalogue.toml, checked whole, then only looked at; and written as such a file.

A catalogue that is wrong anywhere is refused as a whole, with one line that says where and what
would work: an administrator's typing mistake must never quietly change who may start what.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from fgpu_scheduler import FGPUError
from fgpuspawner.images.entry import BadEntry, Entry, entry_of, read_entry, shown
from fgpuspawner.images.model import Catalogue, Image

__all__ = ["Catalogue", "CatalogueError", "Image", "load_catalogue"]

HEADING = """\
# The images that users may choose from, as they were in force when `fgpu images export` wrote this file.
# docs/images.md says what each key means; `fgpu images check` whether all of it can be used.
"""
IMAGE = re.compile(r"\s*\[\[\s*image\s*\]\]")


class CatalogueError(FGPUError, ValueError):
    """The catalogue cannot be used. The message is one line: file, line, image, key, remedy."""

    code = "bad_catalogue"


def load_catalogue(path: Path | str) -> Catalogue:
    """Return the catalogue in this file."""
    return parse_catalogue(read_file(path), name=Path(path).name)


def read_file(path: Path | str) -> bytes:
    """Return what is in a catalogue's file."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        problem = "there is no such file; c.FGPU.catalogue names the catalogue"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise CatalogueError(f"{Path(path).name}: {problem}")


def parse_catalogue(raw: bytes, *, name: str) -> Catalogue:
    """Return the catalogue in these bytes; ``name`` is the file's, for messages."""

    def refuse(problem: str, line: int | None = None) -> NoReturn:
        where = name if line is None else f"{name}:{line}"
        # The values of a file may reach a log, so the message is one line.
        raise CatalogueError(" ".join(f"{where}: {problem}".split())) from None

    try:
        text = raw.decode("utf-8")
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as e:
        refuse(f"not TOML in UTF-8: {e}")
    entries = document.pop("image", None)
    if (
        document
        or not entries
        or not isinstance(entries, list)
        or not all(isinstance(e, dict) for e in entries)
    ):
        refuse(
            f"{f'unknown table {shown(next(iter(document)))}; ' if document else ''}write an [[image]] for each image"
        )
    # Entries in an inline list have no line of their own.
    headers = [number for number, line in enumerate(text.split("\n"), 1) if IMAGE.match(line)]
    lines = headers if len(headers) == len(entries) else [None] * len(entries)
    images: dict[str, Image] = {}
    default = ""
    for number, (entry, line) in enumerate(zip(entries, lines, strict=True), 1):
        try:
            image = read_entry(entry)
        except BadEntry as e:
            slug = entry.get("slug")
            refuse(f"image {shown(slug) if isinstance(slug, str) else number}: {e}", line)
        if image.slug in images:
            refuse(f"image {number}: slug: {shown(image.slug)} is there twice; slugs must differ", line)
        if image.default and default:
            words = f"{shown(default)} is the default already; write true in exactly one"
            refuse(f"image {shown(image.slug)}: default: {words}", line)
        default = image.slug if image.default else default
        images[image.slug] = image
    if not default:
        refuse("no image is the default; write default = true in exactly one")
    return Catalogue(tuple(images.values()))


def checked(entry: Entry) -> Image:
    """Return the image of an entry of the database."""
    try:
        return read_entry(entry)
    except BadEntry as e:
        raise CatalogueError(" ".join(f"image {shown(entry.get('slug'))}: {e}".split())) from None


def written(catalogue: Catalogue) -> str:
    """Return the file that `load_catalogue` reads back to the same one, without private images: these are in none."""
    parts = [HEADING]
    for image in catalogue.images:
        if not image.owner:
            lines = [f"{key} = {_toml(value)}" for key, value in entry_of(image).items()]
            parts.append("\n".join(["[[image]]", *lines, ""]))
    return "\n".join(parts)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    # Numbers, truth values, strings and lists of them are written as in JSON, escapes and all.
    return json.dumps(value, ensure_ascii=False)
