"""The labels of an image that say of it what its entry in a catalogue would say; docs/images.md lists them. Pure.

The image's builder writes them: their values are checked like a file, and only proposed. What an
administrator alone decides is no label: whether it is the default, enabled, hidden, and whether it gives sudo. Neither
is what an image cannot know of itself: reference, digest, and the environment of local processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fgpuspawner.images.entry import AMOUNTS, TABLES, entry_of
from fgpuspawner.images.model import Image

PREFIX = "fgpu."
SLUG = f"{PREFIX}slug"
PRIVATE = f"{PREFIX}private"
"""The label of every private image, which belongs to no catalogue, and how its others' names begin."""
HANDOVER, HANDOVER_VERSION = f"{PREFIX}handover", 1
"""The label, with its value, of an image with a server apart from users' programs that waits for its identity."""

TEXTS = ("slug", "name", "framework", "version", "python", "description", "icon", "cuda", "deprecated")
LISTS = ("kernels", "gpu_architectures", "groups", "users")
LABELS = (
    *(PREFIX + key for key in (*TEXTS, *LISTS)),
    *(f"{PREFIX}{table}.{key}" for table in TABLES for key in AMOUNTS),
)
"""All of them, by their names."""


def labels_of(image: Image) -> dict[str, str]:
    """Return the labels that say what is known of an image."""
    found: dict[str, str] = {}
    for key, value in entry_of(image).items():
        if key in TEXTS:
            found[PREFIX + key] = value
        elif key in LISTS:
            plain = all(one == one.strip() and "," not in one and one[:1] != "[" for one in value)
            found[PREFIX + key] = ",".join(value) if plain else json.dumps(value, ensure_ascii=False)
        elif key in TABLES:
            found |= {f"{PREFIX}{key}.{amount}": str(own) for amount, own in value.items()}
    return found


def entry_from(labels: Mapping[str, str], reference: str) -> dict[str, Any]:
    """Return the entry that an image's labels propose, under this reference. It is not checked yet."""
    said = {label.removeprefix(PREFIX): text for label, text in labels.items() if label in LABELS and text}
    entry: dict[str, Any] = {key: text for key, text in said.items() if key in TEXTS}
    entry |= {key: _split(text) for key, text in said.items() if key in LISTS}
    for name, text in said.items():
        table, dot, key = name.partition(".")
        if dot:
            whole = key.endswith("_mib") and text.isascii() and text.isdigit() and len(text) < 12
            entry.setdefault(table, {})[key] = int(text) if whole else text
    return {**entry, "reference": reference}


def is_version(version: str, said: str) -> bool:
    """Return whether one of two versions is the beginning of the other, each up to what is no number: "+cu126"."""
    numbers = [re.findall(r"\d+", re.split(r"[^\d.]", text)[0]) for text in (version, said)]
    return all(one == other for one, other in zip(*numbers, strict=False))


def unlike(image: Image, labels: Mapping[str, str]) -> str:
    """Return which versions an image's labels tell that are not those of its entry, in words; else nothing."""
    found = {key: (labels.get(PREFIX + key, ""), getattr(image, key)) for key in ("version", "python")}
    wrong = [f"{key} {told}, not {said}" for key, (told, said) in found.items() if not is_version(told, said)]
    return f"its labels say {' and '.join(wrong)}" if wrong else ""


def _split(text: str) -> object:
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return [part.strip() for part in text.split(",")]
