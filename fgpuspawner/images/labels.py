"""The labels of an image that say of it what its entry in a catalogue would say; docs/images.md lists them. Pure.

They are written by whoever built the image: what they say is checked like a file, and only proposed. What an
administrator alone decides is no label: whether it is the default, enabled, hidden, and whether it gives sudo. Neither
is what an image cannot know of itself: reference, digest, and the environment of local processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fgpuspawner.images.entry import AMOUNTS, entry_of
from fgpuspawner.images.model import Image

PREFIX = "fgpu."
SLUG = f"{PREFIX}slug"
PRIVATE = f"{PREFIX}private"
"""The label of every private image, which belongs to no catalogue, and how its others' names begin."""

TEXTS = ("slug", "name", "framework", "version", "python", "description", "icon", "cuda", "deprecated")
LISTS = ("kernels", "gpu_architectures", "groups", "users")
TABLES = ("minimum", "recommended")
WHOLE = ("gpu_memory_mib", "memory_mib")
LABELS = (
    *(PREFIX + key for key in (*TEXTS, *LISTS)),
    *(f"{PREFIX}{table}.{key}" for table in TABLES for key in AMOUNTS),
)
"""All of them, by their names."""


def labels_of(image: Image) -> dict[str, str]:
    """Return the labels that say what is known of an image."""
    entry = entry_of(image)
    found = {PREFIX + key: str(entry[key]) for key in TEXTS if key in entry}
    found |= {PREFIX + key: _joined(entry[key]) for key in LISTS if key in entry}
    for table in TABLES:
        found |= {f"{PREFIX}{table}.{key}": str(value) for key, value in entry.get(table, {}).items()}
    return found


def entry_from(labels: Mapping[str, str], reference: str) -> dict[str, Any]:
    """Return the entry that an image's labels propose, under this reference. It is not checked yet."""
    entry: dict[str, Any] = {key: labels[PREFIX + key] for key in TEXTS if labels.get(PREFIX + key)}
    entry |= {key: _split(labels[PREFIX + key]) for key in LISTS if labels.get(PREFIX + key)}
    for table in TABLES:
        values = {
            key: labels[f"{PREFIX}{table}.{key}"] for key in AMOUNTS if labels.get(f"{PREFIX}{table}.{key}")
        }
        if values:
            entry[table] = {key: _amount(key, value) for key, value in values.items()}
    return {**entry, "reference": reference}


def _joined(values: list[str]) -> str:
    plain = all(value == value.strip() and "," not in value and value[:1] != "[" for value in values)
    return ",".join(values) if plain else json.dumps(values, ensure_ascii=False)


def _split(text: str) -> object:
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return [part.strip() for part in text.split(",")]


def _amount(key: str, text: str) -> object:
    return int(text) if key in WHOLE and text.isascii() and text.isdigit() and len(text) < 12 else text
