"""The API's images: what the caller may start, and private images, which pages change with the same functions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from fgpu_scheduler import (
    HELD_IMAGES,
    EndCause,
    FGPUError,
    ImageInUse,
    ImageQuota,
    ImageState,
    PrivateImage,
    StoreUnavailable,
    in_use_words,
    shown_mib,
)
from fgpu_scheduler import PrivateImages as StoredImages
from fgpuspawner import scopes
from fgpuspawner.images.entry import amount_text, amounts_of
from fgpuspawner.images.icons import icon_name
from fgpuspawner.images.model import Image
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api, sent_text
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.hub import HubUnreachable
from fgpuspawner.service.model import Json, Savers, Viewer
from fgpuspawner.service.problems import Problem, bad_argument, forbidden
from fgpuspawner.service.session_actions import end_session, grant_wish, write_audit

SAVED_LOOK_S = 2.0
SAVED_TRIES = 150
"""Tries while database or Hub are away: five minutes in all."""
Wish = Callable[[StoredImages, int], PrivateImage | None]


def is_mine(image: PrivateImage, viewer: Viewer) -> bool:
    return viewer.user is not None and image.owner == viewer.user


def is_shared_with(image: PrivateImage, viewer: Viewer) -> bool:
    """Return whether the viewer may start it, once it is made."""
    return viewer.user is not None and image.is_visible_to(viewer.user, viewer.hub_groups)


def may_manage(image: PrivateImage, viewer: Viewer) -> bool:
    return viewer.admin or is_mine(image, viewer)


def answer_of(image: PrivateImage, viewer: Viewer) -> str | None:
    """Return "offered", "accepted" or "declined" for an image shared with the viewer; else None."""
    if image.state is not ImageState.READY or is_mine(image, viewer) or not is_shared_with(image, viewer):
        return None
    known = {"accepted": image.accepted_by, "declined": image.declined_by}
    return next((answer for answer, users in known.items() if viewer.user in users), "offered")


def is_visible(image: PrivateImage, viewer: Viewer) -> bool:
    """Return whether the viewer may know of it: their own, those they could start, and all for administrators."""
    ready = image.state is ImageState.READY
    return may_manage(image, viewer) or (ready and is_shared_with(image, viewer))


async def image_of(handler: Handler, image_id: str, *, to_manage: bool = True) -> PrivateImage:
    """Return an image that the caller may manage, or else may start; raises `Problem` 404."""
    images = await handler.service.reader.private_images()
    found = next((image for image in images if image.id == int(image_id)), None)
    if found is None or not is_visible(found, handler.viewer):
        raise Problem(404, "no_such_image", f"there is no private image {image_id}")
    if to_manage and not may_manage(found, handler.viewer):
        raise forbidden(f"{found.name} is shared with you; only its owner may do that")
    return found


async def save_session(
    handler: Handler, session_id: str, name: str, tag: str | None, *, end: bool = False
) -> PrivateImage | None:
    """Request that a session be saved as an image of its owner's; ``end`` ends the session after that."""
    service, viewer = handler.service, handler.viewer
    session = await handler.visible_session(session_id)
    if service.reader.savers is Savers.NOBODY:
        raise Problem(409, "image_refused", service.reader.engine.why_not_saved)
    if not viewer.admin:
        # A group's administrator sees its sessions, but their files belong to their owners.
        if service.reader.savers is not Savers.OWNERS:
            raise forbidden("only administrators save sessions as images here")
        if session.request.user != viewer.user:
            raise forbidden("only administrators save others' sessions as images")
    name, tag = split(name, tag)
    if end and session.ends_cause is EndCause.IDLE:
        # Else the session could be ended while it is being saved.
        with contextlib.suppress(Problem):
            await grant_wish(handler, session_id, "keep")
    quota = service.settings.image_quota()
    asked_by = viewer.user or str(handler.current_user["name"])
    owner = session.request.user
    image = await _change(
        handler,
        lambda images, now_s: images.request(
            session.id, name=name, tag=tag, asked_by=asked_by, quota=quota, now_s=now_s
        ),
        owner=owner,
        action="save",
        target=f"session {session.id} of {owner} as {name}",
    )
    if end and image is not None:
        service.background.run(
            end_when_saved(handler, session_id, image.id),
            failed=f"Session {session_id} is not ended after it was saved",
            foreseen=(FGPUError, Problem, HubUnreachable),
        )
    return image


