"""A catalogue as the file that `load_catalogue` reads back to the same one. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fgpuspawner.images.entry import entry_of
from fgpuspawner.images.model import Catalogue

HEADING = """\
# The images that users may choose from, as they were in force when `fgpu images export` wrote this file.
# docs/images.md says what each key means; `fgpu images check` whether all of it can be used.
"""


def written(catalogue: Catalogue) -> str:
    """Return the text of the file, without private images: these are in no file."""
    parts = [HEADING]
    for image in catalogue.images:
        if not image.owner:
            lines = [f"{key} = {_value(value)}" for key, value in entry_of(image).items()]
            parts.append("\n".join(["[[image]]", *lines, ""]))
    return "\n".join(parts)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            # TOML's strings have the escapes of JSON's.
            return json.dumps(value, ensure_ascii=False)
        case Mapping():
            return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
        case list():
            return "[" + ", ".join(_value(one) for one in value) + "]"
        case _:
            raise TypeError(f"no entry has {value!r}")
