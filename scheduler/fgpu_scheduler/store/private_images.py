"""Private images: what sessions were saved as, whose they are, who may see them, and what is to become of them.

The Hub's image worker alone moves one on; owners and administrators write wishes. Each write is one transaction with
an event in the log. What a crash leaves is said with each state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from fgpu_scheduler.core.model import SessionState
from fgpu_scheduler.errors import BadImageName, ImageNameTaken, ImageRefused, UnknownImage
from fgpu_scheduler.store.durable import Durable
from fgpu_scheduler.store.image_names import checked_name, checked_tag, reference_of
from fgpu_scheduler.store.private_image import (
    ImageInUse,
    ImageQuota,
    ImageState,
    PrivateImage,
    check_count,
    check_size,
)
from fgpu_scheduler.store.schema import private_images as table
from fgpu_scheduler.store.transaction import SqlWrite

MOST_SHARED = 100
MOST_NAME = 255
MOST_FAILED = 10
"""So many of a user's failures are kept for them to read."""


class PrivateImages:
    """The private images of the installation whose store this is. Safe to use from several threads."""

    def __init__(self, store: Durable) -> None:
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
            check_count(known, owner, quota)
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
            # What it is still called from before a renaming is its own.
            self._free(write, [other for other in known if other.id != image_id], full)
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
        """Keep what the engines call it from now on, if it is still to be called so."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.reference != reference == self.wanted_reference(old):
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
        self, write: SqlWrite, known: Sequence[PrivateImage], full: str, *, instead_of_failed: bool = False
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


def _all(write: SqlWrite) -> tuple[PrivateImage, ...]:
    return tuple(_image(row) for row in write.connection.execute(_ROWS.order_by(table.c.id)))


def _find(write: SqlWrite, image_id: int) -> PrivateImage | None:
    row = write.connection.execute(_ROWS.where(table.c.id == image_id)).one_or_none()
    return None if row is None else _image(row)


def _one(write: SqlWrite, image_id: int) -> PrivateImage:
    found = _find(write, image_id)
    if found is None:
        raise UnknownImage(f"there is no private image {image_id}")
    return found


def _change(write: SqlWrite, row_id: int, **values: Any) -> None:
    write.connection.execute(update(table).where(table.c.id == row_id).values(values))


def _forget(write: SqlWrite, image: PrivateImage) -> None:
    write.connection.execute(delete(table).where(table.c.id == image.id))
    write.event("images", reason=f"{image.name}: {image.state}, and gone")


def _next_tag(known: Sequence[PrivateImage], path: str) -> str:
    tags = [i.name.rpartition(":")[2] for i in known if i.name.rpartition(":")[0] == path]
    return str(1 + max((int(t) for t in tags if t.isascii() and t.isdigit() and len(t) < 10), default=0))


def _refuse_in_use(write: SqlWrite, image: PrivateImage) -> None:
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