async def end_when_saved(handler: Handler, session_id: str, image_id: int) -> None:
    """End a session with the caller's own rights once its image is made; one that is not saved goes on.

    A restart of the service forgets it, and the session goes on.
    """
    tries = SAVED_TRIES
    while True:
        try:
            images = await handler.service.reader.private_images()
            found = next((image for image in images if image.id == image_id), None)
            if found is None or found.state not in (ImageState.WISHED, ImageState.COMMITTING):
                if found is not None and found.state is ImageState.READY:
                    await end_session(handler, session_id)
                return
        except (StoreUnavailable, HubUnreachable):
            tries -= 1
            if not tries:
                raise
        await asyncio.sleep(SAVED_LOOK_S)


async def rename(handler: Handler, image_id: str, name: str, tag: str | None) -> PrivateImage | None:
    name, tag = split(name, tag)
    return await _manage(
        handler, image_id, "rename", lambda i, now_s: i.rename(int(image_id), name=name, tag=tag, now_s=now_s)
    )


async def share(
    handler: Handler, image_id: str, users: Sequence[str], groups: Sequence[str]
) -> PrivateImage | None:
    """Set who may start an image beside its owner."""
    return await _manage(
        handler,
        image_id,
        "share",
        lambda i, now_s: i.share(int(image_id), users=users, groups=groups, now_s=now_s),
    )


async def answer(handler: Handler, image_id: str, *, accepted: bool) -> PrivateImage:
    """Accept or decline an image that is offered to the caller."""
    found = await image_of(handler, image_id, to_manage=False)
    user = handler.viewer.user
    if user is None or not is_shared_with(found, handler.viewer) or is_mine(found, handler.viewer):
        raise forbidden(f"{found.name} is not offered to you")
    engines_id = found.image_id or ""
    await handler.service.reader.change_private_images(
        lambda images, now_s: images.answer(engines_id, user=user, accepted=accepted, now_s=now_s)
    )
    return await image_of(handler, image_id, to_manage=False)


async def delete(handler: Handler, image_id: str) -> PrivateImage | None:
    """Delete an image; return it as it is until its removal, or None."""
    return await _manage(handler, image_id, "delete", lambda i, now_s: i.delete(int(image_id), now_s=now_s))


async def _manage(handler: Handler, image_id: str, action: str, wish: Wish) -> PrivateImage | None:
    found = await image_of(handler, image_id)
    return await _change(handler, wish, owner=found.owner, action=action, target=found.name)


async def _change(
    handler: Handler, wish: Wish, *, owner: str, action: str, target: str
) -> PrivateImage | None:
    """Write a change. A refusal names the users of the image that the caller may know.

    An administrator's change of another user's image is written into the audit log.
    """
    viewer = handler.viewer
    try:
        found = await handler.service.reader.change_private_images(wish)
    except ImageInUse as e:
        words = in_use_words(e.name, e.sessions, user=viewer.user, admin=viewer.admin)
        raise Problem(409, e.code, words) from None
    if viewer.admin and viewer.user != owner:
        await write_audit(handler, f"private-image.{action}", target)
    return found


def split(name: str, tag: str | None) -> tuple[str, str | None]:
    """Return name and tag; the name may contain the tag: ``torch:2``."""
    if tag is None and ":" in name:
        name, _, tag = name.partition(":")
    return name.strip(), tag or None


class Images(Api):
    needs_scope = None

    async def get(self) -> None:
        reader, viewer = self.service.reader, self.viewer
        world = await reader.world()
        shown = reader.shown_images(world, viewer.user or "", viewer.hub_groups, viewer.groups)
        default = next((image for image in shown if image.default), next(iter(shown), None))
        self.answer(
            objects.Images(
                images=[_image_object(image, default=image == default) for image in shown],
                simulated=world.simulated(viewer.groups),
            )
        )


def _image_object(image: Image, *, default: bool) -> objects.Image:
    return objects.Image.of(
        image,
        icon=icon_name(image),
        cuda=image.cuda or None,
        minimum=_needs(image, "minimum"),
        recommended=_needs(image, "recommended"),
        deprecated=image.deprecated or None,
        private=bool(image.owner),
        default=default,
    )


