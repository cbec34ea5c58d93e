"""What is known of an image, and of all of them together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fgpu_scheduler import Request


@dataclass(frozen=True, slots=True)
class Image:
    """Something that a session can be started from: an entry of the catalogue, or a private image.

    ``reference`` is what a container is made of; ``environment`` is the folder of the Python
    environment that a session as a local process runs in, "" for the Hub's own. With neither
    ``groups`` nor ``users`` everybody may use it, otherwise only those named by either.

    Amounts that are 0 and texts that are "" say nothing. ``min_*`` is the least that a session of it
    may have, ``recommended_*`` what the form preselects; ``*_milli`` are thousandths of fGPU or of a
    CPU. ``gpu_architectures`` are compute capabilities such as "7.0". ``digest`` is the id of what
    the engine must have under the reference ("sha256:..."). ``kernels`` are the names of its
    kernels, the first of them the one that notebooks open on. ``sudo``: users may become root in it.
    No user can start an image that is not ``enabled``; a ``hidden`` one only users who know the slug.

    The rest is of private images only. Their slug is their full name. ``owner`` is a user, ``node_id`` the engine that
    has the image. It is shared with ``groups`` and ``users``; ``accepted_by`` and ``declined_by`` are those who
    answered. ``under`` is the image of the catalogue that it was made from: only users who see that one see this one.
    ``owners_alone``: every session that it was made from was started by its owner.
    """

    slug: str
    name: str
    framework: str
    version: str
    python: str
    reference: str
    description: str = ""
    environment: str = ""
    default: bool = False
    groups: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    icon: str = ""
    kernels: tuple[str, ...] = ()
    digest: str = ""
    gpu_architectures: tuple[str, ...] = ()
    cuda: str = ""
    min_fgpu_milli: int = 0
    min_gpu_memory_mib: int = 0
    min_cpu_milli: int = 0
    min_memory_mib: int = 0
    recommended_fgpu_milli: int = 0
    recommended_gpu_memory_mib: int = 0
    recommended_cpu_milli: int = 0
    recommended_memory_mib: int = 0
    sudo: bool = False
    enabled: bool = True
    hidden: bool = False
    deprecated: str = ""
    owner: str = ""
    node_id: str = ""
    under: Image | None = None
    accepted_by: tuple[str, ...] = ()
    declined_by: tuple[str, ...] = ()
    owners_alone: bool = False

    def is_visible_to(self, user: str, groups: Collection[str]) -> bool:
        """Return whether this user of these Hub groups may start it, while it is enabled, once they have accepted it."""
        if self.under is not None and not self.under.is_visible_to(user, groups):
            return False
        if not self.groups and not self.users and not self.owner:
            return True
        return user in (self.owner, *self.users) or any(group in groups for group in self.groups)

    def is_accepted_by(self, user: str) -> bool:
        """Return whether the user need not be asked: it is the administrator's, their own, or they said yes."""
        return user in (self.owner, *self.accepted_by) or not self.owner

    def may_have_others_programs(self, user: str) -> bool:
        """Return whether there may be something in it that neither the administrator nor this user has put there."""
        return bool(self.owner) and not (user == self.owner and self.owners_alone)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The images in their order; slugs are unique, and at most one is the default."""

    images: tuple[Image, ...]

    def entry(self, slug: str) -> Image | None:
        """Return the image of this slug, enabled or not, or None."""
        return next((image for image in self.images if image.slug == slug), None)

    def get(self, slug: str) -> Image | None:
        """Return the enabled image of this slug, or None. Whether a user may use it is not checked."""
        found = self.entry(slug)
        return found if found is not None and found.enabled else None

    def of(self, request: Request) -> Image | None:
        """Return the image of a request if its user may start it now and has accepted it, or None."""
        found = self.get(request.image)
        if found is None or not found.is_visible_to(request.user, request.groups):
            return None
        return found if found.is_accepted_by(request.user) else None

    def startable_by(self, user: str, groups: Collection[str]) -> tuple[Image, ...]:
        """Return the images that this user of these Hub groups may start, in order; also hidden ones."""
        return tuple(i for i in self.images if i.enabled and i.is_visible_to(user, groups))

    def visible_to(self, user: str, groups: Collection[str]) -> tuple[Image, ...]:
        """Return the images that this user of these Hub groups is shown, in order."""
        return tuple(i for i in self.startable_by(user, groups) if not i.hidden and i.is_accepted_by(user))


def state_words(image: Image) -> list[str]:
    """Return the words for an image's state, first whether it may be started."""
    words = ["disabled" if not image.enabled else "hidden" if image.hidden else "enabled"]
    if image.default:
        words.append("default")
    if image.deprecated:
        words.append("deprecated")
    if image.groups or image.users:
        named = [*(f"group {group}" for group in image.groups), *(f"user {user}" for user in image.users)]
        words.append(f"for {', '.join(named)}")
    if image.sudo:
        words.append("with sudo")
    return words


@dataclass(frozen=True, slots=True)
class FoundImage:
    """An image on a machine: its id, the names and digests by which it is known there, and its labels."""

    image_id: str
    references: tuple[str, ...]
    digests: tuple[str, ...]
    labels: Mapping[str, str]
