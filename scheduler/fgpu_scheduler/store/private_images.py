"""The table of private images: saved sessions with their owners, sharing and states.

Owners and administrators write requests; only the Hub's image worker carries them out. Each write is one transaction with
an event in the log. `ImageState` says what a crash leaves in each state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, select, update

from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.errors import BadImageName, ImageNameTaken, ImageRefused, UnknownImage
from fgpu_scheduler.store.private_image import (
    ImageInUse,
    ImageQuota,
    ImageState,
    PrivateImage,
    check_count,
    check_size,
    checked_name,
    checked_tag,
    is_private,
    reference_of,
)
from fgpu_scheduler.store.schema import image_answers as answers
from fgpu_scheduler.store.schema import private_images as table
from fgpu_scheduler.store.transaction import StorePart, Write

MOST_SHARED = 100
MOST_NAME = 255
MOST_FAILED = 10
"""How many failed images of a user are kept for the user to read."""


class PrivateImages(StorePart):
    """The private images of an installation."""

    # -- reading --------------------------------------------------------------------------------------

    def all(self) -> tuple[PrivateImage, ...]:
        """Return all private images in the order of their requests."""
        with self._store.reading() as connection:
            return _rows(connection)

    def get(self, image_id: int) -> PrivateImage:
        """Return the image with this id, or raise `UnknownImage`."""
        with self._store.reading() as connection:
            return _found(_rows(connection, table.c.id == image_id), image_id)

    def by_name(self, name: str) -> PrivateImage:
        """Return the image with this full name, such as ``alice/torch-more:2``, or raise `UnknownImage`."""
        with self._store.reading() as connection:
            return _found(_rows(connection, table.c.name == name), repr(name))

    def recipe(self, image_id: int) -> str | None:
        """Return an image's Dockerfile, or None without a Dockerfile or an image."""
        with self._store.reading() as connection:
            chosen = select(table.c.recipe).where(table.c.id == image_id)
            return connection.execute(chosen).scalar_one_or_none()

    # -- requests -------------------------------------------------------------------------------------

    def request(
        self,
        session_id: int,
        *,
        name: str,
        tag: str | None = None,
        asked_by: str,
        quota: ImageQuota,
        now_s: int,
    ) -> PrivateImage:
        """Request that a running session be saved as its owner's image; without a tag it gets the next number.

        Raises:
            UnknownSession: no session has this id.
            BadImageName: no engine accepts the name or tag.
            ImageRefused: the session does not run or is already being saved, the name is taken, or the quota is used up.
        """
        with self._store.writing(now_s=now_s) as write:
            session = write.one(session_id)
            if session.state not in UP or session.placement is None:
                raise ImageRefused(
                    f"session {session_id} is {session.state}; only a running one can be saved"
                )
            known = _rows(write.connection)
            if any(i.session_id == session_id and i.state in _UNFINISHED for i in known):
                raise ImageRefused(f"session {session_id} is being saved already; wait until that is done")
            owner = session.request.user
            check_count(known, owner, quota)
            path = checked_name(self._store.installation_id, owner, name)
            full = f"{path}:{_next_tag(known, path) if tag is None else checked_tag(tag)}"
            reference = self._free_reference(write, known, full, instead_of_failed=True)
            failed = [
                i for i in known if i.owner == owner and i.state is ImageState.FAILED and i.name != full
            ]
            for old in failed[:-MOST_FAILED]:
                _forget(write, old)
            under = next((i for i in known if i.name == session.request.image), None)
            if under is None and is_private(session.request.image):
                # Without the image's row, its base and trust are unknown.
                raise ImageRefused(
                    f"the image {session.request.image} of session {session_id} was renamed or deleted; start the"
                    " session again to save it"
                )
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
                "shared_users": "[]",
                "shared_groups": "[]",
                "server_kept": under is None or under.server_kept,
                "owners_alone": under is None or (under.owner == owner and under.owners_alone),
                "asked_by": asked_by,
                "asked_at_s": now_s,
            }
            made = write.connection.execute(insert(table).values(values).returning(table.c.id)).scalar_one()
            write.event("images", reason=f"{full}: asked for by {asked_by}")
            return _one(write, made)

    def rename(self, image_id: int, *, name: str, tag: str | None, now_s: int) -> PrivateImage:
        """Give the image another name; without a tag it gets that name's next number. The worker retags it later.

        Raises:
            UnknownImage: there is none.
            BadImageName: no engine accepts the name or tag.
            ImageRefused: it is not ready, sessions use it, or the name is taken.
        """
        with self._store.writing(now_s=now_s) as write:
            old = _one(write, image_id)
            if old.state is not ImageState.READY:
                raise ImageRefused(f"{old.name} is {old.state}; only a READY image can be renamed")
            known = _rows(write.connection)
            path = checked_name(self._store.installation_id, old.owner, name)
            if tag is None and path == old.name.rpartition(":")[0]:
                raise BadImageName(f"name: {old.name} already has this name; give another one, or a tag")
            full = f"{path}:{_next_tag(known, path) if tag is None else checked_tag(tag)}"
            if full == old.name:
                return old
            _refuse_in_use(write, old)
            # The reference of its own earlier name is not taken by another.
            self._free_reference(write, [other for other in known if other.id != image_id], full)
            return _change(write, old, f"is now {full}", name=full)

    def share(
        self, image_id: int, *, users: Sequence[str], groups: Sequence[str], now_s: int
    ) -> PrivateImage:
        """Offer the image to exactly these users and Hub groups; each user may start it after accepting it.

        Raises:
            UnknownImage: there is none.
            BadImageName: a name is invalid, or there are too many.
            ImageRefused: the image may not have the administrator's server.
        """
        wanted = _names("users", users), _names("groups", groups)
        with self._store.writing(now_s=now_s) as write:
            old = _one(write, image_id)
            users = tuple(user for user in wanted[0] if user != old.owner)
            if (users, wanted[1]) == (old.shared_users, old.shared_groups):
                return old
            if (users or wanted[1]) and not old.server_kept:
                raise ImageRefused(
                    f"{old.name} cannot be shared: it was saved where programs could become root; save one from a"
                    " session without sudo, or ask an administrator to build its recipe"
                )
            values = {"shared_users": json.dumps(users), "shared_groups": json.dumps(wanted[1])}
            return _change(write, old, f"shared with {len(users) + len(wanted[1])}", **values)

    def answer(self, engines_id: str, *, user: str, accepted: bool, now_s: int) -> None:
        """Store whether a user accepts the image with this id on the engines; ignore a deleted image.

        The answer is to this content: another image that gets the same name is offered again.
        """
        with self._store.writing(now_s=now_s) as write:
            image = next(iter(_rows(write.connection, table.c.image_id == engines_id)), None)
            if image is None or user in (image.accepted_by if accepted else image.declined_by):
                return
            own = (answers.c.image_id == engines_id) & (answers.c.user_name == user)
            write.connection.execute(delete(answers).where(own))
            values = {"image_id": engines_id, "user_name": user, "accepted": accepted, "answered_at_s": now_s}
            write.connection.execute(insert(answers).values(values))
            write.event("images", reason=f"{image.name}: {'accepted' if accepted else 'declined'} by {user}")

    def delete(self, image_id: int, *, now_s: int) -> PrivateImage | None:
        """Request that the image be deleted; return it, or None if no engine has anything to delete.

        Raises:
            UnknownImage: there is none.
            ImageInUse: sessions run from it, or wait to.
            ImageRefused: it is being saved.
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
                    return _set_state(write, old, ImageState.DELETING)
                case ImageState.DELETING:
                    return old

    # -- for the worker -------------------------------------------------------------------------------

    def begin(self, image_id: int, *, facts: str, now_s: int) -> PrivateImage | None:
        """Begin to save the image, with the catalogue's ``facts`` unless ""; None if the request was withdrawn."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is None or old.state not in _UNFINISHED:
                return None
            return _set_state(write, old, ImageState.COMMITTING, facts=facts or old.facts)

    def note(self, image_id: int, message: str, *, now_s: int) -> None:
        """Store the progress of saving."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.state is ImageState.COMMITTING and old.message != message:
                _change(write, old, message, message=message)

    def made(
        self,
        image_id: int,
        *,
        engines_id: str,
        size_bytes: int,
        recipe: str | None,
        server_kept: bool,
        quota: ImageQuota,
        now_s: int,
    ) -> PrivateImage:
        """Mark the image READY: its engine has it as ``engines_id``. ``server_kept`` is the session's own value.

        Raises:
            UnknownImage: the row was deleted.
            OverImageQuota: its owner's images would exceed the quota on size.
        """
        with self._store.writing(now_s=now_s) as write:
            old = _one(write, image_id)
            check_size(_rows(write.connection), old, size_bytes, quota)
            return _set_state(
                write,
                old,
                ImageState.READY,
                image_id=engines_id,
                size_bytes=size_bytes,
                recipe=recipe,
                server_kept=old.server_kept and server_kept,
                made_at_s=now_s,
            )

    def fail(self, image_id: int, message: str, *, now_s: int) -> None:
        """Mark the image FAILED with the reason."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.state in _UNFINISHED:
                _set_state(write, old, ImageState.FAILED, message=message)

    def tagged(self, image_id: int, reference: str, *, now_s: int) -> None:
        """Store the engines' new reference, if it still belongs to the image's name."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.reference != reference == self.wanted_reference(old):
                _change(write, old, "the engines know it by that name", reference=reference)

    def removed(self, image_id: int, *, now_s: int) -> None:
        """Delete the row of a DELETING image, which no engine that answers has now."""
        with self._store.writing(now_s=now_s) as write:
            old = _find(write, image_id)
            if old is not None and old.state is ImageState.DELETING:
                _forget(write, old)

    def wanted_reference(self, image: PrivateImage) -> str:
        """Return the reference that belongs to the image's name."""
        return reference_of(self._store.installation_id, image.name)

    def _free_reference(
        self, write: Write, known: Sequence[PrivateImage], full: str, *, instead_of_failed: bool = False
    ) -> str:
        """Return the reference of a name, or raise ImageNameTaken if another image has the name or the reference."""
        reference = reference_of(self._store.installation_id, full)
        for other in known:
            if full != other.name and reference != other.reference:
                continue
            if instead_of_failed and other.state is ImageState.FAILED:
                _forget(write, other)
            else:
                raise ImageNameTaken(f"name: there is an image {full} already; give another name or tag")
        return reference


