"""Ending, keeping, extending and resizing a session without scripts."""

from __future__ import annotations

from fgpu_scheduler import MOST_MESSAGE_TEXT, memory_words
from fgpuspawner import scopes
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.pages.base import FormPage, PageHandler
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.resizing import FIELDS, resize_session
from fgpuspawner.service.session_actions import end_session, extend_session, keep_session

MOST_DIGITS = 10


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


class ResizePage(FormPage):
    """Asks for a running session's new amount, and has the Hub set it."""

    needs_scope = scopes.KEEP

    async def show(self, trouble: Problem | None = None) -> None:
        session = await self.visible_session(self.path_args[0])
        world = await self.service.reader.world()
        shown = session_object(session, world, self.viewer, self.service.site)
        resize, memory_mib = shown.resize, shown.gpu_memory_mib
        used_mib = None if shown.meter is None else shown.meter.memory_used_mib
        self.render(
            "resize.html",
            session=shown,
            gpu_memory="" if memory_mib is None else memory_words(memory_mib),
            used="" if used_mib is None else memory_words(used_mib),
            exact=session.request.gpu_memory_mib is not None,
            percent=session.request.compute_percent,
            why_not="Only a running session can be resized." if resize is None else resize.why_not,
            given={name: self.field(name) for name in FIELDS},
            refused="" if trouble is None else trouble.message.removeprefix(f"{trouble.field}: "),
            xsrf=self.xsrf,
        )

    async def submit(self) -> None:
        given: dict[str, object] = {n: self.field(n) for n in FIELDS if n in self.request.body_arguments}
        for name in FIELDS[1:]:
            number = self.field(name)
            if number.isascii() and number.isdigit() and len(number) < MOST_DIGITS:
                given[name] = int(number)
        await resize_session(self, self.path_args[0], given)
        self.redirect(self.service.prefix, status=303)


class KeepPage(PageHandler):
    needs_scope = scopes.KEEP

    async def post(self, session_id: str) -> None:
        await keep_session(self, session_id)
        self.redirect(self.service.prefix, status=303)


class ExtendPage(PageHandler):
    needs_scope = scopes.KEEP

    async def post(self, session_id: str) -> None:
        await extend_session(self, session_id)
        self.redirect(self.service.prefix, status=303)
