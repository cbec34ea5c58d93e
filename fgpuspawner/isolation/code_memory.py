"""What the code of kernels takes of a GPU, by image: learnt from its sessions, as nothing can tell it before."""

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
"""What is above is something else: a program that took memory between two questions, or got around libfgpu."""
KEPT = 3
MOST_USERS = 15
MOST_IMAGES = 500

Figures = dict[str, dict[str, list[int]]]
_FIGURES = TypeAdapter(Figures)


class CodeMemory:
    """One for the Hub, safe to use from several threads. ``fixed_mib``: learn nothing, it is this for every image.

    Figures are of a user's sessions, the last ones. Who has some is charged by them, who has none the middle of the
    others', of two at least: nobody pays for what a single stranger's programs did, or made it look like.
    """

    def __init__(self, data: Path, *, fixed_mib: int | None = None) -> None:
        self._path = data / NAME
        self._fixed_mib = fixed_mib
        self._lock = threading.Lock()
        self._known: Figures = {} if fixed_mib is not None else self._read()

    @property
    def learns(self) -> bool:
        """Whether figures are of use."""
        return self._fixed_mib is None

    def charged_mib(self, gpu: str, image: str, user: str) -> int:
        """Return what each context is charged for code; 0 where that is not known yet."""
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
        """Note what a process of a session held beyond what it was charged. Blocks."""
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
    """Return what tells users apart, without saying who they are."""
    return hashlib.sha256(user.encode()).hexdigest()[:16]
