"""How much of a file system is taken by files without a name: removed, and still held open somewhere.

Descriptors can be where no process shows them: in flight in a socket, registered with io_uring, of a thread alone. The
file system knows all the same that the blocks are taken.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fgpuspawner.meter.told import ToldFile

TYPES = ("ext2 ", "ext3 ", "ext4 ", "xfs ", "tmpfs ")
"""Used blocks are those of the files there, but for a constant. Not so on btrfs, ZFS and NFS."""
LEAST = ToldFile("file-systems.json", dict[str, int])
"""The least that was ever found without a name, in bytes, by mount: what the file system takes for itself."""
DU = ("setpriv", "--pdeathsig", "KILL", "nice", "-n", "19", "du", "-x")
"""Counts one file system's files with what the machine has left over, and ends with the Hub."""


def mount_of(folder: str) -> tuple[str, str] | None:
    """Return where all of a folder's file system is mounted, and its type with options; None if that is not known."""
    try:
        number = os.stat(folder).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    all_of_it = [f"{os.major(number)}:{os.minor(number)}", "/"]
    mounts = (line.partition(" - ") for line in lines if line.split()[2:4] == all_of_it)
    return next(((where.split()[4], what) for where, _, what in mounts if what.startswith(TYPES)), None)


def used_bytes(top: str) -> int:
    """Return what is taken of a file system; raises OSError."""
    found = os.statvfs(top)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def nameless_bytes(top: str) -> tuple[int, int]:
    """Return what is taken beyond the files that have a name, at least and at most: they change while they are counted.

    Blocks for minutes.

    Raises:
        OSError: they cannot be counted.
    """
    before = used_bytes(top)
    command = [*DU, "-s", "-B1", "--", top]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    named = done.stdout.partition(b"\t")[0]
    if not named.isdigit():
        # It gives up when a folder that it is in is moved.
        raise OSError(f"the files of {top} could not be counted: du ended with {done.returncode}")
    low, high = sorted((before, used_bytes(top)))
    return max(0, low - int(named)), max(0, high - int(named))
