"""The image catalogue: images/catalogue.toml, checked whole, then only looked at; and written as such a file.

A catalogue that is wrong anywhere is refused as a whole, with one line that says where and what
would work: an administrator's typing mistake must never quietly change who may start what.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import tomlkit

from fgpu_scheduler import FGPUError
from fgpuspawner.images.entry import BadEntry, Entry, changes_to, entry_of, read_entry, shown
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

    @property
    def key(self) -> str:
        """The key of an image's entry that is wrong, or ""."""
        found = re.match(r'image "[^"]*"(?: [^:]*)?: ([a-z_]+(?:\.[a-z_]+)?): ', str(self))
        return "" if found is None else found[1]


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
    return "\n".join([HEADING, *(_block(image) for image in catalogue.images if not image.owner)])


def rewritten(raw: bytes, wanted: Catalogue, *, name: str) -> str:
    """Return a catalogue's file with these images instead of its own: comments stay, and so does what is unchanged.

    Raises:
        CatalogueError: the file is not valid, or not written as one table ``[[image]]`` for each image.
    """
    own = parse_catalogue(raw, name=name)
    head, *blocks = _blocks(raw.decode("utf-8").rstrip("\n") + "\n")
    found = dict(zip((image.slug for image in own.images), blocks, strict=False))
    parts = [head]
    for image in wanted.images:
        before, block = own.entry(image.slug), found.get(image.slug)
        if before is None or block is None:
            parts.append(f"\n{_block(image)}")
        elif changes := changes_to(entry_of(before), entry_of(image)):
            document = tomlkit.parse(block)
            table = document["image"][0]
            for key, value in changes.items():
                if value is None:
                    del table[key]
                else:
                    table[key] = tomlkit.parse(f"value = {_toml(value)}")["value"]
            parts.append(tomlkit.dumps(document))
        else:
            parts.append(block)
    text = re.sub(r"\n{3,}", "\n\n", "".join(parts))
    if len(blocks) != len(own.images) or parse_catalogue(text.encode(), name=name) != wanted:
        raise CatalogueError(
            f"{name}: it is not written as one table [[image]] for each image; change it by hand"
        )
    return text


def _blocks(text: str) -> list[str]:
    """Return what is before the first image, and each image with the comments right above it."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for number, line in enumerate(lines):
        if IMAGE.match(line):
            while number > starts[-1] and lines[number - 1].startswith("#"):
                number -= 1
            starts.append(number)
    return ["".join(lines[first:end]) for first, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all; its rights and owner stay.

    Raises:
        CatalogueError: it cannot be written.
    """
    path = path.resolve()
    beside = path.with_name(f".{path.name}.new")
    try:
        before = path.stat()
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), before.st_mode & 0o7777)
            if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise CatalogueError(f"{path.name} cannot be written ({error.strerror}); it is as it was") from None


def _block(image: Image) -> str:
    lines = [f"{key} = {_toml(value)}" for key, value in entry_of(image).items()]
    return "\n".join(["[[image]]", *lines, ""])


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    # Numbers, truth values, strings and lists of them are written as in JSON, escapes and all.
    return json.dumps(value, ensure_ascii=False)
