"""The page "My images", and saving a session, without scripts. Everything that is shown is escaped by tornado."""

from __future__ import annotations

from typing import Any

from fgpuspawner.service import private_view, view
from fgpuspawner.service.base import IMAGES_SCOPE
from fgpuspawner.service.handlers import no_such_session
from fgpuspawner.service.page import instant
from fgpuspawner.service.pages import PageHandler
from fgpuspawner.service.private_images import change, image_of, save_session, split
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

    needs_scope = IMAGES_SCOPE

    def get_template_namespace(self) -> dict[str, Any]:
        return super().get_template_namespace() | {
            "title": "My images",
            "instant": instant,
            "words": STATE_WORDS,
            "home": f"{self.service.prefix}private-images",
        }

    def field(self, name: str) -> str:
        """Return a field of the form."""
        return str(self.get_body_argument(name, "")).strip()

    def xsrf(self) -> str:
        """Return what a form has to send back. Asked for while the page is made: it sets the cookie."""
        token = self.xsrf_token
        return token.decode("ascii") if isinstance(token, bytes) else token

    def back(self) -> None:
        """Show the list again."""
        self.redirect(f"{self.service.prefix}private-images", status=303)


class MyImages(ImagePage):
    async def get(self) -> None:
        everybody = self.viewer.admin and self.get_query_argument("show", "mine") == "all"
        images = await self.service.reader.private_images()
        quota = self.service.settings.image_quota()
        found = private_view.images_object(images, self.viewer, quota, everybody=everybody)
        making = any(image["state"] in IN_THE_MAKING for image in found["images"])
        self.render("private_images.html", found=found, everybody=everybody, making=making, xsrf=self.xsrf())


class Save(ImagePage):
    async def get(self, session_id: str) -> None:
        reader = self.service.reader
        session = await reader.session(int(session_id))
        if session is None or not view.is_visible(session, self.viewer):
            raise no_such_session(session_id)
        world = await reader.world()
        if not view.may_save(session, world, self.viewer):
            raise Problem(
                409, "image_refused", f"session {session_id} cannot be saved as an image, or not by you"
            )
        shown = view.session_object(session, world, self.viewer, self.service.site)
        self.render("save.html", session=shown, xsrf=self.xsrf())

    async def post(self, session_id: str) -> None:
        await save_session(self, session_id, self.field("name"), self.field("tag") or None)
        self.back()


class Rename(ImagePage):
    async def post(self, image_id: str) -> None:
        found = await image_of(self, image_id)
        name, tag = split(self.field("name"), self.field("tag") or None)
        await change(
            self,
            lambda i, now_s: i.rename(found.id, name=name, tag=tag, now_s=now_s),
            owner=found.owner,
            action="rename",
            target=found.name,
        )
        self.back()


class Share(ImagePage):
    async def post(self, image_id: str) -> None:
        found = await image_of(self, image_id)
        users, groups = (_listed(self.field(name)) for name in ("users", "groups"))
        await change(
            self,
            lambda i, now_s: i.share(found.id, users=users, groups=groups, now_s=now_s),
            owner=found.owner,
            action="share",
            target=found.name,
        )
        self.back()


class Delete(ImagePage):
    async def get(self, image_id: str) -> None:
        found = await image_of(self, image_id)
        self.render(
            "delete_image.html", image=private_view.image_object(found, self.viewer), xsrf=self.xsrf()
        )

    async def post(self, image_id: str) -> None:
        found = await image_of(self, image_id)
        await change(
            self,
            lambda i, now_s: i.delete(found.id, now_s=now_s),
            owner=found.owner,
            action="delete",
            target=found.name,
        )
        self.back()


def _listed(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]
