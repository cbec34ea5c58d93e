"""Values of a catalogue as they look in a file, for messages."""

from __future__ import annotations

import json
import re


def shown(value: object) -> str:
    """Return a value as it looks in a file, on one line and at most 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        # Python writes no number of more than 4300 digits, and nothing that is in a thousand tables.
        return "what is too long to be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."


def bare(key: str) -> str:
    """Return a key as it is written: quoted only where TOML asks for quotes."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else shown(key)


def kind(value: object) -> str:
    """Return what sort of value it is."""
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