def _needs(image: Image, table: str) -> objects.Needs:
    said = amounts_of(image, table).items()
    amounts = {amount: amount_text(amount, value) if value else None for amount, value in said}
    return objects.Needs.model_validate(amounts)


FOR_MANAGERS = ("shared_users", "shared_groups", "accepted_by", "declined_by", "asked_by")


def image_object(image: PrivateImage, viewer: Viewer) -> objects.PrivateImage:
    """Return an image that the viewer may know of; the users it is shared with only to those who may manage it."""
    managed = may_manage(image, viewer)
    return objects.PrivateImage.of(
        image,
        **({} if managed else dict.fromkeys(FOR_MANAGERS)),
        mine=is_mine(image, viewer),
        can_manage=managed,
        can_share=managed and image.server_kept,
        size_mib=None if image.size_bytes is None else shown_mib(image.size_bytes),
        answer=answer_of(image, viewer),
        digest=image.image_id,
    )


def images_object(
    images: Sequence[PrivateImage], viewer: Viewer, quota: ImageQuota, *, everybody: bool
) -> objects.PrivateImages:
    """Return the viewer's images and those shared with them; with ``everybody`` all, for administrators."""
    own = [image for image in images if is_mine(image, viewer)]
    shown = [
        image
        for image in images
        if is_visible(image, viewer) and (everybody or image in own or is_shared_with(image, viewer))
    ]
    return objects.PrivateImages(
        images=[image_object(image, viewer) for image in shown],
        quota=objects.ImageQuota.of(
            quota,
            images_used=sum(image.state in HELD_IMAGES for image in own),
            mib_used=shown_mib(sum(image.size_bytes or 0 for image in own)),
        ),
    )


class ImageApi(Api):
    """Answers about private images. A session's own token does not reach them unless an administrator lets it."""

    needs_scope = scopes.IMAGES

    def named(self) -> tuple[str, str | None]:
        return _named(self.body(("name", "tag")))

    def answer_image(self, image: PrivateImage | None, status: int = 200) -> None:
        shown = None if image is None else image_object(image, self.viewer)
        self.answer(objects.OnePrivateImage.of(image=shown), status)


class PrivateImages(ImageApi):
    async def get(self) -> None:
        everybody = self.everybody("images")
        images = await self.service.reader.private_images()
        quota = self.service.settings.image_quota()
        self.answer(images_object(images, self.viewer, quota, everybody=everybody))


class SaveSession(ImageApi):
    async def post(self, session_id: str) -> None:
        given = self.body(("name", "tag", "end"))
        end = given.get("end", False)
        if not isinstance(end, bool):
            raise bad_argument("end", "must be true or false")
        self.answer_image(await save_session(self, session_id, *_named(given), end=end), 202)


class OnePrivateImage(ImageApi):
    async def get(self, image_id: str) -> None:
        self.answer_image(await image_of(self, image_id, to_manage=False))

    async def delete(self, image_id: str) -> None:
        self.answer_image(await delete(self, image_id), 202)


class ImageName(ImageApi):
    async def put(self, image_id: str) -> None:
        self.answer_image(await rename(self, image_id, *self.named()))


class ImageShares(ImageApi):
    async def put(self, image_id: str) -> None:
        given = self.body(("users", "groups"))
        users, groups = (_names(key, given.get(key)) for key in ("users", "groups"))
        self.answer_image(await share(self, image_id, users, groups))


class ImageAnswer(ImageApi):
    async def put(self, image_id: str) -> None:
        accepted = self.body(("accepted",)).get("accepted")
        if not isinstance(accepted, bool):
            raise bad_argument("accepted", "must be true or false")
        self.answer_image(await answer(self, image_id, accepted=accepted))


class Recipe(ImageApi):
    async def get(self, image_id: str) -> None:
        found = await image_of(self, image_id, to_manage=False)
        lines = await self.service.reader.read_store(lambda store: StoredImages(store).recipe(found.id))
        if lines is None:
            raise Problem(404, "no_recipe", f"there is no recipe of {found.name}")
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("Content-Disposition", f'attachment; filename="Dockerfile.{found.id}"')
        self.finish(lines)


def _named(given: Json) -> tuple[str, str | None]:
    tag = given.get("tag")
    return sent_text("name", given.get("name")), None if tag in (None, "") else sent_text("tag", tag)


def _names(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise bad_argument(field, 'must be a list such as ["bob"], or []')
    return value
