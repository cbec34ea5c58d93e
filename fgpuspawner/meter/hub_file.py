"""A file in which the Hub tells the service what it saw last: whole each time, in place of what was."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from fgpuspawner.images.availability import Availabilities
from fgpuspawner.isolation.files import write_whole

T = TypeVar("T")


class HubFile(Generic[T]):
    """The file of this ``name`` in a data folder. ``kind()`` is nothing told.

    Only its user reads it, who is the service's, too: whose processes do what is nobody else's business.
    """

    def __init__(self, name: str, kind: type[T]) -> None:
        self.name = name
        self._kind = kind
        self._form = TypeAdapter(kind)

    def write(self, data: Path, told: T) -> None:
        """Write what is told."""
        write_whole(data / self.name, self._form.dump_json(told), mode=0o600)

    def read(self, data: Path) -> T:
        """Return what was told last; nothing where the file is not there, or makes no sense."""
        try:
            return self._form.validate_json((data / self.name).read_bytes())
        except (OSError, ValueError):
            return self._kind()


AVAILABLE = HubFile("images.json", Availabilities)
WANTED: HubFile[dict[str, int]] = HubFile("images_wanted.json", dict)
"""From the service to the Hub: when an administrator asked last for an image to be fetched, by its slug."""
