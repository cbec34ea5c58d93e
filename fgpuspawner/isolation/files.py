"""Files and folders with exact modes under any umask, written without following links."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from fgpu_scheduler import FGPUError

T = TypeVar("T")


class UnsafeFolder(FGPUError):
    """A folder belongs to another user, who could change its content."""

    code = "unsafe_folder"


def make_folder(path: Path, *, mode: int) -> Path:
    """Make a folder, or use the existing one if it is this user's own and no link; set its mode.

    Raises:
        UnsafeFolder: it is a link, no folder, or another user's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=mode)
    # Check by descriptor: the name could be pointed elsewhere between the check and the use.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise UnsafeFolder(f"{path} is no folder, or a link: {e.strerror}; remove it") from None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise UnsafeFolder(f"{path} belongs to another user; remove it, or set another folder")
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    return path


def write_whole(path: Path, data: bytes, *, mode: int) -> Path:
    """Write a file atomically, in place of what was there."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)
    return path


def copy_whole(source: Path, path: Path, *, mode: int) -> Path:
    """Copy a file atomically, unless the same bytes are there: processes that have it mapped keep it."""
    data = source.read_bytes()
    try:
        same = not path.is_symlink() and path.read_bytes() == data
    except OSError:
        same = False
    if not same or stat.S_IMODE(path.stat().st_mode) != mode:
        write_whole(path, data, mode=mode)
    return path


def make_zeros(path: Path, size: int) -> Path:
    """Make a file of zeros that every user may write, in place of an older one; the folder keeps other users out.

    Its blocks are allocated at once: on a full file system a later write would kill the writer.
    """
    draft = path.with_name(f"{path.name}.new")
    descriptor = os.open(make_empty(draft, mode=0o666), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
    return draft.replace(path)


def make_empty(path: Path, *, mode: int) -> Path:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    return path


def link(path: Path, target: Path) -> Path:
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(path)
    return path


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it is no regular file, a link, or larger than ``most`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path} has more than {most} bytes")
    return data


def remove_folder(path: Path) -> None:
    """Remove a folder and its content without following links; idempotent."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


class HubFile(Generic[T]):
    """The file ``name`` in a data folder, in which the Hub publishes its latest state; ``kind()`` is its empty content.

    By default only its owner can read it, as most say what each user's processes do. The service runs as the same user.
    """

    def __init__(self, name: str, kind: type[T], *, mode: int = 0o600) -> None:
        self.name = name
        self._kind = kind
        self._mode = mode
        self._form = TypeAdapter(kind)

    def write(self, data: Path, state: T) -> None:
        write_whole(data / self.name, self._form.dump_json(state), mode=self._mode)

    def read(self, data: Path) -> T:
        """Return the last content; the empty one if the file is missing or invalid."""
        try:
            return self._form.validate_json((data / self.name).read_bytes())
        except (OSError, ValueError):
            return self._kind()
