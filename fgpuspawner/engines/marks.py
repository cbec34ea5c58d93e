"""The names by which what an installation has started is known again, in any engine that names things."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable

from fgpu_scheduler import Session

INSTALLATION = "fgpu.installation"
SESSION = "fgpu.session"
ATTEMPT = "fgpu.attempt"
NODE = "fgpu.node"
MOST_OF_USER = 200
"""Characters of a user's part of the name of a folder or volume: file systems take 255 for the whole name."""


def user_part(escaped: str, separator: str) -> str:
    """Return a user's escaped name; of a long one the beginning and a digest, after what no escaped name has."""
    if len(escaped) <= MOST_OF_USER:
        return escaped
    return f"{escaped[: MOST_OF_USER // 2]}{separator}{hashlib.sha256(escaped.encode()).hexdigest()}"


def name_of(installation: str, session_id: int, attempt: int) -> str:
    """Return the name of what runs an attempt of a session. No other attempt ever has it."""
    return f"fgpu-{installation}-{session_id}-{attempt}"


def names_of(installation: str, session: Session) -> list[str]:
    """Return the names of all of a session's attempts so far."""
    return [name_of(installation, session.id, attempt) for attempt in range(1, session.attempt + 1)]


def session_and_attempt(name: str, installation: str) -> tuple[int, int] | None:
    """Return session and attempt of this installation by a name; None for any other name."""
    prefix = f"fgpu-{installation}-"
    match = re.fullmatch(r"([1-9][0-9]{0,17})-([1-9][0-9]{0,8})", name.removeprefix(prefix))
    if not name.startswith(prefix) or match is None:
        return None
    return int(match[1]), int(match[2])


def of_others(found: Iterable[tuple[str, str]], installation: str) -> Counter[str]:
    """Return how many sessions each other installation has, of names and the installations that their labels name."""
    # Labels alone can be forged by an image.
    return Counter(
        other
        for name, other in found
        if other != installation and session_and_attempt(name, other) is not None
    )
