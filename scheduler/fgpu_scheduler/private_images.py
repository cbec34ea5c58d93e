"""Private images: what sessions were saved as, whose they are, who may see them, and what is to become of them.

The Hub's image worker alone moves one on; owners and administrators write wishes. Each write is one transaction with
an event in the log. What a crash leaves is said with each state.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from fgpu_scheduler.core.model import Session, SessionState
from fgpu_scheduler.errors import (
    BadImageName,
    ImageNameTaken,
    ImageRefused,
    OverImageQuota,
    UnknownImage,
)
from fgpu_scheduler.image_names import checked_name, checked_tag, reference_of
from fgpu_scheduler.schema import private_images as table
from fgpu_scheduler.store import Store
from fgpu_scheduler.writing import Write

MIB = 2**20
MOST_SHARED = 100
MOST_NAME = 255
MOST_FAILED = 10
"""So many of a user's failures are kept for them to read."""


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


HELD = (ImageState.WISHED, ImageState.COMMITTING, ImageState.READY, ImageState.DELETING)
"""The states that count against a quota."""


@dataclass(frozen=True, slots=True)
class PrivateImage:
    """One row. ``size_bytes`` is what it has beyond its ``base``; ``message`` is how far it is, or why it failed.

    ``made_from`` is what the session ran (perhaps private itself), ``base`` the image of the catalogue under that, and
    ``facts`` a JSON object of what the catalogue said of it.
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

    def is_visible_to(self, user: str, groups: Collection[str]) -> bool:
        """Return whether this user of these Hub groups may start it."""
        return user == self.owner or user in self.shared_users or any(g in groups for g in self.shared_groups)


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


class PrivateImages:
    """The private images of the installation whose store this is. Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- reading --------------------------------------------------------------------------------------

    def all(self) -> tuple[PrivateImage, ...]:
        """Return every one, in the order in which they were asked for."""
        with self._store.reading() as connection:
            return tuple(_image(row) for row in connection.execute(_ROWS.order_by(table.c.id)))

    def get(self, image_id: int) -> PrivateImage:
        """Return the one with this id.

        Raises:
            UnknownImage: there is none.
        """
        with self._store.reading() as connection:
            row = connection.execute(_ROWS.where(table.c.id == image_id)).one_or_none()
        if row is None:
            raise UnknownImage(f"there is no private image {image_id}")
        return _image(row)

    def recipe(self, image_id: int) -> str | None:
        """Return an image's Dockerfile; None where there is none, or no such image."""
        with self._store.reading() as connection:
            return connection.execute(
                select(table.c.recipe).where(table.c.id == image_id)
            ).scalar_one_or_none()

    def named(self, name: str) -> PrivateImage:
        """Return the one of this full name, such as ``alice/torch-more:2``.

        Raises:
            UnknownImage: there is none.
        """
        with self._store.reading() as connection:
            row = connection.execute(_ROWS.where(table.c.name == name)).one_or_none()
        if row is None:
            raise UnknownImage(f"there is no private image {name!r}")
        return _image(row)

    # -- wishes ---------------------------------------------------------------------------------------

    def wish(
        self,
        session_id: int,
        *,
        name: str,
        tag: str | None = None,
        asked_by: str,
        quota: ImageQuota,
        now_s: int,
    ) -> PrivateImage:
        """Ask that a running session be saved as its owner's image; without a tag it takes the next number.

        Raises:
            UnknownSession: no session has this id.
            BadImageName: an engine takes no such name or tag.
            ImageRefused: the session does not run, or is being saved already; the name is taken; over the quota.
        """
        with self._store.writing(now_s=now_s) as write:
            session = write.one(session_id)
            if session.state is not SessionState.RUNNING or session.placement is None:
                raise ImageRefused(
                    f"session {session_id} is {session.state}; only one that runs can be saved"
                )
            known = _all(write)
            if any(i.session_id == session_id and i.state in _MAKING for i in known):
                raise ImageRefused(f"session {session_id} is being saved already; wait until that is done")
            owner = session.request.user
            _check_count(known, owner, quota)
            path = checked_name(self._store.installation_id, owner, name)
            full = f"{path}:{checked_tag(tag) if tag is not None else _next_tag(known, path)}"
            reference = self._free(write, known, full, instead_of_failed=True)
            failed = [
                i for i in known if i.owner == owner and i.state is ImageState.FAILED and i.name != full
            ]
            for old in failed[:-MOST_FAILED]:
                _forget(write, old)
            under = next((i for i in known if i.name == session.request.image), None)
            values: dict[str, Any] = {
                "owner": owner,
                "name": full,
                "reference": reference,
                "state": ImageState.WISHED.value,
                "node_id": session.placement.node_id,
                "session_id": session_id,
                "made_from": session.request.image,
                "base": session.request.image if under is None else under.base,
                "facts": "{}" if under is None else under.facts,
                "asked_by": asked_by,
                "asked_at_s": now_s,
            }
            made = write.connection.execute(insert(table).values(values).returning(table.c.id)).scalar_one()
            write.event("images", reason=f"{full}: asked for by {asked_by}")
            return _one(write, made)

    def rename(self, image_id: int, *, name: str, tag: str | None, now_s: int) -> PrivateImage:
        """Give it another name; without a tag the next number of that name. The worker tells the engines.

        Raises:
            UnknownImage: there is none.
            BadImageName: an engine takes no such name or tag.
            ImageRefused: it is not ready; sessions use it; the name is taken.
        """
        with self._store.writing(now_s=now_s) as write:
            old = _one(write, image_id)
            if old.state is not ImageState.READY:
                raise ImageRefused(f"{old.name} is {old.state}; only one that is READY can be renamed")
            known = _all(write)
            path = checked_name(self._store.installation_id, old.owner, name)
            if tag is None and path == old.name.rpartition(":")[0]:
                raise BadImageName(f"name: {old.name} has this name; give another, or a tag")
            full = f"{path}:{checked_tag(tag) if tag is not None else _next_tag(known, path)}"
            if full == old.name:
                return old
            _refuse_in_use(write, old)
            self._free(write, known, full)
            _change(write, image_id, name=full)
            write.event("images", reason=f"{old.name}: is now {full}")
            return _one(write, image_id)

    def share(
        self, image_id: int, *, users: Sequence[str], groups: Sequence[str], now_s: int
    ) -> PrivateImage:
        """Let these users and Hub groups, and no others beside the owner, see and start it.

        Raises:
            UnknownImage: there is none.
            BadImageName: a name is none, or there are too many.
        """
        wanted = _names("users", users), _names("groups", groups)
        with self._store.writing(now_s=now_s) as write:
            old = _one(write, image_id)
            users = tuple(user for user in wanted[0] if user != old.owner)
            if (users, wanted[1]) == (old.shared_users, old.shared_groups):
                return old
            _change(
                write, image_id, shared_users=json.dumps(users), shared_groups=json.dumps(list(wanted[1]))
            )
            write.event("images", reason=f"{old.name}: shared with {len(users) + len(wanted[1])}")
            return _one(write, image_id)

    def delete(self, image_id: int, *, now_s: int) -> PrivateImage | None:
        """Ask that it be removed; return it as it is then, or None where nothing was left to remove.

        Raises:
            UnknownImage: there is none.
            ImageInUse: sessions run, or wait to run, from it.
            ImageRefused: it is being made.
        """
        with self._store.writing(now_s=now_s) as write:
            old = _one(write, image_id)
            match old.state:
                case ImageState.COMMITTING:
                    raise ImageRefused(f"{old.name} is being made; wait until that is done")
                case ImageState.WISHED | ImageState.FAILED:
                    _forget(write, old)
                    return None
                case ImageState.READY:
                    _refuse_in_use(write, old)
                    _change(write, image_id, state=ImageState.DELETING.value, message=None)
                    write.event("images", reason=f"{old.name}: {old.state} -> {ImageState.DELETING}")
            return _one(write, image_id)

    # -- for the worker -------------------------------------------------------------------------------

    def begin(self, image_id: int, *, facts: str, now_s: int) -> PrivateImage | None:
        """Begin to make it; ``facts`` are those of the catalogue, "" to leave them. None: it is not wished any more."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is None or old.state not in _MAKING:
                return None
            more = {"facts": facts} if facts else {}
            _change(write, image_id, state=ImageState.COMMITTING.value, message=None, **more)
            write.event("images", reason=f"{old.name}: {old.state} -> {ImageState.COMMITTING}")
            return _one(write, image_id)

    def note(self, image_id: int, message: str, *, now_s: int) -> None:
        """Keep how far the making of it is."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.state is ImageState.COMMITTING and old.message != message:
                _change(write, image_id, message=message)
                write.event("images", reason=f"{old.name}: {message}")

    def made(
        self,
        image_id: int,
        *,
        engines_id: str,
        size_bytes: int,
        recipe: str | None,
        quota: ImageQuota,
        now_s: int,
    ) -> PrivateImage:
        """Have it be ready: its engine has it, as ``engines_id``.

        Raises:
            UnknownImage: there is no such row any more.
            OverImageQuota: with it its owner's images are larger than they may be.
        """
        with self._store.writing(now_s=now_s) as write:
            old = _one(write, image_id)
            check_size(_all(write), old, size_bytes, quota)
            _change(
                write,
                image_id,
                state=ImageState.READY.value,
                message=None,
                image_id=engines_id,
                size_bytes=size_bytes,
                recipe=recipe,
                made_at_s=now_s,
            )
            write.event("images", reason=f"{old.name}: {old.state} -> {ImageState.READY}")
            return _one(write, image_id)

    def fail(self, image_id: int, message: str, *, now_s: int) -> None:
        """Keep why it was not made."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.state in _MAKING:
                _change(write, image_id, state=ImageState.FAILED.value, message=message)
                write.event("images", reason=f"{old.name}: {old.state} -> {ImageState.FAILED}")

    def tagged(self, image_id: int, reference: str, *, now_s: int) -> None:
        """Keep what the engines call it from now on."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.reference != reference:
                _change(write, image_id, reference=reference)
                write.event("images", reason=f"{old.name}: the engines know it by that name")

    def removed(self, image_id: int, *, now_s: int) -> None:
        """Forget one that was asked to be removed: no engine that answers has it any more."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.state is ImageState.DELETING:
                _forget(write, old)

    def wanted_reference(self, image: PrivateImage) -> str:
        """Return what the engines are to call it, by its name."""
        return reference_of(self._store.installation_id, image.name)

    def _free(
        self, write: Write, known: Sequence[PrivateImage], full: str, *, instead_of_failed: bool = False
    ) -> str:
        """Return the reference of a name that is free.

        Raises:
            ImageNameTaken: another has the name, or still the reference.
        """
        reference = reference_of(self._store.installation_id, full)
        for other in known:
            if full != other.name and reference != other.reference:
                continue
            if instead_of_failed and other.state is ImageState.FAILED:
                _forget(write, other)
            else:
                raise ImageNameTaken(f"name: there is an image {full} already; give another name or tag")
        return reference


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
        said.append(f"{others} of others, whom it is shared with")
    return f"{name} is in use by {' and '.join(said)}; end what is yours first"


_MAKING = (ImageState.WISHED, ImageState.COMMITTING)
# Without the recipes: all rows are read every other second, and of these each may be long.
_ROWS = select(*(c for c in table.c if c.name != "recipe"), table.c.recipe.is_not(None).label("has_recipe"))


def _image(row: Row[*tuple[Any, ...]]) -> PrivateImage:
    values = dict(row._mapping)
    values["has_recipe"] = bool(values["has_recipe"])
    values["state"] = ImageState(values["state"])
    for shared in ("shared_users", "shared_groups"):
        values[shared] = tuple(json.loads(values[shared]))
    return PrivateImage(**values)


def _all(write: Write) -> tuple[PrivateImage, ...]:
    return tuple(_image(row) for row in write.connection.execute(_ROWS.order_by(table.c.id)))


def _find(write: Write, image_id: int) -> PrivateImage | None:
    row = write.connection.execute(_ROWS.where(table.c.id == image_id)).one_or_none()
    return None if row is None else _image(row)


def _one(write: Write, image_id: int) -> PrivateImage:
    found = _find(write, image_id)
    if found is None:
        raise UnknownImage(f"there is no private image {image_id}")
    return found


def _change(write: Write, row_id: int, **values: Any) -> None:
    write.connection.execute(update(table).where(table.c.id == row_id).values(values))


def _forget(write: Write, image: PrivateImage) -> None:
    write.connection.execute(delete(table).where(table.c.id == image.id))
    write.event("images", reason=f"{image.name}: {image.state}, and gone")


def _check_count(known: Sequence[PrivateImage], owner: str, quota: ImageQuota) -> None:
    count = sum(i.owner == owner and i.state in HELD for i in known)
    if quota.images is not None and count >= quota.images:
        raise OverImageQuota(
            f"{owner} has {count} private images of the {quota.images} that they may have; delete one first"
        )
    taken = sum(i.size_bytes or 0 for i in known if i.owner == owner)
    if quota.mib is not None and taken >= quota.mib * MIB:
        raise OverImageQuota(
            f"{owner}'s private images have {shown_mib(taken)} of the {quota.mib} MiB that they may have; delete one"
        )


def _next_tag(known: Sequence[PrivateImage], path: str) -> str:
    tags = [i.name.rpartition(":")[2] for i in known if i.name.rpartition(":")[0] == path]
    return str(1 + max((int(t) for t in tags if t.isascii() and t.isdigit() and len(t) < 10), default=0))


def _refuse_in_use(write: Write, image: PrivateImage) -> None:
    found = [s for s in write.world.sessions.values() if s.request.image == image.name]
    if found:
        raise ImageInUse(image.name, found)


def _names(field: str, given: Sequence[str]) -> tuple[str, ...]:
    if len(given) > MOST_SHARED:
        raise BadImageName(f"{field}: {len(given)} names; at most {MOST_SHARED} are possible")
    for name in given:
        if not name.strip() or not name.isprintable() or len(name) > MOST_NAME:
            raise BadImageName(
                f"{field}: {ascii(name)[:60]} is no name; give names of at most {MOST_NAME} characters"
            )
    return tuple(dict.fromkeys(name.strip() for name in given))
