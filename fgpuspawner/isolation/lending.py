"""The words of sessions: by them sessions on one GPU lend each other compute, and a parked one asks for its GPU.

isolation/README.md has their format.

1. Each session has a folder in memory with one word (8 bytes) for each of its devices. Only the session writes it, and
   it says only whether the session has work: nothing else that it writes is believed.
2. For each device the folder has a subfolder with the words of all sessions that lend there, and the file that names
   the owner of each hundredth of the period.
3. A word is one file with a hard link in each of these subfolders, so a container's mounts can be made before its
   neighbours are known.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fgpuspawner.isolation.files import make_empty, make_folder, read_bounded, remove_folder
from fgpuspawner.isolation.limits import HUNDREDTHS, Limits

log = logging.getLogger("fgpu.isolation")

FOLDER = "lending"
OWNERS = "owners"
OWN = "own-"
"""Prefix of a session's own word, before the device's index."""
WANTED = "wanted"
"""The word by which a parked session asks for its GPU: when a CUDA call waited last, in CLOCK_MONOTONIC milliseconds."""
WANTED_FOR_S = 5
WORD_BYTES = 8
UNOWNED = 0
NOT_LENT = 255
"""Owner of a hundredth that is not lent: of a session that does not lend, or of two sessions."""


def folder_of(memory: Path, name: str) -> Path:
    return memory / FOLDER / name


def own_word(folder: Path, index: int) -> Path:
    return folder / f"{OWN}{index}"


def make_words(memory: Path, name: str, count: int, *, parks: bool = False) -> Path:
    """Make the folder of a session that may lend on ``count`` devices, with empty words; return it.

    With ``parks`` it also has the word by which a parked session asks for its GPU. The files are new: a process that
    still has an old one open writes to a file without readers.
    """
    make_folder(memory, mode=0o700)
    remove_folder(folder_of(memory, name))
    folder = make_folder(folder_of(memory, name), mode=0o755)
    for index in range(count):
        make_folder(folder / str(index), mode=0o755)
        # Write it now, to allocate its block: on a full file system the session could not write it later.
        make_empty(own_word(folder, index), mode=0o666).write_bytes(bytes(WORD_BYTES))
    if parks:
        make_empty(folder / WANTED, mode=0o666).write_bytes(bytes(WORD_BYTES))
    return folder


def is_wanted(memory: Path, name: str) -> bool:
    """Return whether a CUDA call of a parked session waits now. The session writes the word, so it may lie."""
    try:
        word = read_bounded(folder_of(memory, name) / WANTED, WORD_BYTES)
    except OSError:
        return False
    age_ms = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 10**6 - int.from_bytes(word, "little")
    return len(word) == WORD_BYTES and 0 <= age_ms <= WANTED_FOR_S * 1000


def has_word(memory: Path, name: str) -> bool:
    """Return whether a session was given the word by which it asks for its GPU."""
    return (folder_of(memory, name) / WANTED).is_file()


def take_over(memory: Path, name: str, session_id: int) -> None:
    """Turn a warm container's folder into its session's; its mounts stay."""
    if folder_of(memory, name).is_dir():
        remove_folder(folder_of(memory, str(session_id)))
        folder_of(memory, name).rename(folder_of(memory, str(session_id)))


def owners(uuid: str, sessions: Iterable[Limits]) -> bytes:
    """Return the owner of each hundredth of the period, by the limits of all living ``sessions``."""
    found = bytearray(HUNDREDTHS)
    for limit in (limit for one in sessions for limit in one.devices if limit.uuid == uuid):
        for hundredth in (h for first, end in limit.slots for h in range(first, end)):
            found[hundredth] = NOT_LENT if found[hundredth] != UNOWNED or not limit.lending else limit.lending
    return bytes(found)


def publish(memory: Path, sessions: Sequence[Limits]) -> None:
    """Link the words of all sessions that lend on a GPU into each other's folders, and write the owners; idempotent.

    Links come first, then owners, then the removal of old links: wherever this ends, every named owner's word can be
    read. All sessions of a GPU share one file of owners, so all see a change at once.
    """
    used = set()
    for uuid in {limit.uuid for one in sessions for limit in one.devices if limit.lending}:
        places, words = [], {}
        for one in sessions:
            for index, limit in enumerate(one.devices):
                if limit.uuid == uuid and limit.lending:
                    folder = folder_of(memory, str(one.session_id))
                    places.append(folder / str(index))
                    words[str(limit.lending)] = own_word(folder, index)
        file = memory / f"{OWNERS}-{hashlib.sha256(uuid.encode()).hexdigest()[:16]}"
        used.add(file)
        file.touch()
        shown = {**words, OWNERS: file}
        for place in places:
            _link(place, shown)
        _write(file, owners(uuid, sessions))
        for place in places:
            _leave_only(place, shown)
    for file in set(memory.glob(f"{OWNERS}-*")) - used:
        file.unlink(missing_ok=True)


def _link(place: Path, shown: Mapping[str, Path]) -> None:
    """Link files into a folder. If a word cannot be linked, its session keeps its slots."""
    try:
        there = {entry.name: entry.inode() for entry in os.scandir(place)}
    except OSError as e:
        log.warning("The lending sessions of a GPU cannot be shown to one of them: %s", e)
        return
    for name, file in shown.items():
        try:
            if there.get(name) != file.lstat().st_ino:
                draft = place / f"{name}.new"
                draft.unlink(missing_ok=True)
                os.link(file, draft, follow_symlinks=False)
                draft.replace(place / name)
        except OSError as e:
            (place / name).unlink(missing_ok=True)
            log.warning("Whether a session has work cannot be shown to its neighbours: %s", e)


def _leave_only(place: Path, shown: Mapping[str, Path]) -> None:
    if place.is_dir():
        for path in place.iterdir():
            if path.name not in shown:
                path.unlink(missing_ok=True)


def _write(file: Path, text: bytes) -> None:
    """Write the owners in place: a concurrent reader sees the old or the new owner of each hundredth."""
    if file.read_bytes() != text:
        descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o644)
            os.pwrite(descriptor, text, 0)
        finally:
            os.close(descriptor)


def names(memory: Path) -> list[str]:
    folder = memory / FOLDER
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def words(memory: Path) -> list[Path]:
    return [word for name in (f"{OWN}*", WANTED) for word in (memory / FOLDER).glob(f"*/{name}")]
