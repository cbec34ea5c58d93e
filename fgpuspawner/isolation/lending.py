"""What sessions on one GPU share so that they can lend each other compute. isolation/README.md has the files.

For each GPU one folder in memory, which all its sessions may read: a word for each of them, which only that session may
write, and whose each hundredth of the period is, which only the Hub writes. What a session writes says that it has
work, and nothing else is believed of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from fgpuspawner.isolation.files import make_empty, make_folder, write_whole
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.slots import HUNDREDTHS, Slots

OWNERS = "owners"
WORD_BYTES = 8
PREFIX = "lending-"
NOBODY = 0
KEPT = 255
"""Of a hundredth that is not to be lent: of a session that does not lend, or of two."""


def folder_of(memory: Path, uuid: str) -> Path:
    """Return the folder of a GPU. A UUID may have characters that no file's name has."""
    return memory / f"{PREFIX}{hashlib.sha256(uuid.encode()).hexdigest()[:16]}"


def make_word(memory: Path, uuid: str, number: int) -> Path:
    """Make a session's word, one that says nothing, and return its path.

    It is another file than the one that had its name: whatever still has that one open writes what nobody reads.
    """
    make_folder(memory, mode=0o700)
    word = make_empty(make_folder(folder_of(memory, uuid), mode=0o755) / str(number), mode=0o666)
    # Its block is taken now: were the file system full later, it could not say anything.
    word.write_bytes(bytes(WORD_BYTES))
    return word


def owners(uuid: str, sessions: Iterable[Limits]) -> bytes:
    """Return whose each hundredth of the period is, by the limits of all ``sessions`` that live."""
    found = bytearray(HUNDREDTHS)
    for limit in (limit for one in sessions for limit in one.devices if limit.uuid == uuid):
        for hundredth in _each(limit.slots):
            found[hundredth] = KEPT if found[hundredth] != NOBODY or not limit.lending else limit.lending
    return bytes(found)


def _each(slots: Slots) -> list[int]:
    return [hundredth for first, end in slots for hundredth in range(first, end)]


def write_owners(memory: Path, sessions: Sequence[Limits]) -> None:
    """Write who owns what of each GPU that has such a folder. Nothing is written that stays as it is."""
    uuids = {limit.uuid for one in sessions for limit in one.devices}
    known = {folder_of(memory, uuid): uuid for uuid in uuids}
    for folder in memory.glob(f"{PREFIX}*"):
        text = owners(known.get(folder, ""), sessions)
        path = folder / OWNERS
        if not path.is_file() or path.read_bytes() != text:
            write_whole(path, text, mode=0o444)


def words(memory: Path) -> list[Path]:
    """Return the words of all sessions."""
    return [path for folder in memory.glob(f"{PREFIX}*") for path in folder.iterdir() if path.name.isdigit()]
