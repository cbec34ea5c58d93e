"""What a session has changed, as one layer of an image: written as it is sent, and never whole in memory or on a disk.

Its header lines are written here, of what `changes` let through. The session gives nothing but the content of files, of
each exactly as many bytes as were said before: there is nothing in it to be read wrongly.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import stat
import tarfile
import zlib
from collections.abc import AsyncIterator, Iterator

from fgpuspawner.engines.base import CannotSave
from fgpuspawner.engines.kubernetes.images.changes import WHITEOUT, Changes, Entry

ENOUGH_BYTES = 2**19
"""So much is compressed at a time, in a thread."""
GZIP_WINDOW = 16 + zlib.MAX_WBITS
FAST = 1
TYPES = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE}


class Layer:
    """One layer in the making; the digests and sizes are known once all of it was taken."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._plain, self._packed = hashlib.sha256(), hashlib.sha256()
        self._gzip = zlib.compressobj(FAST, zlib.DEFLATED, GZIP_WINDOW)
        self.packed_bytes = 0

    @property
    def diff_id(self) -> str:
        """The digest of what is in it, unpacked."""
        return f"sha256:{self._plain.hexdigest()}"

    @property
    def digest(self) -> str:
        """The digest of its bytes."""
        return f"sha256:{self._packed.hexdigest()}"

    async def pieces(self, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield its bytes. ``content`` are the files', one after the other.

        Raises:
            CannotSave: there is less of it, or more.
        """
        waiting = bytearray()
        async for piece in self._tar(content):
            waiting += piece
            if len(waiting) >= ENOUGH_BYTES:
                yield await asyncio.to_thread(self._taken, bytes(waiting))
                waiting.clear()
        yield await asyncio.to_thread(self._taken, bytes(waiting), last=True)

    def _taken(self, plain: bytes, *, last: bool = False) -> bytes:
        self._plain.update(plain)
        packed = self._gzip.compress(plain)
        if last:
            packed += self._gzip.flush()
        self._packed.update(packed)
        self.packed_bytes += len(packed)
        return packed

    async def _tar(self, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        held = b""
        for path in self._changes.gone:
            yield _header(_whiteout(path))
        for entry in self._changes.entries:
            yield _header(_member(entry))
            missing = entry.size if entry.has_content else 0
            while missing:
                held = held or await _more(content)
                if not held:
                    raise CannotSave("the session's files could not all be read; save it again")
                piece, held = held[:missing], held[missing:]
                missing -= len(piece)
                yield piece
            if entry.has_content:
                yield bytes(-entry.size % tarfile.BLOCKSIZE)
        if held or await _more(content):
            raise CannotSave("the session gave more than its files have; save it again")
        yield bytes(2 * tarfile.BLOCKSIZE)


async def _more(content: AsyncIterator[bytes]) -> bytes:
    """Return what comes next; nothing at the end."""
    async for piece in content:
        if piece:
            return piece
    return b""


def _whiteout(path: str) -> tarfile.TarInfo:
    folder, name = posixpath.split(path)
    found = tarfile.TarInfo(posixpath.join(folder, WHITEOUT + name).lstrip("/"))
    found.mode = 0o600
    return found


def _member(entry: Entry) -> tarfile.TarInfo:
    found = tarfile.TarInfo(entry.path.lstrip("/"))
    found.type = tarfile.LNKTYPE if entry.link is not None else TYPES[stat.S_IFMT(entry.mode)]
    found.mode, found.uid, found.gid = stat.S_IMODE(entry.mode), entry.uid, entry.gid
    found.mtime = entry.mtime_s
    found.size = entry.size if entry.has_content else 0
    if entry.link is not None:
        found.linkname = entry.link.lstrip("/")
    elif entry.target is not None:
        found.linkname = entry.target
    return found


def _header(member: tarfile.TarInfo) -> bytes:
    # Of GNU's kind: names are bytes, whatever these are, and there is no limit on lengths and sizes.
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def wanted(changes: Changes) -> Iterator[tuple[str, int]]:
    """Yield the files whose content is needed, in order, with their sizes."""
    return ((entry.path, entry.size) for entry in changes.entries if entry.has_content)
