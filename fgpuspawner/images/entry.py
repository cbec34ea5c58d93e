"""One image's entry, as a table of TOML or JSON, and the `Image` that it means: the same facts, both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fgpu_scheduler import format_milli
from fgpuspawner.images.icons import ICONS
from fgpuspawner.images.model import Image
from fgpuspawner.images.values import Values

Entry = Mapping[str, object]

CUDA_VERSION = re.compile(r"[0-9]{1,2}\.[0-9]{1,2}")
SLUG = re.compile(r"[a-z0-9-]{1,40}")
LONG, LONGEST = 400, 1000
"""Characters: of references and paths, and of what is written for people."""

# Docker's own grammar of a reference: [host[:port]/]path[:tag][@digest].
_HOST_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
# Only a dot, a port or this one name tell a host from the first part of a path.
_HOST = rf"(?=localhost[:/]|[^/]*[.:]){_HOST_LABEL}(?:\.{_HOST_LABEL})*(?::[0-9]{{1,5}})?"
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
REFERENCE = re.compile(rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::{_TAG})?(?:@sha256:[0-9a-f]{{64}})?")

Reader = Callable[[Values, str], Any]


def _text(pattern: str | re.Pattern[str], wanted: str, **more: Any) -> Reader:
    return partial(Values.text, pattern=re.compile(pattern), wanted=wanted, **more)


def _icon(values: Values, key: str) -> str:
    icon = values.text(key, fallback="")
    if icon and icon not in ICONS:
        hint = "pictures from elsewhere are not shown; " if ":" in icon or "/" in icon else ""
        values.refuse(key, f"there is no icon of this name; {hint}choose one of {', '.join(ICONS)}")
    return icon


def _amounts(values: Values, key: str) -> Values:
    return values.table(key, AMOUNTS)


KEYS: Mapping[str, Reader] = {
    "slug": _text(SLUG, "1 to 40 of a-z, 0-9 and -"),
    "name": Values.text,
    "framework": Values.text,
    "version": Values.text,
    "python": _text(r"[0-9]+(\.[0-9]+){0,2}", 'a version such as "3.11"'),
    "description": partial(Values.text, fallback="", max_length=LONGEST),
    "icon": _icon,
    "kernels": partial(
        Values.words,
        pattern=re.compile(r"[A-Za-z0-9._-]{1,100}"),
        wanted="a kernel's name such as python3, at most 100 of A-Z, a-z, 0-9, ., _ and -",
        example='["python3"]',
    ),
    "reference": _text(REFERENCE, 'a Docker image reference such as "fgpuspawner/base:0.1"', max_length=LONG),
    "digest": _text(r"sha256:[0-9a-f]{64}", '"sha256:" and 64 of 0-9 and a-f', fallback=""),
    "environment": _text(
        r"(/.*)?",
        'an absolute path such as "/opt/torch", or "" for the Hub\'s own environment',
        fallback="",
        max_length=LONG,
    ),
    "gpu_architectures": partial(
        Values.words,
        pattern=CUDA_VERSION,
        wanted='compute capabilities such as "7.0"',
        example='["7.0", "8.6"]',
    ),
    "cuda": _text(CUDA_VERSION, 'a version such as "12.4"', fallback=""),
    "minimum": _amounts,
    "recommended": _amounts,
    "sudo": Values.flag,
    "default": Values.flag,
    "enabled": partial(Values.flag, fallback=True),
    "hidden": Values.flag,
    "deprecated": partial(Values.text, fallback="", max_length=LONGEST),
    "groups": Values.names,
    "users": Values.names,
}
"""Every key of an entry with what reads it, in the order in which they are written and shown."""

AMOUNTS: Mapping[str, Reader] = {
    "fgpu": Values.milli,
    "gpu_memory_mib": Values.mib,
    "cpu": Values.milli,
    "memory_mib": Values.mib,
}
"""The keys of the tables ``minimum`` and ``recommended``."""
TABLES = {"minimum": "min", "recommended": "recommended"}
"""How the names of their amounts begin in `Image`."""


def _field(table: str, amount: str) -> str:
    return f"{TABLES[table]}_{amount}" + ("_milli" if AMOUNTS[amount] is Values.milli else "")


AMOUNT_FIELDS = tuple(_field(table, amount) for table in TABLES for amount in AMOUNTS)
"""All of them, as `Image` has them."""


def amounts_of(image: Image, table: str) -> dict[str, int]:
    """Return an image's minimum, or what is recommended: fGPU and CPU in thousandths, memory in MiB, 0 for none."""
    return {amount: getattr(image, _field(table, amount)) for amount in AMOUNTS}


def amount_text(amount: str, value: int) -> str:
    """Return one of them as it is written."""
    return format_milli(value) if AMOUNTS[amount] is Values.milli else str(value)


def read_entry(entry: Entry) -> Image:
    """Return the image that an entry means.

    Raises:
        BadEntry: with the first thing that is wrong.
    """
    values = Values(entry)
    values.check_keys(KEYS)
    found = {key: read(values, key) for key, read in KEYS.items()}
    minimum, recommended = (found.pop(table) for table in TABLES)
    for amount, read in AMOUNTS.items():
        least, usual = read(minimum, amount), read(recommended, amount)
        if usual and usual < least:
            said, bound = amount_text(amount, usual), amount_text(amount, least)
            recommended.refuse(amount, f"{said} is below the minimum of {bound}; write at least that")
        found |= {_field("minimum", amount): least, _field("recommended", amount): usual}
    return Image(**found)


def entry_of(image: Image) -> dict[str, Any]:
    """Return the entry that `read_entry` reads as this very image, without what goes without saying."""
    found: dict[str, Any] = {}
    for key in KEYS:
        if key in TABLES:
            amounts = {amount: value for amount, value in amounts_of(image, key).items() if value}
            value: Any = {
                a: amount_text(a, v) if AMOUNTS[a] is Values.milli else v for a, v in amounts.items()
            }
        else:
            value = getattr(image, key)
        if value if key != "enabled" else not value:
            found[key] = list(value) if isinstance(value, tuple) else value
    return found
