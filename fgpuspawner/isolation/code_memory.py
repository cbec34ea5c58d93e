"""The GPU memory that kernel code takes, by image: learnt from its sessions, since it cannot be known before."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from statistics import median_low
from typing import Annotated, TypeVar

from pydantic import Field

from fgpuspawner.isolation.files import HubFile

MOST_MIB = 1024
"""Larger figures have another cause: memory taken between two questions, or allocations that bypassed libfgpu."""
KEPT = 3
MOST_USERS = 15
MOST_IMAGES = 500

T = TypeVar("T")
_Mib = Annotated[int, Field(ge=0, le=MOST_MIB)]
CODE = HubFile("code.json", dict[str, dict[str, Annotated[list[_Mib], Field(min_length=1, max_length=KEPT)]]])
"""The last figures, by GPU and image and by a pseudonym of the user: the file contains no names."""


class CodeMemory:
    """The learnt sizes of kernel code; thread-safe, one for the Hub. With ``fixed_mib`` it learns nothing.

    It keeps the last figures of each user's sessions. Users with figures are charged their own median; others the
    median of at least two other users, so no single user sets what others pay.
    """

    def __init__(self, data: Path, *, fixed_mib: int | None = None) -> None:
        self._data = data
        self._fixed_mib = fixed_mib
        self._lock = threading.Lock()
        self._known = CODE.read(data)

    @property
    def learns(self) -> bool:
        return self._fixed_mib is None

    def charged_mib(self, gpu: str, image: str, user: str) -> int:
        """Return what each context is charged for code, in MiB; 0 if unknown."""
        if self._fixed_mib is not None:
            return self._fixed_mib
        with self._lock:
            by_user = self._known.get(f"{gpu}, {image}", {})
            own = by_user.get(_pseudonym(user))
            others = [median_low(figures) for figures in by_user.values()]
        if own:
            return median_low(own)
        return median_low(others) if len(others) > 1 else 0

    def learn(self, gpu: str, image: str, user: str, mib: int) -> None:
        """Record what a session's process held beyond its charges, in MiB. Blocks."""
        if not 0 <= mib <= MOST_MIB:
            return
        key, mark = f"{gpu}, {image}", _pseudonym(user)
        with self._lock:
            by_user = self._known.pop(key, {})
            figures = [*by_user.pop(mark, []), mib][-KEPT:]
            self._known = _newest(
                {**self._known, key: _newest({**by_user, mark: figures}, MOST_USERS)}, MOST_IMAGES
            )
            CODE.write(self._data, self._known)


def _newest(entries: dict[str, T], most: int) -> dict[str, T]:
    return dict(list(entries.items())[-most:])


def _pseudonym(user: str) -> str:
    return hashlib.sha256(user.encode()).hexdigest()[:16]
