"""A file in which the Hub publishes its latest state for the service; replaced as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from fgpuspawner.images.availability import Availabilities
from fgpuspawner.isolation.files import write_whole

T = TypeVar("T")


class HubFile(Generic[T]):
    """The file ``name`` in a data folder; ``kind()`` is its empty content.

    Only its owner can read it, as it says what each user's processes do. The service runs as the same user.
    """

    def __init__(self, name: str, kind: type[T]) -> None:
        self.name = name
        self._kind = kind
        self._form = TypeAdapter(kind)

    def write(self, data: Path, told: T) -> None:
        write_whole(data / self.name, self._form.dump_json(told), mode=0o600)

    def read(self, data: Path) -> T:
        """Return the last content; the empty one if the file is missing or invalid."""
        try:
            return self._form.validate_json((data / self.name).read_bytes())
        except (OSError, ValueError):
            return self._kind()


AVAILABLE = HubFile("images.json", Availabilities)
WANTED: HubFile[dict[str, int]] = HubFile("images_wanted.json", dict)
"""Written by the service for the Hub: when an administrator last asked to pull an image, by slug."""
