"""The first page, and ending a session without scripts. Everything that is shown is escaped by tornado."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode, urlparse

from fgpu_scheduler import Session, StoreUnavailable, SystemClock
from fgpuspawner.service import view
from fgpuspawner.service.base import KEEP_SCOPE, Handler
from fgpuspawner.service.handlers import end_session, keep_session, no_such_session
from fgpuspawner.service.page import Page, instant, page
from fgpuspawner.service.problems import Problem

PAST_SHOWN = 5


class PageHandler(Handler):
    """Answers with pages; who is not known is sent to log in."""

    async def prepare(self) -> None:
        site = self.service.site
        if self.request.method == "GET" and self.request.host_name == urlparse(site.hub_host).hostname:
            # Links lead to the Hub's host; who asks is known at the service's own.
            self.redirect(site.own_host + (self.request.uri or ""))
            return
        await super().prepare()

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
        return namespace | {
            "prefix": self.service.prefix,
            "hub_url": f"{site.hub_base_url}hub/",
            # The Hub answers there too, and of its own host pages are allowed no picture.
            "icon_url": f"{site.base_url}hub/static/favicon.ico",
            "viewer": viewer,
            "title": "GPU sessions",
        }

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        problem = self.problem_of(status_code, kwargs.get("exc_info", (None, None, None))[1])
        if self.wants_part:
            super().write_error(status_code, **kwargs)
            return
        self.render("error.html", problem=problem)

    @property
    def wants_part(self) -> bool:
        """Whether the page's own script asks, for the part that changes."""
        return self.get_query_argument("part", "") == "1"


class NoPage(PageHandler):
    """Whatever is not there."""

    needs_scope = None

    async def prepare(self) -> None:
        raise Problem(404, "not_found", "There is no such page.")


class Front(PageHandler):
    """The sessions and the resources. It shows the last good reading, with its age, if there is none now."""

    async def get(self) -> None:
        everybody = self.viewer.admin and self.get_query_argument("show", "all") != "mine"
        past: tuple[Session, ...] = ()
        trouble = None
        world: view.World | None
        try:
            world = await self.service.reader.world()
            if everybody or self.viewer.user is not None:
                past = await self.service.reader.ended(None if everybody else self.viewer.user, PAST_SHOWN)
        except StoreUnavailable as e:
            trouble, world = self.problem_of(503, e), self.service.reader.last_world
            self.set_status(503)
            if world is None:
                raise
        now_s = SystemClock().now_s()
        self.render(
            "part.html" if self.wants_part else "index.html",
            page=self._page(world, past, everybody),
            trouble=trouble,
            age_s=now_s - world.snapshot.now_s,
            now=instant(now_s),
            query=self._query,
        )

    def _page(self, world: view.World, past: tuple[Session, ...], everybody: bool) -> Page:
        site, viewer = self.service.site, self.viewer
        live = view.live_sessions(world, viewer, everybody=everybody)
        step = self.service.settings.caps().fgpu_step_milli
        return page(
            sessions=view.sessions_object(live, world, viewer, site)["sessions"],
            ended=view.sessions_object(past, world, viewer, site)["sessions"],
            capacity=view.capacity_object(world, viewer, fgpu_step_milli=step),
            group=self.get_query_argument("group", None),
            viewer=viewer,
            everybody=everybody,
            base_url=site.hub_base_url,
            hub_host=site.hub_host,
            read_at_s=world.snapshot.now_s,
        )

    def _query(self, **changes: str) -> str:
        """Return the address of this page with other choices."""
        kept = {name: v for name in ("group", "show") if (v := self.get_query_argument(name, None))}
        return "?" + urlencode(kept | changes)


class End(PageHandler):
    """Asks whether to end a session, and ends it. What the script does in a dialogue, without scripts."""

    needs_scope = None

    async def get(self, session_id: str) -> None:
        session = await self.service.reader.session(int(session_id))
        if session is None or not view.is_visible(session, self.viewer):
            raise no_such_session(session_id)
        shown = view.session_object(
            session, await self.service.reader.world(), self.viewer, self.service.site
        )
        # Asked for here: it sets the cookie that the form's field is compared with.
        self.render("end.html", session=shown, xsrf=xsrf_text(self.xsrf_token))

    async def post(self, session_id: str) -> None:
        await end_session(self, session_id)
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
