"""Files and folders for sessions: with the modes that are meant, whatever the umask, and following no links."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from fgpu_scheduler import FGPUError


class UnsafeFolder(FGPUError):
    """A folder is not this user's own, so that somebody else could change what is in it."""

    code = "unsafe_folder"


def make_folder(path: Path, *, mode: int) -> Path:
    """Make a folder, or take the one that is there if it is this user's own and no link; set its mode.

    Raises:
        UnsafeFolder: it is a link, no folder, or somebody else's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=mode)
    # By descriptor: what a name leads to can be exchanged between two looks at it.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise UnsafeFolder(f"{path} is no folder, or a link: {e.strerror}; remove it") from None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise UnsafeFolder(f"{path} belongs to somebody else; remove it, or set another folder")
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    return path


def write_whole(path: Path, data: bytes, *, mode: int) -> Path:
    """Write a file that appears whole or not at all, in place of what was there."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # Whatever the umask says.
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)
    return path


def copy_whole(source: Path, path: Path, *, mode: int) -> Path:
    """Copy a file so, unless the same bytes are there already: who runs or maps them keeps them."""
    data = source.read_bytes()
    try:
        same = not path.is_symlink() and path.read_bytes() == data
    except OSError:
        same = False
    if not same or stat.S_IMODE(path.stat().st_mode) != mode:
        write_whole(path, data, mode=mode)
    return path


def make_empty(path: Path, *, mode: int) -> Path:
    """Make an empty file in place of what was there."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    return path


def link(path: Path, target: Path) -> Path:
    """Make a link in place of what was there."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(path)
    return path


def read_bounded(path: Path, most: int) -> bytes:
    """Return what is in a regular file; raises OSError where it is none, a link, or larger than ``most``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path} has more than {most} bytes")
    return data


def remove_folder(path: Path) -> None:
    """Remove a folder and all in it, following no links. Removing it twice is fine."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
