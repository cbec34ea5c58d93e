"""How much of a disk sessions take, who is above a limit, and the file in which the Hub tells the service.

Blocks are counted, not sizes: a file can have more of them than its size says, and a sparse one has less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fgpuspawner.meter.hub_file import HubFile

MIB = 2**20
TENTH_GIB = 2**30 / 10
GROWN = 0.25
"""A session that takes this much of the limit more than the limit is ended at the next look after its warning."""
ABOVE = 1.01
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class FolderUse:
    """What a folder takes with all in it. ``files`` is None where that is not told; ``largest`` are folders in it.

    ``uncounted`` says why it can be more: its owner keeps it from being counted.
    """

    bytes: int
    files: int | None = None
    largest: tuple[tuple[str, int], ...] = ()
    uncounted: str = ""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a session takes: by what it wrote outside its home, and by its home. None where that is not known.

    ``mounts`` are the file systems of this machine that it is on, where all of each is seen.
    """

    session: FolderUse | None = None
    home: FolderUse | None = None
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskLimit:
    """How much may be taken; 0 is without a limit."""

    mib: int = 0
    files: int = 0

    def level(self, taken: FolderUse | None) -> float:
        """Return how much of the limit is taken: above 1 is too much. What is not known counts as nothing.

        What cannot be counted counts as a little too much: nobody gets more by that.
        """
        if taken is None:
            return 0.0
        return max(
            ABOVE if taken.uncounted and (self.mib or self.files) else 0.0,
            taken.bytes / (self.mib * MIB) if self.mib else 0.0,
            (taken.files or 0) / self.files if self.files else 0.0,
        )


@dataclass(frozen=True, slots=True)
class DiskHistory:
    """One session's looks so far. ``home`` is the level of its home at the first look, at least 1."""

    home: float
    above_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """What sessions and homes may take, and for how long one may be above it before it is ended; None: for ever."""

    session: DiskLimit
    home: DiskLimit
    grace_s: int | None = None

    def level(self, use: DiskUse) -> float:
        """Return the level of what is nearest to, or furthest above, its limit."""
        return max(self.session.level(use.session), self.home.level(use.home))


def judged(
    history: DiskHistory | None, use: DiskUse, limits: DiskLimits, now_s: float
) -> tuple[DiskHistory, bool]:
    """Return the story with this look, and whether the session is to be ended. Pure.

    A session above a limit is warned first. A home can be above when a session starts: its owner then has the same time
    to make room in it.
    """
    session, home = limits.session.level(use.session), limits.home.level(use.home)
    base = max(1.0, home) if history is None else history.home
    if max(session, home) <= 1.0:
        return DiskHistory(1.0), False
    if history is None or history.above_since_s is None:
        return DiskHistory(base, now_s), False
    late = limits.grace_s is not None and now_s - history.above_since_s >= limits.grace_s
    grown = limits.grace_s is not None and (session > 1 + GROWN or home > base + GROWN)
    return history, late or grown


def amounts(use: DiskUse, limits: DiskLimits) -> str:
    """Return what is taken of what may be, for the owner: "3.2 of 20 GiB; home 12 of 50 GiB"."""
    parts = [
        f"{name}{_of(taken, limit)}"
        for name, taken, limit in (("", use.session, limits.session), ("home ", use.home, limits.home))
        if taken is not None
    ]
    largest = _largest(use)
    return "; ".join(parts) + (f"; most in {largest}" if largest else "")


def above_words(use: DiskUse, limits: DiskLimits) -> str:
    """Return which limits are passed, and by what."""
    parts = []
    for name, taken, limit in (("session", use.session, limits.session), ("home", use.home, limits.home)):
        if taken is not None and limit.level(taken) > 1:
            parts.append(f"this {name} takes {_of(taken, limit)}")
    largest = _largest(use)
    return " and ".join(parts) + (f", most in {largest}" if largest else "")


def _of(taken: FolderUse, limit: DiskLimit) -> str:
    least = "at least " if taken.uncounted else ""
    size = _gib(taken.bytes) + (f" of {_gib(limit.mib * MIB)}" if limit.mib else "") + " GiB"
    many = limit.files and (taken.files or 0) > limit.files
    why = f" (it cannot be counted: {taken.uncounted})" if taken.uncounted else ""
    return least + size + (f" and {taken.files} of {limit.files} files" if many else "") + why


def _gib(amount: float) -> str:
    return f"{amount / 2**30:.1f}".removesuffix(".0")


def _largest(use: DiskUse) -> str:
    found = [entry for taken in (use.session, use.home) if taken is not None for entry in taken.largest]
    named = sorted(found, key=lambda entry: -entry[1])[:MOST_NAMED]
    return ", ".join(f"{path} ({_gib(size)} GiB)" for path, size in named if size >= TENTH_GIB)


@dataclass(frozen=True, slots=True)
class DiskState:
    """What the Hub told last, in words for the owners, by session."""

    sessions: Mapping[int, str] = field(default_factory=dict)


DISK = HubFile("disk.json", DiskState)
