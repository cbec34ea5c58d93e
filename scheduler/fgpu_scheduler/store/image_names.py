"""Names of private images: ``OWNER/NAME:TAG`` for people, and the reference for an engine. Pure.

An engine allows fewer characters than JupyterHub allows in user names. Each byte of a character that it does not allow is
written as ``__`` and two hex digits, so that two users never have the same name.
"""

from __future__ import annotations

import hashlib
import re

from fgpu_scheduler.errors import BadImageName

PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
"""An engine's grammar of a name's component between slashes."""
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
MOST_REFERENCE = 255
"""An engine's limit on the characters before the tag, including its own prefix, ``docker.io/``."""
ENGINES_OWN = "docker.io/"
MOST_OWNER = 64

_AS_IT_IS = re.compile(r"[a-z0-9]|(?<=[a-z0-9])(?:[._]|-+)(?=[a-z0-9])")


def owner_part(user: str) -> str:
    """Return the owner component of a user's image names, unique for each user.

    ``alice@lab.org`` gives ``alice__40lab.org``. A name that is too long for an engine becomes a digest.
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
        # No byte is written as "__h", so no other user's name gives this.
        return "x__h" + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()
    if not PART.fullmatch(found):
        # It would begin with a separator, which the grammar does not allow.
        return "x__x" + user.encode("utf-8", "surrogatepass").hex()
    return found


def image_prefix_of(installation_id: str) -> str:
    """Return the prefix of the references of an installation's private images."""
    return f"fgpu-{installation_id}/"


def reference_of(installation_id: str, full_name: str) -> str:
    """Return an engine's reference of a private image. It has no host, so no engine pulls it from a registry."""
    return image_prefix_of(installation_id) + full_name


def is_private(name: str) -> bool:
    """Return whether this is the full name of a private image: slugs of the catalogue have no slash."""
    return "/" in name


def checked_name(installation_id: str, owner: str, name: str) -> str:
    """Return ``OWNER/NAME``, without a tag, or raise `BadImageName` if no engine accepts the name."""
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
    """Return the tag, or raise `BadImageName` if no engine accepts it."""
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
