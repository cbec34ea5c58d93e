"""What a session has changed: its files beside those of its image, and what of it belongs into an image. Pure.

Both are lists of `inside`, in one order, so they are gone through once, side by side. The image's list was made where
nobody else has run anything: it is believed. The session's is believed in nothing that its user could not have done. A
file that they could not have made, or changed, stays as the image has it: so a server that is root's stays root's, and
what the node's driver has put there is not saved.
"""

from __future__ import annotations

import json
import posixpath
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from fgpuspawner.engines.base import CannotSave
from fgpuspawner.images.recipe import ADDED, DELETED

MODIFIED = 0
MOST_CHANGES = 500_000
MOST_SIZE = 2**50
MOST_NAMES_BYTES = 2**25
MOST_MODE, MOST_OWNER, MOST_TIME_NS = 2**16 - 1, 2**32 - 1, 2**63 - 1
LONGEST_LINE = 2**16
LONGEST_PATH, LONGEST_NAME, LONGEST_INODE = 4095, 255, 64
WHITEOUT = ".wh."
SKIPPED = ("/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/var/run")
"""Neither are these part of an image."""
FORGED = "what the session says of its files cannot be"
MANY = (
    f"more than {MOST_CHANGES} files have changed, or their names have more than {MOST_NAMES_BYTES >> 20} MiB; remove "
    "some, such as package caches"
)


@dataclass(frozen=True, slots=True)
class Who:
    """As whom a list was made: as whom the session's programs run. ``home`` is that user's."""

    user: int
    groups: frozenset[int]
    home: str


@dataclass(frozen=True, slots=True)
class Record:
    """A thing, as a list has it. ``mounted``: not the container's own; ``sealed``: a folder that nobody can look into."""

    path: str
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: str = ""
    target: str | None = None
    sealed: bool = False
    mounted: bool = False
    parts: tuple[bytes, ...] = field(init=False, repr=False)
    """By which it is sorted."""

    def __post_init__(self) -> None:
        """Take the path apart, once."""
        object.__setattr__(self, "parts", tuple(part for part in _bytes(self.path).split(b"/") if part))

    @property
    def is_folder(self) -> bool:
        """Whether it is one that was looked into."""
        return stat.S_ISDIR(self.mode)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, folder or link of a layer. ``link``: another name of what the layer has at that path."""

    path: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_s: int
    target: str | None = None
    link: str | None = None

    @property
    def has_content(self) -> bool:
        """Whether it is a file, and the first of its names."""
        return stat.S_ISREG(self.mode) and self.link is None


@dataclass(frozen=True, slots=True)
class Changes:
    """What goes into a layer, in order: entries, and the paths that are no more. ``kinds`` are for the recipe."""

    entries: Sequence[Entry]
    gone: Sequence[str]
    kinds: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """How many bytes the files have."""
        return sum(entry.size for entry in self.entries if entry.has_content)


# -- reading a list --------------------------------------------------------------------------------------


def who(file: BinaryIO) -> Who:
    """Return the list's first line.

    Raises:
        CannotSave: it is none.
    """
    try:
        said = json.loads(file.readline(LONGEST_LINE))
        groups = frozenset(_amount(group, MOST_OWNER) for group in said["groups"])
        home = posixpath.normpath(said["home"])
        if not home.startswith("/") or home == "/":
            raise CannotSave(
                f"the home folder is {home!r}, and would be the whole image; set HOME in the image"
            )
        return Who(_amount(said["user"], MOST_OWNER), groups, home)
    except (ValueError, RecursionError, KeyError, TypeError) as e:
        raise CannotSave("the session's image cannot be looked into: it has no list of its files") from e


def records(file: BinaryIO, skipped: Sequence[str]) -> Iterator[Record]:
    """Yield a list's records.

    Raises:
        CannotSave: one is none, or not where it belongs.
    """
    last: tuple[bytes, ...] | None = None
    while line := file.readline(LONGEST_LINE):
        try:
            record = _record(line)
        except (ValueError, RecursionError, LookupError, TypeError) as e:
            raise CannotSave(FORGED) from e
        parts = record.parts
        if (last is not None and parts <= last) or is_below(record.path, skipped):
            raise CannotSave(FORGED)
        last = parts
        yield record


def _record(line: bytes) -> Record:
    said = json.loads(line)
    path = said[0]
    if not isinstance(path, str) or not _is_plain(path):
        raise ValueError("no path")
    if len(said) == 1:
        return Record(path, mounted=True)
    _, mode, uid, gid, size, mtime_ns, ctime_ns, inode, target, sealed = said
    if not isinstance(inode, str) or not isinstance(sealed, bool):
        raise TypeError("no record")
    if len(inode) > LONGEST_INODE:
        raise ValueError("no inode")
    is_link = stat.S_ISLNK(_amount(mode, MOST_MODE))
    if is_link is not isinstance(target, str):
        raise ValueError("no link")
    if is_link and (not target or "\0" in target or len(_bytes(target)) > LONGEST_PATH):
        raise ValueError("no target")
    return Record(
        path,
        mode,
        _amount(uid, MOST_OWNER),
        _amount(gid, MOST_OWNER),
        _amount(size, MOST_SIZE),
        # A file can be of before 1970; an image's is not.
        _amount(max(0, mtime_ns), MOST_TIME_NS),
        _amount(ctime_ns, MOST_TIME_NS),
        inode,
        target,
        sealed,
    )


def _is_plain(path: str) -> bool:
    whole = _bytes(path)
    if path == "/":
        return True
    parts = whole.split(b"/")
    return (
        len(whole) <= LONGEST_PATH
        and b"\0" not in whole
        and parts[0] == b""
        and all(part not in (b"", b".", b"..") and len(part) <= LONGEST_NAME for part in parts[1:])
    )


def _bytes(text: str) -> bytes:
    # Of what is no text in a name, bytes that are none alone are let through: ValueError.
    return text.encode("utf-8", "surrogateescape")


def _amount(said: object, most: int) -> int:
    if not isinstance(said, int) or not 0 <= said <= most:
        raise ValueError("no amount")
    return said


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is one of these or below one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


# -- what has changed ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Folder:
    """A folder on the way to what is looked at. ``before`` is the image's; None of one that the session has made."""

    parts: tuple[bytes, ...]
    before: Record | None
    writable: bool
    reachable: bool


