"""A private image, its states, its names, and the quota on a user's private images. Pure.

A private image has the name ``OWNER/NAME:TAG`` for people, and a reference for an engine. An engine allows fewer
characters than JupyterHub allows in user names. Each byte of a character that it does not allow is written as ``__`` and
two hex digits, so that two users never have the same name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fgpu_scheduler.core.model import Session
from fgpu_scheduler.errors import BadImageName, ImageRefused, OverImageQuota

MIB = 2**20


class ImageState(StrEnum):
    """The state of a private image."""

    WISHED = "WISHED"
    """Requested; the worker has not begun. A crash leaves this state."""
    COMMITTING = "COMMITTING"
    """The worker saves it. A crash leaves this state, and the worker begins again."""
    READY = "READY"
    """Sessions can start from ``reference``. After a rename the worker tags the image with its new reference."""
    FAILED = "FAILED"
    """It was not saved, and ``message`` says why. No engine has anything of it."""
    DELETING = "DELETING"
    """The worker deletes it from the engines, and then its row."""


HELD_IMAGES = tuple(state for state in ImageState if state is not ImageState.FAILED)
"""The states that count against a quota."""


@dataclass(frozen=True, slots=True)
class PrivateImage:
    """A private image.

    ``made_from`` is the session's image (perhaps private itself), ``base`` the catalogue's image under it, and ``facts``
    a JSON object of what the catalogue says about the base. ``size_bytes`` is the size beyond the base. ``message`` is
    the progress or the reason of a failure. ``accepted_by`` and ``declined_by`` are the users who answered its offer.

    ``server_kept``: its sessions run the administrator's server, because no program that made it could become root.
    ``owners_alone``: its owner started every session that it was made with, from the catalogue or their own images.
    """

    id: int
    owner: str
    name: str
    reference: str
    state: ImageState
    message: str | None
    node_id: str
    image_id: str | None
    size_bytes: int | None
    session_id: int
    made_from: str
    base: str
    facts: str
    has_recipe: bool
    shared_users: tuple[str, ...]
    shared_groups: tuple[str, ...]
    asked_by: str
    asked_at_s: int
    made_at_s: int | None
    server_kept: bool = False
    owners_alone: bool = False
    accepted_by: tuple[str, ...] = ()
    declined_by: tuple[str, ...] = ()

    def is_visible_to(self, user: str, groups: Collection[str]) -> bool:
        """Return whether a user with these Hub groups may start it, after accepting it if it is another user's."""
        shared = user in self.shared_users or any(g in groups for g in self.shared_groups)
        return user == self.owner or (shared and self.server_kept)


class ImageInUse(ImageRefused, code="image_in_use"):
    """``sessions`` run from the image or wait to. The message names no user."""

    def __init__(self, name: str, sessions: Sequence[Session]) -> None:
        count = len(sessions)
        super().__init__(f"{name} is in use by {count} session{'' if count == 1 else 's'}")
        self.name = name
        self.sessions = tuple(sessions)


@dataclass(frozen=True, slots=True)
class ImageQuota:
    """A user's limit on the number of private images, and on their total MiB beyond the catalogue's; None: no limit."""

    images: int | None = None
    mib: int | None = None


def check_count(known: Sequence[PrivateImage], owner: str, quota: ImageQuota) -> None:
    """Raise `OverImageQuota` if the user's quota allows no other image."""
    count = sum(i.owner == owner and i.state in HELD_IMAGES for i in known)
    if quota.images is not None and count >= quota.images:
        raise OverImageQuota(
            f"{owner} has {count} private images of the {quota.images} that they may have; delete one first"
        )
    taken = sum(i.size_bytes or 0 for i in known if i.owner == owner)
    if quota.mib is not None and taken >= quota.mib * MIB:
        raise OverImageQuota(
            f"{owner}'s private images have {shown_mib(taken)} of the {quota.mib} MiB that they may have; delete one"
        )


def check_size(
    known: Sequence[PrivateImage], image: PrivateImage, size_bytes: int, quota: ImageQuota
) -> None:
    """Raise `OverImageQuota` if the image would exceed its owner's quota on size."""
    if quota.mib is None:
        return
    others = sum(i.size_bytes or 0 for i in known if i.owner == image.owner and i.id != image.id)
    if others + size_bytes > quota.mib * MIB:
        raise OverImageQuota(
            f"{image.name} would have {shown_mib(size_bytes)} MiB, and {image.owner}'s other images have "
            f"{shown_mib(others)} of the {quota.mib} MiB that they may have; delete some, or remove files in the session"
        )


def shown_mib(size_bytes: int) -> int:
    """Return a size in whole MiB, rounded up, so that no image has 0."""
    return -(-size_bytes // MIB)


def in_use_words(name: str, sessions: Sequence[Session], *, user: str | None, admin: bool) -> str:
    """Return who uses an image: sessions by name for an administrator, numbers for others."""
    if admin:
        each = ", ".join(f"{s.request.user}/{s.request.server_name} ({s.state}, {s.id})" for s in sessions)
        return f"{name} is in use: {each}"
    mine = sum(s.request.user == user for s in sessions)
    others = len(sessions) - mine
    said = [f"{mine} of your sessions"] if mine else []
    if others:
        said.append(f"{others} of other users' sessions")
    return f"{name} is in use by {' and '.join(said)}; end yours first"


# --- Names ---

PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
"""An engine's grammar of a name's component between slashes."""
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
MOST_REFERENCE = 255
"""An engine's limit on the characters before the tag, including its own prefix, ``docker.io/``."""
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
    room = MOST_REFERENCE - len("docker.io/") - len(image_prefix_of(installation_id)) - len(part) - 1
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
