"""Names and labels that identify what an installation has started, in every engine."""

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
"""Characters of the user's part in the name of a folder or volume; file systems allow 255 for the whole name."""


def user_part(escaped: str, separator: str) -> str:
    """Return a user's escaped name. A long one is cut, with a digest after a separator that no escaped name contains."""
    if len(escaped) <= MOST_OF_USER:
        return escaped
    return f"{escaped[: MOST_OF_USER // 2]}{separator}{hashlib.sha256(escaped.encode()).hexdigest()}"


def name_of(installation: str, session_id: int, attempt: int) -> str:
    """Return the name of what runs an attempt of a session; it is unique."""
    return f"fgpu-{installation}-{session_id}-{attempt}"


def names_of(installation: str, session: Session) -> list[str]:
    return [name_of(installation, session.id, attempt) for attempt in range(1, session.attempt + 1)]


def session_and_attempt(name: str, installation: str) -> tuple[int, int] | None:
    """Return session and attempt from a name of this installation; None for any other name."""
    prefix = f"fgpu-{installation}-"
    match = re.fullmatch(r"([1-9][0-9]{0,17})-([1-9][0-9]{0,8})", name.removeprefix(prefix))
    if not name.startswith(prefix) or match is None:
        return None
    return int(match[1]), int(match[2])


def of_others(found: Iterable[tuple[str, str]], installation: str) -> Counter[str]:
    """Return the number of sessions of each other installation, from pairs of a name and the label's installation."""
    # Labels alone can be forged by an image, so the name must agree.
    return Counter(
        other
        for name, other in found
        if other != installation and session_and_attempt(name, other) is not None
    )
