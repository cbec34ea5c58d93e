"""What pages share, and ending and keeping a session without scripts. Everything that is shown is escaped by tornado."""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import urlparse

from fgpu_scheduler import StoreUnavailable
from fgpu_scheduler.store.end_messages import MOST_TEXT
from fgpuspawner.service import navigation, view
from fgpuspawner.service.base import KEEP_SCOPE, Handler
from fgpuspawner.service.handlers import end_session, keep_session, no_such_session
from fgpuspawner.service.problems import Problem


class PageHandler(Handler):
    """Answers with pages; who is not known is sent to log in."""

    async def prepare(self) -> None:
        site = self.service.site
        if self.request.method == "GET" and self.request.host_name == urlparse(site.hub_host).hostname:
            # Links lead to the Hub's host; who asks is known at the service's own.
            self.redirect(site.own_host + (self.request.uri or ""))
            return
        await super().prepare()
        # So that the banner is today's; a page that needs the store says itself that it cannot be read.
        with contextlib.suppress(StoreUnavailable):
            await self.service.reader.recent_world()

    def refuse_unknown(self) -> None:
        mode = self.request.headers.get("Sec-Fetch-Mode", "navigate")
        if self.request.method == "GET" and mode == "navigate":
            self.redirect(self.get_login_url())
        else:
            super().refuse_unknown()

    def get_template_namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = super().get_template_namespace()
        site = self.service.site
        viewer = getattr(self, "viewer", None)
        path = self.request.path.removeprefix(self.service.prefix)
        return namespace | {
            "prefix": self.service.prefix,
            "hub_url": f"{site.hub_base_url}hub/",
            # The Hub answers there too, and of its own host pages are allowed no picture.
            "icon_url": f"{site.base_url}hub/static/favicon.ico",
            "viewer": viewer,
            "title": "GPU sessions",
            "navigation": navigation.entries(admin=viewer is not None and viewer.admin),
            "here": navigation.current(path),
            "banner": world.banner if viewer and (world := self.service.reader.last_world) else None,
        }

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        problem = self.problem_of(status_code, kwargs.get("exc_info", (None, None, None))[1])
        if self.wants_part:
            super().write_error(status_code, **kwargs)
            return
        self.render("error.html", problem=problem)

    @property
    def wants_part(self) -> bool:
        """Whether the page's own script asks, for what has changed."""
        return bool(self.get_query_argument("part", ""))


class NoPage(PageHandler):
    """Whatever is not there."""

    needs_scope = None

    async def prepare(self) -> None:
        raise Problem(404, "not_found", "There is no such page.")


class End(PageHandler):
    """Asks whether to end a session, and ends it. What the script does in a dialogue, without scripts."""

    async def get(self, session_id: str) -> None:
        session = await self.service.reader.session(int(session_id))
        if session is None or not view.is_visible(session, self.viewer):
            raise no_such_session(session_id)
        shown = view.session_object(
            session, await self.service.reader.world(), self.viewer, self.service.site
        )
        # Asked for here: it sets the cookie that the form's field is compared with.
        self.render("end.html", session=shown, xsrf=xsrf_text(self.xsrf_token), longest=MOST_TEXT)

    async def post(self, session_id: str) -> None:
        await end_session(self, session_id, message=self.get_body_argument("message", ""))
        self.redirect(self.service.prefix, status=303)


class Keep(PageHandler):
    """Keeps an idle session, without scripts."""

    needs_scope = KEEP_SCOPE

    async def post(self, session_id: str) -> None:
        await keep_session(self, session_id)
        self.redirect(self.service.prefix, status=303)


def xsrf_text(token: bytes | str) -> str:
    """Return the token that a form sends back."""
    return token.decode("ascii") if isinstance(token, bytes) else token
