"""Measures the space of files without a name: removed, but still open somewhere.

Open descriptors can be invisible in every process: in flight in a socket, registered with io_uring, or held by a single
thread. The file system still counts their blocks as used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from fgpuspawner.isolation.files import HubFile

TYPES = ("ext2 ", "ext3 ", "ext4 ", "xfs ", "tmpfs ")
"""On these, used blocks are those of all files plus a constant; not so on btrfs, ZFS and NFS."""
LEAST = HubFile("file-systems.json", dict[str, int])
"""Lowest difference ever found, in bytes by mount: the file system's own overhead."""
ASKED = HubFile("count-files.json", dict[str, int])
"""File systems that a Hub without root asks to be counted, each with a number that the answer repeats."""
ANSWERS = HubFile("counted.json", dict[str, tuple[int, int, int]], mode=0o644)
"""The answers by mount: the number, and the result of `nameless_bytes`. Written by `fgpu-disk.service` as root."""
ANSWERED_IN = Path("/run/fgpu-disk")
COUNTER = Path("/etc/systemd/system/fgpu-disk.path")
"""The unit that starts `fgpu-disk.service` when `ASKED` changes; written by `fgpu setup`."""
PATIENCE_S = 1800.0
"""How long a Hub waits for an answer; a large disk takes minutes."""
DU = ("setpriv", "--pdeathsig", "KILL", "nice", "-n", "19", "du", "-x")
"""Counts one file system's files with low priority, and ends with the Hub."""


def mount_of(folder: str) -> tuple[str, str] | None:
    """Return where a folder's file system is mounted as a whole, and its type with options; None if unknown."""
    try:
        number = os.stat(folder).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    all_of_it = [f"{os.major(number)}:{os.minor(number)}", "/"]
    mounts = (line.partition(" - ") for line in lines if line.split()[2:4] == all_of_it)
    return next(((where.split()[4], what) for where, _, what in mounts if what.startswith(TYPES)), None)


def used_bytes(top: str) -> int:
    """Return the used bytes of a file system; raises OSError."""
    found = os.statvfs(top)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def nameless_bytes(top: str) -> tuple[int, int]:
    """Return the used bytes without a file name, at least and at most, as files change during the count. Blocks for
    minutes.

    Raises:
        OSError: the files cannot be counted.
    """
    before = used_bytes(top)
    command = [*DU, "-s", "-B1", "--", top]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    named = done.stdout.partition(b"\t")[0]
    if not named.isdigit():
        # du gives up when the folder it is in is moved.
        raise OSError(f"the files of {top} could not be counted: du ended with {done.returncode}")
    low, high = sorted((before, used_bytes(top)))
    return max(0, low - int(named)), max(0, high - int(named))


def is_counted() -> bool:
    """Return whether whole file systems can be counted: by this process, or by root for it."""
    return os.geteuid() == 0 or COUNTER.exists()


def counted(top: str, data: Path, answered_in: Path = ANSWERED_IN) -> tuple[int, int]:
    """Return `nameless_bytes`, through root's unit if this process is not root.

    Raises:
        OSError: the files cannot be counted, or no answer came.
    """
    if os.geteuid() == 0:
        return nameless_bytes(top)
    number, until_s = time.time_ns(), time.monotonic() + PATIENCE_S
    ASKED.write(data, {top: number})
    while time.monotonic() < until_s:
        known, low, high = ANSWERS.read(answered_in).get(top, (0, 0, 0))
        if known == number:
            return low, high
        time.sleep(0.5)
    raise OSError(f"the files of {top} were not counted within {PATIENCE_S:.0f} s: see fgpu-disk.service")


def answer(data: Path, answered_in: Path = ANSWERED_IN) -> None:
    """Count the file systems that the Hub asks for, as root. Only whole file systems, and only reading.

    Raises:
        OSError: they cannot be counted.
    """
    for top, number in ASKED.read(data).items():
        if (mount := mount_of(top)) is not None and mount[0] == top:
            found = (number, *nameless_bytes(top))
            ANSWERS.write(answered_in, {**ANSWERS.read(answered_in), top: found})


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
