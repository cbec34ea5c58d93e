"""What sessions on one GPU share so that they can lend each other compute. isolation/README.md has the files.

Each session has a folder in memory: a word for each of its devices, which only it may write, and for each device a
folder with the words of those who lend there and whose each hundredth of the period is. A word is one file, which has a
name in the folder of each of them: so mounts can be made before it is known whom a container will share a GPU with. What
a session writes says that it has work, and nothing else is believed of it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fgpuspawner.isolation.files import make_empty, make_folder, remove_folder
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.slots import HUNDREDTHS, Slots

log = logging.getLogger("fgpu.isolation")

FOLDER = "lending"
OWNERS = "owners"
OWN = "own-"
"""Before a device's place among a session's: the name of its word there."""
WORD_BYTES = 8
NOBODY = 0
KEPT = 255
"""Of a hundredth that is not to be lent: of a session that does not lend, or of two."""


def folder_of(memory: Path, name: str) -> Path:
    """Return the folder of a session, or of a container that waits for one."""
    return memory / FOLDER / name


def own_word(memory: Path, name: str, index: int) -> Path:
    """Return a session's word for one of its devices."""
    return folder_of(memory, name) / f"{OWN}{index}"


def make_words(memory: Path, name: str, count: int) -> Path:
    """Make the folder of a session of so many devices, with words that say nothing, and return it.

    They are other files than those that it had: whatever still has one open writes what nobody reads.
    """
    make_folder(memory, mode=0o700)
    remove_folder(folder_of(memory, name))
    folder = make_folder(folder_of(memory, name), mode=0o755)
    for index in range(count):
        make_folder(folder / str(index), mode=0o755)
        # Its block is taken now: were the file system full later, it could not say anything.
        make_empty(own_word(memory, name, index), mode=0o666).write_bytes(bytes(WORD_BYTES))
    return folder


def take_over(memory: Path, name: str, session_id: int) -> None:
    """Make the folder of a container that has waited its session's, with the mounts that it has."""
    if folder_of(memory, name).is_dir():
        remove_folder(folder_of(memory, str(session_id)))
        folder_of(memory, name).rename(folder_of(memory, str(session_id)))


def owners(uuid: str, sessions: Iterable[Limits]) -> bytes:
    """Return whose each hundredth of the period is, by the limits of all ``sessions`` that live."""
    found = bytearray(HUNDREDTHS)
    for limit in (limit for one in sessions for limit in one.devices if limit.uuid == uuid):
        for hundredth in _each(limit.slots):
            found[hundredth] = KEPT if found[hundredth] != NOBODY or not limit.lending else limit.lending
    return bytes(found)


def _each(slots: Slots) -> list[int]:
    return [hundredth for first, end in slots for hundredth in range(first, end)]


def introduce(memory: Path, sessions: Sequence[Limits]) -> None:
    """Show those who lend on each GPU each other's words, and say who owns what. Doing so twice is fine.

    In this order, so that it may end anywhere: who is named an owner can be heard. All of a GPU have the same file of
    owners, so all learn of a change at once.
    """
    used = set()
    for uuid in {limit.uuid for one in sessions for limit in one.devices if limit.lending}:
        places, words = [], {}
        for one in sessions:
            for index, limit in enumerate(one.devices):
                if limit.uuid == uuid and limit.lending:
                    places.append(folder_of(memory, str(one.session_id)) / str(index))
                    words[str(limit.lending)] = own_word(memory, str(one.session_id), index)
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
    """Give files names in a folder. Of whom that cannot be done, nobody hears, so it keeps its slots."""
    try:
        there = {entry.name: entry.inode() for entry in os.scandir(place)}
    except OSError as e:
        log.warning("A session cannot be shown who lends: %s", e)
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
    """Write who owns what where it stands: who reads meanwhile finds of each hundredth the old owner or the new one."""
    if file.read_bytes() != text:
        descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o644)
            os.pwrite(descriptor, text, 0)
        finally:
            os.close(descriptor)


def forget(memory: Path, name: str) -> None:
    """Remove a session's folder. Doing so twice is fine."""
    remove_folder(folder_of(memory, name))


def names(memory: Path) -> list[str]:
    """Return the names of all folders."""
    folder = memory / FOLDER
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def words(memory: Path) -> list[Path]:
    """Return the words of all sessions."""
    return list((memory / FOLDER).glob(f"*/{OWN}*"))