_UNFINISHED = (ImageState.WISHED, ImageState.COMMITTING)
# Without the recipes, which may be long: all rows are read every two seconds.
_ROWS = select(*(c for c in table.c if c.name != "recipe"), table.c.recipe.is_not(None).label("has_recipe"))


def _rows(connection: Connection, *which: ColumnElement[bool]) -> tuple[PrivateImage, ...]:
    """Return the images that match, with their answers, in the order of their requests."""
    said: dict[str, dict[bool, list[str]]] = {}
    for answer in connection.execute(select(answers).order_by(answers.c.user_name)):
        said.setdefault(answer.image_id, {}).setdefault(answer.accepted, []).append(answer.user_name)
    found = connection.execute(_ROWS.where(*which).order_by(table.c.id))
    return tuple(_image(row, said.get(row.image_id, {})) for row in found)


def _image(row: Row[*tuple[Any, ...]], said: Mapping[bool, Sequence[str]]) -> PrivateImage:
    values = dict(row._mapping)
    for known in ("has_recipe", "server_kept", "owners_alone"):
        values[known] = bool(values[known])
    values["state"] = ImageState(values["state"])
    for shared in ("shared_users", "shared_groups"):
        values[shared] = tuple(json.loads(values[shared]))
    return PrivateImage(
        **values, accepted_by=tuple(said.get(True, ())), declined_by=tuple(said.get(False, ()))
    )


def _find(write: Write, image_id: int) -> PrivateImage | None:
    return next(iter(_rows(write.connection, table.c.id == image_id)), None)


def _one(write: Write, image_id: int) -> PrivateImage:
    return _found(_rows(write.connection, table.c.id == image_id), image_id)


def _found(rows: Sequence[PrivateImage], name: object) -> PrivateImage:
    if not rows:
        raise UnknownImage(f"there is no private image {name}")
    return rows[0]


def _change(write: Write, old: PrivateImage, words: str, **values: Any) -> PrivateImage:
    write.connection.execute(update(table).where(table.c.id == old.id).values(values))
    write.event("images", reason=f"{old.name}: {words}")
    return _one(write, old.id)


def _set_state(write: Write, old: PrivateImage, to: ImageState, **values: Any) -> PrivateImage:
    return _change(write, old, f"{old.state} -> {to}", **{"state": to.value, "message": None, **values})


def _forget(write: Write, image: PrivateImage) -> None:
    write.connection.execute(delete(table).where(table.c.id == image.id))
    write.connection.execute(delete(answers).where(answers.c.image_id == image.image_id))
    write.event("images", reason=f"{image.name}: {image.state}, and gone")


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
