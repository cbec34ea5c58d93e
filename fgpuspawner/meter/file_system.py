"""How much of a file system is taken by files without a name: removed, and still held open somewhere.

Descriptors can be where no process shows them: in flight in a socket, registered with io_uring, of a thread alone. The
file system knows all the same that the blocks are taken.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from pydantic import TypeAdapter

from fgpuspawner.isolation.files import write_whole
from fgpuspawner.meter.hub_file import HubFile

Answers = dict[str, tuple[int, int, int]]
TYPES = ("ext2 ", "ext3 ", "ext4 ", "xfs ", "tmpfs ")
"""Used blocks are those of the files there, but for a constant. Not so on btrfs, ZFS and NFS."""
LEAST = HubFile("file-systems.json", dict[str, int])
"""The least that was ever found without a name, in bytes, by mount: what the file system takes for itself."""
ASKED = HubFile("count-files.json", dict[str, int])
"""The file systems whose files a Hub that is not root asks to be counted, each with a number that the answer repeats."""
ANSWERS = Path("/run/fgpu-disk/counted.json")
"""The answers, by mount: the number, and what `nameless_bytes` returned. `fgpu-disk.service` writes them as root."""
COUNTER = Path("/etc/systemd/system/fgpu-disk.path")
"""The unit that starts `fgpu-disk.service` when `ASKED` changes; `fgpu setup` writes it."""
PATIENCE_S = 1800.0
"""How long a Hub waits for an answer: a large disk takes minutes."""
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


def is_counted() -> bool:
    """Return whether files of whole file systems can be counted here: by this process, or by root for it."""
    return os.geteuid() == 0 or COUNTER.exists()


def counted(top: str, data: Path, answers: Path = ANSWERS) -> tuple[int, int]:
    """Return `nameless_bytes`, which root's unit finds out if this process is not root.

    Raises:
        OSError: they cannot be counted, or no answer came.
    """
    if os.geteuid() == 0:
        return nameless_bytes(top)
    number, until_s = time.time_ns(), time.monotonic() + PATIENCE_S
    ASKED.write(data, {top: number})
    while time.monotonic() < until_s:
        known, low, high = _answers(answers).get(top, (0, 0, 0))
        if known == number:
            return low, high
        time.sleep(0.5)
    raise OSError(f"the files of {top} were not counted within {PATIENCE_S:.0f} s: see fgpu-disk.service")


def answer(data: Path, answers: Path = ANSWERS) -> None:
    """Count the files that the Hub asks for, as root. Only whole file systems are counted, and only read.

    Raises:
        OSError: they cannot be counted.
    """
    for top, number in ASKED.read(data).items():
        if (mount := mount_of(top)) is not None and mount[0] == top:
            found = {**_answers(answers), top: (number, *nameless_bytes(top))}
            write_whole(answers, TypeAdapter(Answers).dump_json(found), mode=0o644)


def _answers(path: Path) -> Answers:
    try:
        return TypeAdapter(Answers).validate_json(path.read_bytes())
    except (OSError, ValueError):
        return {}


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
