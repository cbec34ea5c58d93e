"""The GPU memory that kernel code takes, by image: learnt from its sessions, since it cannot be known before."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import TypeVar

from pydantic import TypeAdapter

from fgpuspawner.isolation.files import write_whole

log = logging.getLogger("fgpu.isolation")

NAME = "code.json"
MOST_MIB = 1024
"""Larger figures have another cause: memory taken between two questions, or allocations that bypassed libfgpu."""
KEPT = 3
MOST_USERS = 15
MOST_IMAGES = 500

Figures = dict[str, dict[str, list[int]]]
_FIGURES = TypeAdapter(Figures)


class CodeMemory:
    """The learnt sizes of kernel code; thread-safe, one for the Hub. With ``fixed_mib`` it learns nothing.

    It keeps the last figures of each user's sessions. Users with figures are charged their own median; others the
    median of at least two other users, so no single user sets what others pay.
    """

    def __init__(self, data: Path, *, fixed_mib: int | None = None) -> None:
        self._path = data / NAME
        self._fixed_mib = fixed_mib
        self._lock = threading.Lock()
        self._known: Figures = {} if fixed_mib is not None else self._read()

    @property
    def learns(self) -> bool:
        return self._fixed_mib is None

    def charged_mib(self, gpu: str, image: str, user: str) -> int:
        """Return what each context is charged for code, in MiB; 0 if unknown."""
        if self._fixed_mib is not None:
            return self._fixed_mib
        with self._lock:
            by_user = self._known.get(_key(gpu, image), {})
            own = by_user.get(_mark(user))
            others = [median_low(figures) for figures in by_user.values()]
        if own:
            return median_low(own)
        return median_low(others) if len(others) > 1 else 0

    def learn(self, gpu: str, image: str, user: str, mib: int) -> None:
        """Record what a session's process held beyond its charges, in MiB. Blocks."""
        if not 0 <= mib <= MOST_MIB:
            return
        with self._lock:
            by_user = self._known.pop(_key(gpu, image), {})
            figures = [*by_user.pop(_mark(user), []), mib]
            self._known[_key(gpu, image)] = by_user | {_mark(user): figures[-KEPT:]}
            _forget_oldest(self._known, MOST_IMAGES)
            _forget_oldest(self._known[_key(gpu, image)], MOST_USERS)
            write_whole(self._path, json.dumps(self._known).encode(), mode=0o600)

    def _read(self) -> Figures:
        try:
            found = _FIGURES.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            log.warning("%s cannot be read and is learnt again: %s", self._path, e)
            return {}
        return {
            key: own
            for key, by_user in found.items()
            if (own := {u: f for u, f in by_user.items() if _good(f)})
        }


def _good(figures: Sequence[int]) -> bool:
    return 0 < len(figures) <= KEPT and all(0 <= mib <= MOST_MIB for mib in figures)


T = TypeVar("T")


def _forget_oldest(kept: dict[str, T], most: int) -> None:
    for name in list(kept)[:-most]:
        del kept[name]


def _key(gpu: str, image: str) -> str:
    return f"{gpu}, {image}"


def _mark(user: str) -> str:
    """Return a pseudonym of the user: stored figures contain no names."""
    return hashlib.sha256(user.encode()).hexdigest()[:16]
