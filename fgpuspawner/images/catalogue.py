"""The image catalogue: images/catalogue.toml, checked whole, then only looked at; and written as such a file.

A catalogue that is wrong anywhere is refused as a whole, with one line that says where and what
would work: an administrator's typing mistake must never quietly change who may start what.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fgpu_scheduler import FGPUError
from fgpuspawner.images.entry import SLUG, Entry, entry_of, read_entry
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.values import BadEntry, shown

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
    """Return the catalogue in this file.

    Raises:
        CatalogueError: the file cannot be read, is not TOML, or any entry of it is wrong.
    """
    return parse_catalogue(read_file(path), name=Path(path).name)


def read_file(path: Path | str) -> bytes:
    """Return what is in a catalogue's file.

    Raises:
        CatalogueError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        problem = "there is no such file; c.FGPU.catalogue names the catalogue"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise CatalogueError(f"{Path(path).name}: {problem}")


def parse_catalogue(raw: bytes, *, name: str) -> Catalogue:
    """Return the catalogue that this is; ``name`` is the file's, for messages.

    Raises:
        CatalogueError: it is not TOML, or any entry of it is wrong.
    """
    return _Reader(name).read(raw)


def checked(entry: Entry) -> Image:
    """Return the image of an entry of the database.

    Raises:
        CatalogueError: anything is wrong with it; one line.
    """
    try:
        return read_entry(entry)
    except BadEntry as e:
        raise CatalogueError(" ".join(f"image {shown(entry.get('slug'))}: {e}".split())) from None


class _Reader:
    """Reads one file; holds what messages need to say where."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: list[str] = []
        self._headers: list[int] = []

    def read(self, raw: bytes) -> Catalogue:
        document = self._parse(raw)
        for key in document:
            if key != "image":
                self._refuse(f"unknown table {shown(key)}; every image is an [[image]]")
        entries = document.get("image", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self._refuse('"image" must be a list of tables: write [[image]], with two brackets')
        if not entries:
            self._refuse("no image; write one [[image]] with default = true")
        # Line numbers are told only where every entry was written as a [[image]] of its own.
        headers = [number for number, line in enumerate(self._lines) if IMAGE.match(line)]
        self._headers = headers if len(headers) == len(entries) else []
        images: list[Image] = []
        for index, entry in enumerate(entries):
            slug = entry.get("slug")
            usable = isinstance(slug, str) and SLUG.fullmatch(slug)
            who = shown(slug) if usable else str(index + 1)
            try:
                images.append(read_entry(entry))
            except BadEntry as e:
                self._refuse_entry(index, who, e)
        self._check_together(images)
        return Catalogue(tuple(images))

    def _parse(self, raw: bytes) -> Mapping[str, object]:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            self._refuse("not UTF-8; save the file as UTF-8", line=line)
        self._lines = text.split("\n")
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            # tomllib says where only in its message.
            where = r"(?:line (\d+), column \d+|end of document)"
            said = re.fullmatch(rf"(.*) \(at {where}\)", str(error), re.DOTALL)
            what, line_said = (said[1], said[2]) if said else (str(error), None)
            number = int(line_said) if line_said else len(text.rstrip("\n").split("\n"))
            self._refuse(f"not TOML: {what}", line=number)
        except RecursionError:
            self._refuse("not TOML that can be read: nested too deeply")
        except ValueError:
            # What tomllib itself refuses came above.
            self._refuse("not TOML that can be read: a number in it has too many digits")

    def _check_together(self, images: Sequence[Image]) -> None:
        slugs = [image.slug for image in images]
        for index, slug in enumerate(slugs):
            first = slugs.index(slug)
            if first < index:
                # By number: the slug cannot tell the two apart.
                problem = f"{shown(slug)} is image {first + 1}'s already; slugs must differ"
                self._refuse_entry(index, str(index + 1), BadEntry(("slug",), problem))
        defaults = [index for index, image in enumerate(images) if image.default]
        if not defaults:
            self._refuse("no image is the default; write default = true in exactly one")
        if len(defaults) > 1:
            first, second = defaults[:2]
            problem = f"{shown(slugs[first])} is the default already; write true in exactly one"
            self._refuse_entry(second, shown(slugs[second]), BadEntry(("default",), problem))

    def _refuse_entry(self, index: int, who: str, wrong: BadEntry) -> NoReturn:
        """Refuse an entry with the key's line, or the entry's if the key has none."""
        self._refuse(f"image {who}: {wrong}", line=self._line(index, wrong.path))

    def _line(self, index: int, path: tuple[str, ...]) -> int | None:
        """Return the line of the value at this path, or of the nearest table around it."""
        if not self._headers:
            return None
        start = self._headers[index]
        found, depth = start + 1, 0
        table: tuple[str, ...] = ()
        here: tuple[str, ...]
        for number, line in enumerate(self._lines[start + 1 :], start + 2):
            if IMAGE.match(line):
                break
            if re.match(r"\s*\[\s*image\s*\.", line):
                here = table = _keys(line.partition("]")[0] + "]")[1:]
            else:
                key = re.match(r"[^=#]*=", line)
                here = (*table, *_keys(f"{key[0]} 0")) if key else ()
            if depth < len(here) and here == path[: len(here)]:
                found, depth = number, len(here)
        return found

    def _refuse(self, problem: str, *, line: int | None = None) -> NoReturn:
        where = self._name if line is None else f"{self._name}:{line}"
        # What a file says may reach a log: one line, whatever is in it.
        raise CatalogueError(" ".join(f"{where}: {problem}".split())) from None


def _keys(line: str) -> tuple[str, ...]:
    """Return the keys that one line of TOML names, from the outermost in; empty if the line has none."""
    try:
        found: object = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    keys: list[str] = []
    while isinstance(found, dict) and found:
        key, found = next(iter(found.items()))
        keys.append(key)
    return tuple(keys)


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
