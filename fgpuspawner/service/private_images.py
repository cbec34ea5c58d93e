"""Saving sessions as private images, and what becomes of these: the API, and what its handlers share with pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fgpu_scheduler.store.audit import Audit
from fgpu_scheduler.store.private_image import ImageInUse, PrivateImage, in_use_words
from fgpu_scheduler.store.private_images import PrivateImages
from fgpuspawner.service import private_view, view
from fgpuspawner.service.base import IMAGES_SCOPE, Handler
from fgpuspawner.service.ending import actor_of
from fgpuspawner.service.handlers import Api, no_such_session
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.sent import sent_json

T = TypeVar("T")


def no_such_image(image_id: str) -> Problem:
    """There is none, or none that the caller may know of."""
    return Problem(404, "no_such_image", f"there is no private image {image_id}")


async def image_of(handler: Handler, image_id: str, *, to_manage: bool = True) -> PrivateImage:
    """Return an image that the caller may manage, or else start; otherwise there is none."""
    images = await handler.service.reader.private_images()
    found = next((image for image in images if image.id == int(image_id)), None)
    if found is None or not private_view.is_visible(found, handler.viewer):
        raise no_such_image(image_id)
    if to_manage and not private_view.may_manage(found, handler.viewer):
        raise Problem(403, "forbidden", f"{found.name} is shared with you; only its owner may do that")
    return found


async def change(
    handler: Handler, wanted: Callable[[PrivateImages, int], T], *, owner: str, action: str, target: str
) -> T:
    """Write a wish; who uses an image is told as far as the caller may know.

    What an administrator does with an image of somebody else is written into the audit log.
    """
    try:
        found = await handler.service.reader.change_private_images(wanted)
    except ImageInUse as e:
        viewer = handler.viewer
        words = in_use_words(e.name, e.sessions, user=viewer.user, admin=viewer.admin)
        raise Problem(409, e.code, words) from None
    viewer = handler.viewer
    if viewer.admin and viewer.user != owner:
        by = actor_of(handler)
        await handler.service.reader.change(
            lambda store, now_s: Audit(store).add(
                actor=by, action=f"private-image.{action}", target=target, now_s=now_s
            )
        )
    return found


async def save_session(handler: Handler, session_id: str, name: str, tag: str | None) -> PrivateImage:
    """Ask that a session be saved as an image of its owner's."""
    service, viewer = handler.service, handler.viewer
    session = await service.reader.session(int(session_id))
    if session is None or not view.is_visible(session, viewer):
        raise no_such_session(session_id)
    if service.reader.savers is view.Savers.NOBODY:
        raise Problem(409, "image_refused", "sessions here are local processes; only containers can be saved")
    if not viewer.admin and service.reader.savers is not view.Savers.OWNERS:
        raise Problem(403, "forbidden", "only administrators save sessions as images here")
    name, tag = split(name, tag)
    quota = service.settings.image_quota()
    asked_by = viewer.user or str(handler.current_user["name"])
    return await change(
        handler,
        lambda images, now_s: images.wish(
            session.id, name=name, tag=tag, asked_by=asked_by, quota=quota, now_s=now_s
        ),
        owner=session.request.user,
        action="save",
        target=f"session {session.id} of {session.request.user} as {name}",
    )


def split(name: str, tag: str | None) -> tuple[str, str | None]:
    """Return name and tag, where the tag may be in the name: ``torch:2``."""
    if tag is None and ":" in name:
        name, _, tag = name.partition(":")
    return name.strip(), tag or None


class ImageApi(Api):
    """Answers about private images; a session's own token does not reach them unless an administrator lets it."""

    needs_scope = IMAGES_SCOPE

    def body(self, **kinds: Callable[[str, object], Any]) -> dict[str, Any]:
        """Return the fields of the JSON object that was sent."""
        try:
            found = sent_json(self.request.body)
        except ValueError:
            raise Problem(400, "bad_argument", "the body must be a JSON object") from None
        if not isinstance(found, dict):
            raise Problem(400, "bad_argument", "the body must be a JSON object")
        for key in found:
            if key not in kinds:
                raise Problem(
                    400,
                    "bad_argument",
                    f"{key[:40]!r} is unknown; known are {', '.join(kinds)}",
                    field=key[:40],
                )
        return {key: read(key, found.get(key)) for key, read in kinds.items()}

    def answer_image(self, image: PrivateImage | None, status: int = 200) -> None:
        """Send an image; null where nothing of it is left."""
        shown = None if image is None else private_view.image_object(image, self.viewer)
        self.answer({"image": shown, "simulated": False}, status)


def text(key: str, value: object) -> str:
    """Return a text that has to be there."""
    if not isinstance(value, str) or not value:
        raise Problem(400, "bad_argument", f"{key}: must be a text", field=key)
    return value


def maybe_text(key: str, value: object) -> str | None:
    """Return a text, or None where there is none."""
    return None if value is None or value == "" else text(key, value)


def names(key: str, value: object) -> list[str]:
    """Return a list of texts."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise Problem(400, "bad_argument", f'{key}: must be a list such as ["bob"], or []', field=key)
    return value


class PrivateImagesApi(ImageApi):
    async def get(self) -> None:
        everybody = self.flag("all")
        if everybody and not self.viewer.admin:
            raise Problem(403, "forbidden", "all: only administrators see everybody's images", field="all")
        images = await self.service.reader.private_images()
        quota = self.service.settings.image_quota()
        found = private_view.images_object(images, self.viewer, quota, everybody=everybody)
        self.answer({**found, "simulated": False})


class SaveSession(ImageApi):
    async def post(self, session_id: str) -> None:
        given = self.body(name=text, tag=maybe_text)
        self.answer_image(await save_session(self, session_id, given["name"], given["tag"]), 202)


class OnePrivateImage(ImageApi):
    async def get(self, image_id: str) -> None:
        self.answer_image(await image_of(self, image_id, to_manage=False))

    async def delete(self, image_id: str) -> None:
        found = await image_of(self, image_id)
        self.answer_image(
            await change(
                self,
                lambda i, now_s: i.delete(found.id, now_s=now_s),
                owner=found.owner,
                action="delete",
                target=found.name,
            ),
            202,
        )


class ImageName(ImageApi):
    async def put(self, image_id: str) -> None:
        given = self.body(name=text, tag=maybe_text)
        found = await image_of(self, image_id)
        name, tag = split(given["name"], given["tag"])
        self.answer_image(
            await change(
                self,
                lambda i, now_s: i.rename(found.id, name=name, tag=tag, now_s=now_s),
                owner=found.owner,
                action="rename",
                target=found.name,
            )
        )


class ImageShares(ImageApi):
    async def put(self, image_id: str) -> None:
        given = self.body(users=names, groups=names)
        found = await image_of(self, image_id)
        self.answer_image(
            await change(
                self,
                lambda i, now_s: i.share(found.id, **given, now_s=now_s),
                owner=found.owner,
                action="share",
                target=found.name,
            )
        )


class Recipe(ImageApi):
    async def get(self, image_id: str) -> None:
        found = await image_of(self, image_id, to_manage=False)
        lines = await self.service.reader.recipe(found.id)
        if lines is None:
            raise Problem(404, "no_recipe", f"there is no recipe of {found.name}")
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("Content-Disposition", f'attachment; filename="Dockerfile.{found.id}"')
        self.finish(lines)
