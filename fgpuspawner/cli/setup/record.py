"""What setup has done to a machine: which files are its own and as it wrote them, and what it was told."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fgpu_scheduler import BadSettings

PATH = "/etc/jupyterhub/fgpu-setup.json"
VERSION = 1


@dataclass(slots=True)
class Record:
    """Written after every step, so that one which is broken off is taken up again, or taken back."""

    answers: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    """The digest of each file, as it was written."""
    before: dict[str, str] = field(default_factory=dict)
    """Where what was there before the first setup is kept, by the path that it is put back to."""
    made_user: str = ""
    folders: list[str] = field(default_factory=list)


def digest(text: str) -> str:
    """Return what tells two texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> Record | None:
    """Return the record; None where nothing was set up.

    Raises:
        BadSettings: it cannot be read as one.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise BadSettings(
            f"{path} is damaged; restore it from a backup, or remove it to set up again"
        ) from None
    if not isinstance(found, dict) or found.pop("version", None) != VERSION:
        raise BadSettings(f"{path} is of another version of fgpuspawner; use that one's fgpu setup")
    return Record(**found)


def as_text(record: Record) -> str:
    """Return the record as it is written."""
    return json.dumps({"version": VERSION, **asdict(record)}, indent=1, sort_keys=True) + "\n"
