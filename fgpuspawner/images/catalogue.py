"""The image catalogue: images/catalogue.toml, read once, checked whole, then only looked at.

A catalogue that is wrong anywhere is refused as a whole, with one line that says where and what
would work: an administrator's typing mistake must never quietly change who may start what.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fgpu_scheduler import FGPUError

SLUG = re.compile(r"[a-z0-9-]{1,40}")
PYTHON_VERSION = re.compile(r"[0-9]+\.[0-9]+(\.[0-9]+)?")
TEXT_MAX_LENGTH = 200
DESCRIPTION_MAX_LENGTH = 1000
REFERENCE_MAX_LENGTH = 400

# Docker's own grammar of a reference: [host[:port]/]path[:tag][@digest].
_HOST_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
# Only a dot, a port or this one name tell a host from the first part of a path.
_HOST = rf"(?=localhost[:/]|[^/]*[.:]){_HOST_LABEL}(?:\.{_HOST_LABEL})*(?::[0-9]{{1,5}})?"
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
REFERENCE = re.compile(rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::{_TAG})?(?:@sha256:[0-9a-f]{{64}})?")


class CatalogueError(FGPUError, ValueError):
    """The catalogue cannot be used. The message is one line: file, line, image, key, remedy."""

    code = "bad_catalogue"


@dataclass(frozen=True, slots=True)
class Image:
    """One entry: something that a session can be started from.

    ``reference`` is what a container is made of; ``environment`` is the folder of the Python
    environment that a session as a local process runs in, "" for the Hub's own. With neither
    ``groups`` nor ``users`` everybody may use it, otherwise only those named by either.
    """

    slug: str
    name: str
    framework: str
    version: str
    python: str
    reference: str
    description: str = ""
    environment: str = ""
    default: bool = False
    groups: tuple[str, ...] = ()
    users: tuple[str, ...] = ()

    def is_visible_to(self, user: str, groups: Collection[str]) -> bool:
        """Return whether this user of these Hub groups may start it."""
        if not self.groups and not self.users:
            return True
        return user in self.users or any(group in groups for group in self.groups)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The images in the order of the file; slugs are unique and exactly one is the default."""

    images: tuple[Image, ...]

    def get(self, slug: str) -> Image | None:
        """Return the image of this slug, whoever may use it, or None."""
        return next((image for image in self.images if image.slug == slug), None)

    def visible_to(self, user: str, groups: Collection[str]) -> tuple[Image, ...]:
        """Return the images that this user of these Hub groups may start, in order."""
        return tuple(image for image in self.images if image.is_visible_to(user, groups))

    def default_for(self, user: str, groups: Collection[str]) -> Image | None:
        """Return the default where the user may start it, else their first, else None."""
        visible = self.visible_to(user, groups)
        chosen = next((image for image in visible if image.default), None)
        return chosen or next(iter(visible), None)


def load_catalogue(path: Path | str) -> Catalogue:
    """Return the catalogue in this file.

    Raises:
        CatalogueError: the file cannot be read, is not TOML, or any entry of it is wrong.
    """
    return _Reader(Path(path)).read()


