"""The files that a container has changed, as its engine reports them: a session can change millions."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from typing import Any

from docker.errors import NotFound

MOST_BYTES = 32 * 2**20
MOST_CHANGES = 500_000
PIECE_BYTES = 2**18


def changed_files(client: Any, container: str) -> dict[str, int]:
    """Return the changed paths with the kind of change: 0 modified, 1 added, 2 deleted. Blocks.

    Raises:
        DockerException: the engine does not answer.
        ValueError: there are too many.
    """
    answer = client._get(client._url("/containers/{0}/changes", container), stream=True)
    with contextlib.closing(answer):
        client._raise_for_status(answer)
        told = bytearray()
        for piece in answer.iter_content(PIECE_BYTES):
            told += piece
            if len(told) > MOST_BYTES:
                raise ValueError(
                    f"too many files have changed; at most {MOST_BYTES >> 20} MiB of their names are looked at"
                )
    return _entries(told.decode("utf-8", "replace"))


def _entries(text: str) -> dict[str, int]:
    """Return the entries of the engine's list; decoded one by one, so that other threads can run."""
    decode = json.JSONDecoder().raw_decode
    found: dict[str, int] = {}
    at = text.find("{")
    while at >= 0:
        entry, at = decode(text, at)
        found[str(entry["Path"])] = int(entry["Kind"])
        if len(found) > MOST_CHANGES:
            raise ValueError(f"more than {MOST_CHANGES} files have changed, and no more are looked at")
        at = text.find("{", at)
    return found


def read_file(client: Any, container: str, path: str, most_bytes: int) -> bytes:
    """Return a regular file's content; empty if it is none. Blocks.

    Raises:
        DockerException: the engine does not answer.
        ValueError: it is larger.
    """
    try:
        stream, _ = client.get_archive(container, path)
    except NotFound:
        return b""
    packed = io.BytesIO()
    for chunk in stream:
        packed.write(chunk)
        if packed.tell() > most_bytes:
            raise ValueError(f"{path} is larger than {most_bytes} bytes")
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        entry = tar.next()
        found = tar.extractfile(entry) if entry is not None and entry.isreg() else None
        return found.read() if found is not None else b""
