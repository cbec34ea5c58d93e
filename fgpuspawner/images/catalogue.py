"""The image catalogue: images/catalogue.toml, checked whole, then only looked at.

A catalogue that is wrong anywhere is refused as a whole, with one line that says where and what
would work: an administrator's typing mistake must never quietly change who may start what.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fgpu_scheduler import FGPUError
from fgpuspawner.images.entry import SLUG, Entry, read_entry
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.saying import shown
from fgpuspawner.images.values import path_shown

__all__ = ["Catalogue", "CatalogueError", "Image", "load_catalogue"]


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


class _Reader:
    """Reads one file; holds what messages need to say where."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: list[str] = []
        self._headers: list[int] = []

    def read(self, raw: bytes) -> Catalogue:
        document = self._parse(self._text(raw))
        entries = self._entries(document)
        # Line numbers are told only where every entry was written as a [[image]] of its own.
        headers = [
            number for number, line in enumerate(self._lines) if re.match(r"\s*\[\[\s*image\s*\]\]", line)
        ]
        self._headers = headers if len(headers) == len(entries) else []
        images = tuple(self._image(index, entry) for index, entry in enumerate(entries))
        self._check_together(images)
        return Catalogue(images)

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            self._refuse("not UTF-8; save the file as UTF-8", line=line)

    def _parse(self, text: str) -> Mapping[str, object]:
        self._lines = text.split("\n")
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            # tomllib says where only in its message.
            where = r"(?:line (\d+), column \d+|end of document)"
            said = re.fullmatch(rf"(.*) \(at {where}\)", str(error), re.DOTALL)
            what, line = (said[1], said[2]) if said else (str(error), None)
            number = int(line) if line else len(text.rstrip("\n").split("\n"))
            self._refuse(f"not TOML: {what}", line=number)
        except RecursionError:
            self._refuse("not TOML that can be read: nested too deeply")
        except ValueError:
            # What tomllib itself refuses came above.
            self._refuse("not TOML that can be read: a number in it has too many digits")

    def _entries(self, document: Mapping[str, object]) -> Sequence[Entry]:
        for key in document:
            if key != "image":
                self._refuse(f"unknown table {shown(key)}; every image is an [[image]]")
        entries = document.get("image", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self._refuse('"image" must be a list of tables: write [[image]], with two brackets')
        if not entries:
            self._refuse("no image; write one [[image]] with default = true")
        return entries

    def _image(self, index: int, entry: Entry) -> Image:
        slug = entry.get("slug")
        usable = isinstance(slug, str) and SLUG.fullmatch(slug)
        who = f"image {shown(slug)}" if usable else f"image {index + 1}"

        def refuse(path: tuple[str, ...], problem: str) -> NoReturn:
            self._refuse_entry(index, who, path, problem)

        return read_entry(entry, refuse)

    def _check_together(self, images: Sequence[Image]) -> None:
        first_of: dict[str, int] = {}
        for index, image in enumerate(images):
            if image.slug in first_of:
                # By number: the slug cannot tell the two apart.
                self._refuse_entry(
                    index,
                    f"image {index + 1}",
                    ("slug",),
                    f"{shown(image.slug)} is image {first_of[image.slug] + 1}'s already; slugs must differ",
                )
            first_of[image.slug] = index
        defaults = [index for index, image in enumerate(images) if image.default]
        if not defaults:
            self._refuse("no image is the default; write default = true in exactly one")
        if len(defaults) > 1:
            first, second = (images[index] for index in defaults[:2])
            self._refuse_entry(
                defaults[1],
                f"image {shown(second.slug)}",
                ("default",),
                f"{shown(first.slug)} is the default already; write true in exactly one",
            )

    def _refuse_entry(self, index: int, who: str, path: tuple[str, ...], problem: str) -> NoReturn:
        """Refuse an entry, pointing at the key's line, or at the entry's where it has none."""
        self._refuse(f"{who}: {path_shown(path)}: {problem}", line=self._line(index, path))

    def _line(self, index: int, path: tuple[str, ...]) -> int | None:
        """Return the line of what stands at this path, or of the nearest table around it."""
        if not self._headers:
            return None
        start = self._headers[index]
        found, depth = start + 1, 0
        table: tuple[str, ...] = ()
        here: tuple[str, ...]
        for number in range(start + 1, len(self._lines)):
            line = self._lines[number]
            if re.match(r"\s*\[\[\s*image\s*\]\]", line):
                break
            if re.match(r"\s*\[\s*image\s*\.", line):
                here = table = _written(line.partition("]")[0] + "]")[1:]
            else:
                key = re.match(r"[^=#]*=", line)
                here = (*table, *_written(f"{key[0]} 0")) if key else ()
            if depth < len(here) and here == path[: len(here)]:
                found, depth = number + 1, len(here)
        return found

    def _refuse(self, problem: str, *, line: int | None = None) -> NoReturn:
        where = self._name if line is None else f"{self._name}:{line}"
        # What a file says may reach a log: one line, whatever is in it.
        raise CatalogueError(" ".join(f"{where}: {problem}".split())) from None


def _written(line: str) -> tuple[str, ...]:
    """Return the keys that one line of TOML names, from the outermost in; none where it is none."""
    try:
        found: object = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    keys: list[str] = []
    while isinstance(found, dict) and found:
        key, found = next(iter(found.items()))
        keys.append(key)
    return tuple(keys)