class _Reader:
    """Reads one file; holds what messages need to say where."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._headers: list[int] = []

    def read(self) -> Catalogue:
        document = self._parse(self._text())
        entries = self._entries(document)
        # Line numbers are told only where every entry was written as a [[image]] of its own.
        headers = [
            number for number, line in enumerate(self._lines) if re.match(r"\s*\[\[\s*image\s*\]\]", line)
        ]
        self._headers = headers if len(headers) == len(entries) else []
        images = tuple(self._image(index, entry) for index, entry in enumerate(entries))
        self._check_together(images)
        return Catalogue(images)

    def _text(self) -> str:
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            self._refuse("there is no such file; c.FGPU.catalogue names the catalogue")
        except OSError as error:
            self._refuse(f"cannot be read: {error.strerror}")
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

    def _entries(self, document: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
        for key in document:
            if key != "image":
                self._refuse(f"unknown table {_shown(key)}; every image is an [[image]]")
        entries = document.get("image", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self._refuse('"image" must be a list of tables: write [[image]], with two brackets')
        if not entries:
            self._refuse("no image; write one [[image]] with default = true")
        return entries

    def _image(self, index: int, entry: Mapping[str, object]) -> Image:
        place = _Place(self, index, entry)
        place.check_keys()
        return Image(
            slug=place.text("slug", SLUG, "1 to 40 of a-z, 0-9 and -"),
            name=place.text("name"),
            framework=place.text("framework"),
            version=place.text("version"),
            python=place.text("python", PYTHON_VERSION, 'a version such as "3.11"'),
            reference=place.text(
                "reference",
                REFERENCE,
                'a Docker image reference such as "fgpuspawner/base:0.1"',
                max_length=REFERENCE_MAX_LENGTH,
            ),
            description=place.text("description", fallback="", max_length=DESCRIPTION_MAX_LENGTH),
            environment=place.text(
                "environment",
                re.compile(r"(/.*)?"),
                'an absolute path such as "/opt/torch", or "" for the Hub\'s own environment',
                fallback="",
                max_length=REFERENCE_MAX_LENGTH,
            ),
            default=place.flag("default"),
            groups=place.names("groups"),
            users=place.names("users"),
        )

    def _check_together(self, images: Sequence[Image]) -> None:
        first_of: dict[str, int] = {}
        for index, image in enumerate(images):
            if image.slug in first_of:
                # By number: the slug cannot tell the two apart.
                self.refuse_entry(
                    index,
                    f"image {index + 1}",
                    "slug",
                    f"{_shown(image.slug)} is image {first_of[image.slug] + 1}'s already; slugs must differ",
                )
            first_of[image.slug] = index
        defaults = [index for index, image in enumerate(images) if image.default]
        if not defaults:
            self._refuse("no image is the default; write default = true in exactly one")
        if len(defaults) > 1:
            first, second = (images[index] for index in defaults[:2])
            self.refuse_entry(
                defaults[1],
                f"image {_shown(second.slug)}",
                "default",
                f"{_shown(first.slug)} is the default already; write true in exactly one",
            )

    def refuse_entry(self, index: int, who: str, key: str | None, problem: str) -> NoReturn:
        """Refuse an entry, pointing at the key's line, or at the entry's where it has none."""
        said = f"{who}: {key}: {problem}" if key is not None else f"{who}: {problem}"
        self._refuse(said, line=self._line(index, key))

    def _line(self, index: int, key: str | None) -> int | None:
        if not self._headers:
            return None
        start = self._headers[index]
        for number in range(start + 1, len(self._lines)):
            line = self._lines[number]
            if re.match(r"\s*\[\[?\s*[\w\".-]+\s*\]", line):
                break
            if key is not None and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
                return number + 1
        return start + 1

    def _refuse(self, problem: str, *, line: int | None = None) -> NoReturn:
        where = self._path.name if line is None else f"{self._path.name}:{line}"
        # What a file says may reach a log: one line, whatever is in it.
        raise CatalogueError(" ".join(f"{where}: {problem}".split())) from None


class _Place:
    """One entry being read: takes values by key and refuses what is wrong there."""

    KEYS = (
        "slug",
        "name",
        "framework",
        "version",
        "python",
        "description",
        "reference",
        "environment",
        "default",
        "groups",
        "users",
    )

    def __init__(self, reader: _Reader, index: int, entry: Mapping[str, object]) -> None:
        self._entry = entry
        slug = entry.get("slug")
        usable = isinstance(slug, str) and SLUG.fullmatch(slug)
        who = f"image {_shown(slug)}" if usable else f"image {index + 1}"
        self._refuse: Callable[[str, str], NoReturn] = lambda key, problem: reader.refuse_entry(
            index, who, key, problem
        )

    def check_keys(self) -> None:
        for key in self._entry:
            if key not in self.KEYS:
                near = difflib.get_close_matches(key, self.KEYS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(self.KEYS)}"
                self._refuse(_bare(key), f"unknown key; {hint}")

    def text(
        self,
        key: str,
        pattern: re.Pattern[str] | None = None,
        wanted: str = "a text",
        *,
        fallback: str | None = None,
        max_length: int = TEXT_MAX_LENGTH,
    ) -> str:
        """Return a text; without a fallback the key must be there and say something."""
        if key not in self._entry:
            if fallback is None:
                self._refuse(key, f"missing; write {wanted}")
            return fallback
        value = self._entry[key]
        if not isinstance(value, str):
            self._refuse(key, f"{_shown(value)} is {_kind(value)}; write {wanted}")
        if len(value) > max_length:
            self._refuse(key, f"{len(value)} characters; at most {max_length} are allowed")
        if any(not character.isprintable() for character in value):
            self._refuse(key, f"{_shown(value)} has a line break or control character; remove it")
        if fallback is None and not value.strip():
            self._refuse(key, f"empty; write {wanted}")
        if pattern is not None and not pattern.fullmatch(value):
            self._refuse(key, f"{_shown(value)} cannot be used; write {wanted}")
        return value

    def flag(self, key: str) -> bool:
        value = self._entry.get(key, False)
        if not isinstance(value, bool):
            self._refuse(key, f"{_shown(value)} is {_kind(value)}; write true or false")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Return the names in a list; a list that names nobody is refused, not guessed at."""
        if key not in self._entry:
            return ()
        value = self._entry[key]
        if not isinstance(value, list):
            self._refuse(key, f'{_shown(value)} is {_kind(value)}; write a list such as ["lab"]')
        for name in value:
            if not isinstance(name, str):
                self._refuse(key, f"{_shown(name)} is {_kind(name)}; every entry must be a text")
            if not name.strip() or not name.isprintable():
                self._refuse(key, f"{_shown(name)} is no name; remove it")
        if not value:
            self._refuse(key, "empty; leave the key out to allow everybody, or name somebody")
        return tuple(value)


def _shown(value: object) -> str:
    """Return a value as it looks in a file, on one line and at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _bare(key: str) -> str:
    """Return a key as it is written: quoted only where TOML asks for quotes."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else _shown(key)


def _kind(value: object) -> str:
    match value:
        case bool():
            return "a truth value"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case dict():
            return "a table"
        case _:
            return "a date or time"
