"""The page "My images", and saving a session, without scripts. Tornado escapes everything that is shown."""

from __future__ import annotations

from typing import Any

from fgpu_scheduler import memory_words
from fgpuspawner import scopes
from fgpuspawner.service.api.images import (
    answer,
    delete,
    image_object,
    image_of,
    images_object,
    rename,
    save_session,
    share,
)
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.model import may_save
from fgpuspawner.service.pages.base import FormPage, PageHandler
from fgpuspawner.service.problems import Problem

STATE_WORDS = {
    "WISHED": "waits to be made",
    "COMMITTING": "is being made",
    "READY": "ready",
    "FAILED": "was not made",
    "DELETING": "is being removed",
}
IN_THE_MAKING = ("WISHED", "COMMITTING", "DELETING")


class ImagePage(PageHandler):
    needs_scope = scopes.IMAGES

    @property
    def home(self) -> str:
        return f"{self.service.prefix}private-images"

    def get_template_namespace(self) -> dict[str, Any]:
        return super().get_template_namespace() | {
            "words": STATE_WORDS,
            "home": self.home,
            "memory_words": memory_words,
        }

    def named(self) -> tuple[str, str | None]:
        return self.field("name"), self.field("tag") or None

    def back(self) -> None:
        self.redirect(self.home, status=303)


class PrivateImagesPage(ImagePage):
    async def get(self) -> None:
        everybody = self.viewer.admin and self.get_query_argument("show", "mine") == "all"
        images = await self.service.reader.private_images()
        found = images_object(images, self.viewer, self.service.settings.image_quota(), everybody=everybody)
        engine = self.service.reader.engine
        making = any(image["state"] in IN_THE_MAKING for image in found["images"])
        self.render(
            "private_images.html",
            found=found,
            everybody=everybody,
            making=making,
            not_saved="" if engine.saves_images else engine.why_not_saved,
            xsrf=self.xsrf,
        )


class SavePage(ImagePage, FormPage):
    async def show(self, trouble: Problem | None = None) -> None:
        """Show the form, with what was sent if there is an error."""
        session_id = self.path_args[0]
        session = await self.visible_session(session_id)
        world = await self.service.reader.world()
        if not may_save(session, world, self.viewer):
            message = f"session {session_id} cannot be saved as an image, or not by you"
            raise trouble or Problem(409, "image_refused", message)
        shown = session_object(session, world, self.viewer, self.service.site)
        refused = {} if trouble is None else dict([_beside(trouble.message)])
        sent = trouble is not None
        self.render(
            "save.html",
            session=shown,
            xsrf=self.xsrf,
            refused=refused,
            given={
                "name": self.field("name") if sent else name_for(session.request.image),
                "tag": self.field("tag") if sent else "",
            },
            end=self.field("end") == "yes" if sent else self.get_query_argument("end", "") == "1",
        )

    async def submit(self) -> None:
        await save_session(self, self.path_args[0], *self.named(), end=self.field("end") == "yes")
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


def name_for(image: str) -> str:
    """Return a name to suggest: a private image's own name, else one made from the slug."""
    own = image.partition("/")[2].partition(":")[0]
    return own or f"{image}-saved"


def _beside(message: str) -> tuple[str, str]:
    field, _, said = message.partition(": ")
    return (field, said) if field in ("name", "tag") else ("", message)


def _listed(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]
