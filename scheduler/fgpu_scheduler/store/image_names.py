"""Names of private images: ``OWNER/NAME:TAG`` as people write them, and what an engine calls them. Pure.

An engine takes fewer characters than JupyterHub does in a user's name. What it does not take is written as ``__`` and
two hex digits for each byte, so that no two users have one name there.
"""

from __future__ import annotations

import hashlib
import re

from fgpu_scheduler.errors import BadImageName

PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
"""An engine's grammar of what is between two slashes of a name."""
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
MOST_REFERENCE = 255
"""Characters that an engine takes before the tag, with what it puts in front itself: ``docker.io/``."""
ENGINES_OWN = "docker.io/"
MOST_OWNER = 64

_AS_IT_IS = re.compile(r"[a-z0-9]|(?<=[a-z0-9])(?:[._]|-+)(?=[a-z0-9])")


def owner_part(user: str) -> str:
    """Return a user's part of the names of their images; another one for every user.

    ``alice@lab.org`` is ``alice__40lab.org``. One that is too long for an engine becomes a digest.
    """
    found, at = "", 0
    while at < len(user):
        kept = _AS_IT_IS.match(user, at)
        if kept:
            found += kept[0]
            at = kept.end()
        else:
            found += "".join(f"__{byte:02x}" for byte in user[at].encode("utf-8", "surrogatepass"))
            at += 1
    if len(found) > MOST_OWNER:
        # "__h" begins no byte, so nobody's name is written so otherwise.
        return "x__h" + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()
    if not PART.fullmatch(found):
        # It would begin with a separator.
        return "x__x" + user.encode("utf-8", "surrogatepass").hex()
    return found


def image_prefix_of(installation_id: str) -> str:
    """Return how the names of all private images of an installation begin, on every engine."""
    return f"fgpu-{installation_id}/"


def reference_of(installation_id: str, full_name: str) -> str:
    """Return what an engine calls a private image. Its first part is no host: nobody is asked for it elsewhere."""
    return image_prefix_of(installation_id) + full_name


def is_private(name: str) -> bool:
    """Return whether this is the full name of a private image, and no slug of the catalogue: these have no /."""
    return "/" in name


def checked_name(installation_id: str, owner: str, name: str) -> str:
    """Return ``OWNER/NAME``, without a tag.

    Raises:
        BadImageName: an engine does not take such a name; with the limit.
    """
    part = owner_part(owner)
    room = MOST_REFERENCE - len(ENGINES_OWN) - len(image_prefix_of(installation_id)) - len(part) - 1
    if len(name) > room:
        raise BadImageName(
            f"name: {len(name)} characters; at most {room} are possible here (an engine takes"
            f" {MOST_REFERENCE} with all that goes before it)"
        )
    if not PART.fullmatch(name):
        raise BadImageName(
            f"name: {_short(name)} cannot be an image's name; use a-z and 0-9, with '.', '_' or '-' between them, such"
            " as torch-more"
        )
    return f"{part}/{name}"


def checked_tag(tag: str) -> str:
    """Return a tag.

    Raises:
        BadImageName: an engine does not take it; with the limit.
    """
    if len(tag) > 128:
        raise BadImageName(f"tag: {len(tag)} characters; at most 128 are possible")
    if not TAG.fullmatch(tag):
        raise BadImageName(
            f"tag: {_short(tag)} cannot be a tag; use letters, digits, '_', '.' and '-', such as 2 or 2026-01, not '.'"
            " or '-' first"
        )
    return tag


def _short(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
