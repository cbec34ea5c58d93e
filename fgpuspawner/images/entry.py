"""One image's entry: a table of TOML or JSON, checked by a pydantic model, and the `Image` that it describes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    field_validator,
)

from fgpu_scheduler import BadAmount, format_milli, parse_milli
from fgpuspawner.images.icons import ICONS
from fgpuspawner.images.model import Image

Entry = Mapping[str, object]

CUDA_VERSION = r"[0-9]{1,2}\.[0-9]{1,2}"
LARGEST_MIB = 10**9

# Docker's own grammar of a reference: [host[:port]/]path[:tag][@digest].
_HOST_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
# Only a dot, a port or this one name tell a host from the first part of a path.
_HOST = rf"(?=localhost[:/]|[^/]*[.:]){_HOST_LABEL}(?:\.{_HOST_LABEL})*(?::[0-9]{{1,5}})?"
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
REFERENCE = re.compile(rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::{_TAG})?(?:@sha256:[0-9a-f]{{64}})?")


class BadEntry(Exception):
    """The entry has a wrong value; the message names its key and what to write."""


def shown(value: object) -> str:
    """Return a value as it looks in a file, on one line and at most 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        # Python writes no number of more than 4300 digits, and nothing that is in a thousand tables.
        return "a value too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _to_milli(value: object) -> object:
    # A truth value is a number in Python, and none here.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    try:
        return parse_milli(str(value), field="")
    except BadAmount:
        raise ValueError from None


