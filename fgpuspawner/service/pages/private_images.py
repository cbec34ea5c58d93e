"""The page "My images", and saving a session, without scripts. Everything that is shown is escaped by tornado."""

from __future__ import annotations

from typing import Any

from fgpuspawner import scopes
from fgpuspawner.service.api.private_images import image_object, images_object
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.model import may_save
from fgpuspawner.service.pages.base import PageHandler
from fgpuspawner.service.private_images import answer, delete, image_of, rename, save_session, share
from fgpuspawner.service.problems import Problem

STATE_WORDS = {
    "WISHED": "is going to be made",
    "COMMITTING": "is being made",
    "READY": "ready",
    "FAILED": "was not made",
    "DELETING": "is being removed",
}
IN_THE_MAKING = ("WISHED", "COMMITTING", "DELETING")


class ImagePage(PageHandler):
    """What the pages of private images share."""

    needs_scope = scopes.IMAGES

    @property
    def home(self) -> str:
        """The address of the list."""
        return f"{self.service.prefix}private-images"

    def get_template_namespace(self) -> dict[str, Any]:
        return super().get_template_namespace() | {
            "title": "My images",
            "words": STATE_WORDS,
            "home": self.home,
        }

    def named(self) -> tuple[str, str | None]:
        """Return the name and the tag of the form."""
        return self.field("name"), self.field("tag") or None

    def back(self) -> None:
        """Show the list again."""
        self.redirect(self.home, status=303)


class PrivateImagesPage(ImagePage):
    async def get(self) -> None:
        everybody = self.viewer.admin and self.get_query_argument("show", "mine") == "all"
        images = await self.service.reader.private_images()
        found = images_object(images, self.viewer, self.service.settings.image_quota(), everybody=everybody)
        making = any(image["state"] in IN_THE_MAKING for image in found["images"])
        self.render(
            "private_images.html",
            found=found,
            everybody=everybody,
            making=making,
            saves=self.service.reader.engine.saves_images,
            xsrf=self.xsrf,
        )


class SavePage(ImagePage):
    async def get(self, session_id: str) -> None:
        session = await self.visible_session(session_id)
        world = await self.service.reader.world()
        if not may_save(session, world, self.viewer):
            message = f"session {session_id} cannot be saved as an image, or not by you"
            raise Problem(409, "image_refused", message)
        shown = session_object(session, world, self.viewer, self.service.site)
        self.render("save.html", session=shown, xsrf=self.xsrf)

    async def post(self, session_id: str) -> None:
        await save_session(self, session_id, *self.named())
        self.back()


class RenamePage(ImagePage):
    async def post(self, image_id: str) -> None:
        await rename(self, image_id, *self.named())
        self.back()


class SharePage(ImagePage):
    async def post(self, image_id: str) -> None:
        await share(self, image_id, _listed(self.field("users")), _listed(self.field("groups")))
        self.back()


class AnswerPage(ImagePage):
    async def post(self, image_id: str) -> None:
        await answer(self, image_id, accepted=self.field("accepted") == "yes")
        self.back()


class DeletePage(ImagePage):
    async def get(self, image_id: str) -> None:
        found = await image_of(self, image_id)
        self.render("delete_image.html", image=image_object(found, self.viewer), xsrf=self.xsrf)

    async def post(self, image_id: str) -> None:
        await delete(self, image_id)
        self.back()


def _listed(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]
