"""A private image, what is becoming of it, and how many of them a user may have. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fgpu_scheduler.core.model import Session
from fgpu_scheduler.errors import ImageRefused, OverImageQuota

MIB = 2**20


class ImageState(StrEnum):
    """What is becoming of a private image."""

    WISHED = "WISHED"
    """Asked for; the worker has not begun. A crash leaves it so."""
    COMMITTING = "COMMITTING"
    """The worker makes it. A crash leaves it so, and the worker begins anew."""
    READY = "READY"
    """Sessions can be started from it, under ``reference``. If that is not its name's, the worker tags it anew."""
    FAILED = "FAILED"
    """It was not made; ``message`` says why. There is nothing on any engine."""
    DELETING = "DELETING"
    """The worker removes it from the engines, and then the row."""


HELD_IMAGES = (ImageState.WISHED, ImageState.COMMITTING, ImageState.READY, ImageState.DELETING)
"""The states that count against a quota."""


@dataclass(frozen=True, slots=True)
class PrivateImage:
    """One row. ``size_bytes`` is what it has beyond its ``base``; ``message`` is how far it is, or why it failed.

    ``made_from`` is what the session ran (perhaps private itself), ``base`` the image of the catalogue under that, and
    ``facts`` a JSON object of what the catalogue said of it. ``accepted_by`` and ``declined_by`` are the answers of those
    whom this very image was offered to, under whatever name.

    ``server_kept``: the server of its sessions is the administrator's, as no program that it was made with could become
    root. ``owners_alone``: all that it was made with was started by its owner, from images of the catalogue or their own.
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
        """Return whether this user of these Hub groups may start it, once they accept what is not their own."""
        shared = user in self.shared_users or any(g in groups for g in self.shared_groups)
        return user == self.owner or (shared and self.server_kept)


class ImageInUse(ImageRefused):
    """Sessions run, or wait to run, from the image: ``sessions``. The message names nobody."""

    code = "image_in_use"

    def __init__(self, name: str, sessions: Sequence[Session]) -> None:
        count = len(sessions)
        super().__init__(f"{name} is in use by {count} session{'' if count == 1 else 's'}")
        self.name = name
        self.sessions = tuple(sessions)


@dataclass(frozen=True, slots=True)
class ImageQuota:
    """How many private images a user may have, and how many MiB in all beyond the catalogue's; None: no limit."""

    images: int | None = None
    mib: int | None = None


def check_count(known: Sequence[PrivateImage], owner: str, quota: ImageQuota) -> None:
    """Refuse one more image of a user who may have no more.

    Raises:
        OverImageQuota: with the limit, and what is taken.
    """
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
    """Refuse one that would make its owner's images larger than they may be.

    Raises:
        OverImageQuota: with the limit, and what is taken.
    """
    if quota.mib is None:
        return
    others = sum(i.size_bytes or 0 for i in known if i.owner == image.owner and i.id != image.id)
    if others + size_bytes > quota.mib * MIB:
        raise OverImageQuota(
            f"{image.name} would have {shown_mib(size_bytes)} MiB, and {image.owner}'s other images have "
            f"{shown_mib(others)} of the {quota.mib} MiB that they may have; delete some, or remove files in the session"
        )


def shown_mib(size_bytes: int) -> int:
    """Return a size in whole MiB, rounded up: what is there is never 0."""
    return -(-size_bytes // MIB)


def in_use_words(name: str, sessions: Sequence[Session], *, user: str | None, admin: bool) -> str:
    """Return who uses an image, as far as whoever asks may know."""
    if admin:
        each = ", ".join(f"{s.request.user}/{s.request.server_name} ({s.state}, {s.id})" for s in sessions)
        return f"{name} is in use: {each}"
    mine = sum(s.request.user == user for s in sessions)
    others = len(sessions) - mine
    said = [f"{mine} of your sessions"] if mine else []
    if others:
        said.append(f"{others} of other users' sessions")
    return f"{name} is in use by {' and '.join(said)}; end yours first"