def _not_a_truth_value(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError
    return value


def _each_once(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError
    return values


_NUMBER = 'a number above 0 with at most three decimals, such as "0.5"'
_MIB = f"whole MiB, 1 to {LARGEST_MIB}"
Milli = Annotated[int, BeforeValidator(_to_milli), Field(gt=0, description=_NUMBER)]
Mib = Annotated[int, BeforeValidator(_not_a_truth_value), Field(gt=0, le=LARGEST_MIB, description=_MIB)]
Flag = Annotated[StrictBool, Field(description="true or false")]
Name = Annotated[str, Field(pattern=r".*\S")]
_NAMES = 'a list of names such as ["lab"], or leave the key out for all users'
Names = Annotated[list[Name], Field(min_length=1, max_length=1000, description=_NAMES)]


def _text(
    pattern: str = r".*\S.*", wanted: str = "a text of one line", default: Any = ..., *, longest: int = 200
) -> Any:
    return Field(
        default,
        pattern=rf"\A(?:{pattern})\Z",
        max_length=longest,
        description=f"{wanted}, at most {longest} characters",
    )


class _Table(BaseModel):
    """A table of a catalogue. The description of a field says what to write at its key."""

    model_config = ConfigDict(extra="forbid", regex_engine="python-re")

    @field_validator("*")
    @classmethod
    def _is_printable(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if not all(text.isprintable() for text in texts if isinstance(text, str)):
            raise ValueError
        return value


def _not_empty(value: object) -> object:
    # An empty table limits nothing, so its meaning would be a guess.
    if value == {}:
        raise ValueError
    return value


class Amounts(_Table):
    """The tables ``minimum`` and ``recommended``; fGPU and CPU in thousandths, 0 for none."""

    fgpu: Milli = 0
    gpu_memory_mib: Mib = 0
    cpu: Milli = 0
    memory_mib: Mib = 0


AmountsTable = Annotated[Amounts, BeforeValidator(_not_empty)]


class ImageEntry(_Table):
    """An entry of the catalogue. The keys are written and shown in this order."""

    slug: str = _text("[a-z0-9-]{1,40}", "a-z, 0-9 and -", longest=40)
    name: str = _text()
    framework: str = _text()
    version: str = _text()
    python: str = _text(r"[0-9]+(\.[0-9]+){0,2}", 'a version such as "3.11"')
    description: str = _text(".*", default="", longest=1000)
    icon: str = _text(f"({'|'.join(ICONS)})?", f"one of {', '.join(ICONS)}", "")
    kernels: Annotated[
        list[Annotated[str, Field(pattern=r"\A[A-Za-z0-9._-]{1,100}\Z")]], AfterValidator(_each_once)
    ] = Field(
        [], min_length=1, max_length=1000, description='different names of kernels, such as ["python3"]'
    )
    reference: str = _text(
        REFERENCE.pattern, 'a Docker image reference such as "fgpuspawner/base:0.1"', longest=400
    )
    digest: str = _text(r"(sha256:[0-9a-f]{64})?", '"sha256:" and 64 of 0-9 and a-f', "")
    environment: str = _text(
        r"(/(?!\.\.?(/|\Z))[A-Za-z0-9._+@-]+)*/?",
        'an absolute path of letters, digits and . _ + @ -, or "" for the Hub\'s own environment',
        "",
        longest=400,
    )
    gpu_architectures: Annotated[
        list[Annotated[str, Field(pattern=rf"\A{CUDA_VERSION}\Z")]], AfterValidator(_each_once)
    ] = Field(
        [],
        min_length=1,
        max_length=1000,
        description='different compute capabilities, such as ["7.0", "8.6"]',
    )
    cuda: str = _text(f"({CUDA_VERSION})?", 'a version such as "12.4"', "")
    minimum: AmountsTable = Field(Amounts(), description='a table such as { fgpu = "0.5" }')
    recommended: AmountsTable = Field(Amounts(), description='a table such as { fgpu = "0.5" }')
    sudo: Flag = False
    default: Flag = False
    enabled: Flag = True
    hidden: Flag = False
    deprecated: str = _text(".*", default="", longest=1000)
    groups: Names = []
    users: Names = []


KEYS, AMOUNTS = tuple(ImageEntry.model_fields), tuple(Amounts.model_fields)
TABLES = {"minimum": "min", "recommended": "recommended"}
"""The tables of amounts, and how the names of their amounts begin in `Image`."""


def _is_milli(amount: str) -> bool:
    return amount in ("fgpu", "cpu")


def _field(table: str, amount: str) -> str:
    return f"{TABLES[table]}_{amount}" + "_milli" * _is_milli(amount)


AMOUNT_FIELDS = tuple(_field(table, amount) for table in TABLES for amount in AMOUNTS)
"""The fields of `Image` for these amounts."""


def amounts_of(image: Image, table: str) -> dict[str, int]:
    """Return an image's minimum or recommended amounts: fGPU and CPU in thousandths, memory in MiB, 0 for none."""
    return {amount: getattr(image, _field(table, amount)) for amount in AMOUNTS}


def amount_text(amount: str, value: int) -> str:
    """Return the value of an amount as an entry writes it."""
    return format_milli(value) if _is_milli(amount) else str(value)


def read_entry(entry: Entry) -> Image:
    """Return the image that an entry describes.

    Raises:
        BadEntry: with the first wrong key.
    """
    try:
        found = ImageEntry.model_validate(entry)
    except ValidationError as e:
        raise BadEntry(_first_problem(e)) from None
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in found if key not in TABLES
    }
    for amount in AMOUNTS:
        least, usual = getattr(found.minimum, amount), getattr(found.recommended, amount)
        if 0 < usual < least:
            said, bound = amount_text(amount, usual), amount_text(amount, least)
            raise BadEntry(
                f"recommended.{amount}: {said} is below the minimum of {bound}; write at least that"
            )
        fields |= {_field("minimum", amount): least, _field("recommended", amount): usual}
    return Image(**fields)


def _first_problem(error: ValidationError) -> str:
    # A misspelt key comes before the missing one that it was meant to be.
    problems = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    keys = [key for key in problems[0]["loc"] if isinstance(key, str)]
    model: type[BaseModel] = Amounts if len(keys) > 1 else ImageEntry
    where = ".".join(key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else shown(key) for key in keys)
    if problems[0]["type"] == "extra_forbidden":
        near = get_close_matches(keys[-1], model.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(model.model_fields)}"
        return f"{where}: unknown key; {hint}"
    wanted = model.model_fields[keys[-1]].description
    if problems[0]["type"] == "missing":
        return f"{where}: missing; write {wanted}"
    return f"{where}: {shown(problems[0]['input'])} cannot be used; write {wanted}"


def entry_of(image: Image) -> dict[str, Any]:
    """Return the entry that `read_entry` reads as this image, without defaults."""
    found: dict[str, Any] = {}
    for key in KEYS:
        if key in TABLES:
            value: Any = {
                amount: amount_text(amount, own) if _is_milli(amount) else own
                for amount, own in amounts_of(image, key).items()
                if own
            }
        else:
            value = getattr(image, key)
        if value if key != "enabled" else not value:
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def changes_to(entry: Entry, wanted: Entry) -> dict[str, object]:
    """Return the changes that make ``wanted`` of an entry."""
    keys = [key for key in (*wanted, *entry) if key != "slug" and wanted.get(key) != entry.get(key)]
    return {key: wanted.get(key) for key in dict.fromkeys(keys)}
