"""Which files a container has changed, as its engine tells it: a session can have made millions."""

from __future__ import annotations

import contextlib
import json
from typing import Any

MOST_BYTES = 32 * 2**20
MOST_CHANGES = 500_000
PIECE_BYTES = 2**18


def changed_files(client: Any, container: str) -> dict[str, int]:
    """Return the paths with the kinds of their changes; 0 is modified, 1 added, 2 deleted. Blocks.

    Raises:
        DockerException: the engine does not say.
        ValueError: there are more than are looked at.
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
    """Return the entries of the engine's list. One by one: as a whole, no other thread would get on meanwhile."""
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
