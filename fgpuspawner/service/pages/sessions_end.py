"""Ending, keeping and extending a session without scripts: what the script does in a dialogue."""

from __future__ import annotations

from fgpu_scheduler import MOST_MESSAGE_TEXT
from fgpuspawner import scopes
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.pages.base import PageHandler
from fgpuspawner.service.session_actions import end_session, extend_session, keep_session


class EndPage(PageHandler):
    """Asks whether to end a session, and ends it."""

    async def get(self, session_id: str) -> None:
        session = await self.visible_session(session_id)
        world = await self.service.reader.world()
        shown = session_object(session, world, self.viewer, self.service.site)
        self.render("end.html", session=shown, xsrf=self.xsrf, longest=MOST_MESSAGE_TEXT)

    async def post(self, session_id: str) -> None:
        await end_session(self, session_id, message=self.field("message"))
        self.redirect(self.service.prefix, status=303)


class KeepPage(PageHandler):
    """Keeps an idle session."""

    needs_scope = scopes.KEEP

    async def post(self, session_id: str) -> None:
        await keep_session(self, session_id)
        self.redirect(self.service.prefix, status=303)


class ExtendPage(PageHandler):
    """Makes the time limit of a session longer."""

    needs_scope = scopes.KEEP

    async def post(self, session_id: str) -> None:
        await extend_session(self, session_id)
        self.redirect(self.service.prefix, status=303)