@dataclass(slots=True)
class _Comparison:
    """One going through."""

    who: Who
    entries: list[Entry] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    folders: list[_Folder] = field(default_factory=list)
    names: dict[str, Entry] = field(default_factory=dict)
    names_bytes: int = 0
    skipping: str | None = None

    def look(self, before: Record | None, now: Record | None) -> None:
        """Take in what the image has at a path, and what the session has there."""
        found = before or now
        assert found is not None
        if self.skipping is not None and is_below(found.path, [self.skipping]):
            return
        self.skipping = None
        parts = found.parts
        while self.folders and self.folders[-1].parts != parts[:-1]:
            self.folders.pop()
        if not self.folders:
            self._root(before, now, parts)
            return
        if (before and before.mounted) or (now and now.mounted) or (now and not _can_be_kept(now)):
            self.skipping = found.path
        elif now is None:
            assert before is not None
            self.skipping = found.path
            if self._may_remove(before):
                self.gone.append(found.path)
                self._note(found.path, DELETED)
        elif before is None:
            self._added(now, parts)
        else:
            self._both(before, now, parts)

    def _root(self, before: Record | None, now: Record | None, parts: tuple[bytes, ...]) -> None:
        # All else has to be in a folder that both have, or that the session has made.
        if parts or before is None or now is None or not before.is_folder or not now.is_folder:
            raise CannotSave(FORGED)
        self.folders.append(_Folder((), before, self._writable(before), self._can(before, 1)))

    def _added(self, now: Record, parts: tuple[bytes, ...]) -> None:
        if not (self._may_add and self._is_own(now)):
            self.skipping = now.path
            return
        if now.sealed:
            raise _unreadable(now.path)
        self._take(now, ADDED)
        if now.is_folder:
            self.folders.append(_Folder(parts, None, writable=True, reachable=True))

    def _both(self, before: Record, now: Record, parts: tuple[bytes, ...]) -> None:
        if before.is_folder and now.is_folder:
            if now.sealed and not before.sealed:
                raise _unreadable(now.path)
            if before.sealed or now.sealed:
                self.skipping = now.path
                return
            own = before
            if _rights(before) != _rights(now) and self._may_change(before, now):
                self._take(now, MODIFIED)
                own = now
            below = self.folders[-1]
            # Whose folder it was may have looked into it, and written there.
            self.folders.append(
                _Folder(
                    parts,
                    before,
                    self._writable(own) or before.uid == self.who.user,
                    below.reachable and (self._can(own, 1) or before.uid == self.who.user),
                )
            )
            return
        if _is_same(before, now):
            return
        if self._may_change(before, now):
            self._take(now, MODIFIED)
        else:
            self.skipping = now.path
            return
        if now.is_folder:
            self.folders.append(_Folder(parts, None, writable=True, reachable=True))
        elif before.is_folder:
            self.skipping = now.path

    def _take(self, now: Record, kind: int) -> None:
        if posixpath.basename(now.path).startswith(WHITEOUT):
            raise CannotSave(
                f"no image can have a file whose name begins with {WHITEOUT}; remove {_shown(now.path)}"
            )
        entry = Entry(
            now.path,
            now.mode & (stat.S_IFMT(now.mode) | 0o7777),
            now.uid,
            now.gid,
            now.size if stat.S_ISREG(now.mode) else 0,
            now.mtime_ns // 10**9,
            now.target,
        )
        if stat.S_ISREG(now.mode) and not now.inode.endswith(":1"):
            entry = self._linked(entry, now.inode)
        self.entries.append(entry)
        self.names_bytes += len(now.target or "")
        self._note(now.path, kind)

    def _linked(self, entry: Entry, inode: str) -> Entry:
        first = self.names.setdefault(inode, entry)
        own, other = ((e.mode, e.uid, e.gid, e.size) for e in (entry, first))
        if first is entry or own != other:
            return entry
        return Entry(entry.path, entry.mode, entry.uid, entry.gid, entry.size, entry.mtime_s, link=first.path)

    def _note(self, path: str, kind: int) -> None:
        self.kinds[path] = kind
        self.names_bytes += len(path)
        if len(self.kinds) > MOST_CHANGES or self.names_bytes > MOST_NAMES_BYTES:
            raise CannotSave(MANY)

    # What the session's user could have done.

    @property
    def _may_add(self) -> bool:
        return self.who.user == 0 or (self.folders[-1].writable and self.folders[-1].reachable)

    def _may_remove(self, before: Record) -> bool:
        if self.who.user == 0:
            return True
        folder = self.folders[-1].before
        sticky = folder is not None and bool(folder.mode & stat.S_ISVTX)
        return self._may_add and (
            not sticky or self.who.user in (before.uid, folder.uid if folder else before.uid)
        )

    def _may_change(self, before: Record, now: Record) -> bool:
        """Return whether they could have made this of that: by changing it, or by putting another in its place."""
        if self.who.user == 0:
            return True
        if not self.folders[-1].reachable:
            return False
        if stat.S_IFMT(before.mode) == stat.S_IFMT(now.mode):
            if before.uid == self.who.user and self._is_own(now):
                return True
            if stat.S_ISREG(before.mode) and self._can(before, 2) and _rights(before) == _rights(now):
                return True
        return self._may_remove(before) and not (before.is_folder and now.is_folder) and self._is_own(now)

    def _is_own(self, now: Record) -> bool:
        return self.who.user == 0 or (now.uid == self.who.user and now.gid in self.who.groups)

    def _writable(self, record: Record) -> bool:
        return self._can(record, 2)

    def _can(self, record: Record, right: int) -> bool:
        """Return whether they may write (2) what the image has, or go through it (1)."""
        if self.who.user in (0, record.uid):
            # Whose it is gives themselves the right.
            return True
        return bool((record.mode >> 3 if record.gid in self.who.groups else record.mode) & right)


