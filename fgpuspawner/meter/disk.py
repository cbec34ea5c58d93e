"""Disk limits: what sessions use, which are above a limit, and the file in which the Hub publishes it.

Blocks are counted, not sizes: a file can have blocks behind its end, and a sparse file has fewer than its size.
"""

from __future__ import annotations

from dataclasses import dataclass

from fgpu_scheduler import MIB
from fgpuspawner.isolation.files import HubFile

TENTH_GIB = 2**30 / 10
GROWN = 0.25
"""A session that exceeds the limit by this part of it is ended at the first check after its warning."""
ABOVE = 1.01
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class FolderUse:
    """What folders take, with all in them. ``files`` is None if unknown; ``largest`` are the largest subfolders.

    ``uncounted`` says why it can be more: its owner prevents a complete count.
    """

    bytes: int
    files: int | None = None
    largest: tuple[tuple[str, int], ...] = ()
    uncounted: str = ""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a session takes outside its home, and its home; None if unknown.

    ``mounts`` are the file systems of this machine that it uses, if they are mounted as a whole.
    """

    session: FolderUse | None = None
    home: FolderUse | None = None
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskLimit:
    """A limit on size and number of files; 0: none."""

    mib: int = 0
    files: int = 0

    def level(self, taken: FolderUse | None) -> float:
        """Return the part of the limit that is used; above 1 is too much. Unknown use counts as none.

        Uncountable use counts as slightly too much, so that preventing the count gains nothing.
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
    """A session's earlier checks. ``home`` is the level of its home at the first check, at least 1."""

    home: float
    above_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """The limits of sessions and homes, and how long one may be exceeded; None: without end."""

    session: DiskLimit
    home: DiskLimit
    grace_s: int | None = None

    def level(self, use: DiskUse) -> float:
        """Return the higher of the two levels."""
        return max(self.session.level(use.session), self.home.level(use.home))


def judged(
    history: DiskHistory | None, use: DiskUse, limits: DiskLimits, now_s: float
) -> tuple[DiskHistory, bool]:
    """Return the history with this check, and whether the session must be ended. Pure.

    A session above a limit is warned first. A home can be above its limit when a session starts: then its owner has the
    same time to make room.
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
    """Return use and limits for the owner: "3.2 of 20 GiB; home 12 of 50 GiB"."""
    parts = [
        f"{name}{_of(taken, limit)}"
        for name, taken, limit in (("", use.session, limits.session), ("home ", use.home, limits.home))
        if taken is not None
    ]
    largest = _largest(use)
    return "; ".join(parts) + (f"; most in {largest}" if largest else "")


def above_words(use: DiskUse, limits: DiskLimits) -> str:
    """Return which limits are exceeded, and by how much."""
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


DISK = HubFile("disk.json", dict[int, str])
"""What the Hub found last, in words for the owners, by session."""
