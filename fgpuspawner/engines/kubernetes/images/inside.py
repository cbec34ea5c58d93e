"""What is run in a session, and in a pod of its image beside it: a list of all files, and the content of some of them.

It goes there as text, to whatever Python is there, and uses nothing of ours. What it says of a session is the session's
word: `changes` judges it, and nothing follows from it that the session's user could not have done.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import BinaryIO, TextIO

PIECE_BYTES = 1 << 18


def listed(skipped: set[bytes], out: TextIO) -> None:
    """Write a line for each thing below the root, parents first, in the order of their names' bytes."""
    home = os.environ.get("HOME") or "/"
    groups = sorted({os.getgid(), *os.getgroups()})
    out.write(json.dumps({"user": os.getuid(), "groups": groups, "home": home}) + "\n")
    skipped = {*skipped, os.path.normpath(os.fsencode(home))}
    mounts = _mounts()
    waiting = [b"/"]
    while waiting:
        path = waiting.pop()
        shown = os.fsdecode(path)
        if path in skipped:
            continue
        if path in mounts and path != b"/":
            out.write(json.dumps([shown]) + "\n")
            continue
        try:
            found = os.lstat(path)
            target = os.fsdecode(os.readlink(path)) if stat.S_ISLNK(found.st_mode) else None
        except FileNotFoundError:
            continue
        sealed = False
        if stat.S_ISDIR(found.st_mode):
            try:
                names = sorted(os.listdir(path), reverse=True)
            except PermissionError:
                names, sealed = [], True
            waiting += [os.path.join(path, name) for name in names]
        said = [
            shown,
            found.st_mode,
            found.st_uid,
            found.st_gid,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
        ]
        out.write(
            json.dumps([*said, f"{found.st_dev}:{found.st_ino}:{found.st_nlink}", target, sealed]) + "\n"
        )


def _mounts() -> set[bytes]:
    """Return where something is mounted: nothing of that is the session's own."""
    with open("/proc/self/mountinfo", "rb") as file:
        fields = [line.split(b" ")[4] for line in file]
    return {field.decode("unicode_escape").encode("latin-1") if b"\\" in field else field for field in fields}


def packed(wanted: list[tuple[str, int]], out: BinaryIO) -> None:
    """Write the content of files, each with exactly as many bytes as are asked for."""
    for path, size in wanted:
        descriptor = os.open(os.fsencode(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            while size:
                # One that has become shorter is filled up: the next one is to begin where it is looked for.
                piece = file.read(min(size, PIECE_BYTES)) or bytes(min(size, PIECE_BYTES))
                out.write(piece)
                size -= len(piece)


def main() -> None:
    """Do what the arguments say: ``list SKIPPED...``, ``pack``, or ``read FILE MOST``."""
    task, *given = sys.argv[1:]
    if task == "list":
        listed({os.fsencode(path) for path in given}, sys.stdout)
    elif task == "pack":
        length = int(sys.stdin.buffer.readline())
        packed(json.loads(sys.stdin.buffer.read(length).decode("ascii")), sys.stdout.buffer)
    else:
        with open(given[0], "rb") as file:
            sys.stdout.buffer.write(file.read(int(given[1])))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
