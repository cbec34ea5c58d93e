"""The API's private images: objects, and saving, sharing, renaming and deleting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fgpu_scheduler import HELD_IMAGES, ImageQuota, PrivateImage, shown_mib
from fgpu_scheduler import PrivateImages as StoredImages
from fgpuspawner import scopes
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api, sent_text
from fgpuspawner.service.model import Json, Viewer
from fgpuspawner.service.private_images import (
    answer,
    answer_of,
    delete,
    image_of,
    is_mine,
    is_shared_with,
    is_visible,
    may_manage,
    rename,
    save_session,
    share,
)
from fgpuspawner.service.problems import Problem, bad_argument

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
        """Send an image; null if it is gone."""
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
        lines = await self.service.reader.read(lambda store: StoredImages(store).recipe(found.id))
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