def compared(who: Who, before: Iterable[Record], now: Iterable[Record]) -> Changes:
    """Return what has changed, and belongs into an image.

    ``who`` is whom the session's programs run as, as the image says. Both lists are in the order of `Record.parts`.

    Raises:
        CannotSave: the session's list cannot be, or there is what no image can have.
    """
    comparison = _Comparison(who)
    first, second = iter(before), iter(now)
    old, new = next(first, None), next(second, None)
    while old is not None or new is not None:
        if new is None or (old is not None and old.parts < new.parts):
            comparison.look(old, None)
            old = next(first, None)
        elif old is None or new.parts < old.parts:
            comparison.look(None, new)
            new = next(second, None)
        else:
            comparison.look(old, new)
            old, new = next(first, None), next(second, None)
    return Changes(comparison.entries, comparison.gone, comparison.kinds)


def _can_be_kept(record: Record) -> bool:
    return stat.S_ISREG(record.mode) or stat.S_ISDIR(record.mode) or stat.S_ISLNK(record.mode)


def _rights(record: Record) -> tuple[int, int, int]:
    return record.mode, record.uid, record.gid


def _is_same(before: Record, now: Record) -> bool:
    """Return whether nobody has touched a file. Nobody can set the instant of its change; the image's keep theirs."""
    return (*_rights(before), before.size, before.mtime_ns, before.ctime_ns, before.target) == (
        *_rights(now),
        now.size,
        now.mtime_ns,
        now.ctime_ns,
        now.target,
    )


def _unreadable(path: str) -> CannotSave:
    return CannotSave(f"{_shown(path)} cannot be read; give yourself the right to (chmod u+rx), or remove it")


def _shown(path: str) -> str:
    return ascii(path)[1:-1][:200]
