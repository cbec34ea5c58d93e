"""What all pages share. Tornado escapes everything that is shown."""

from __future__ import annotations

import contextlib
import json
from abc import abstractmethod
from typing import Any, ClassVar
from urllib.parse import urlparse

from fgpu_scheduler import FGPUError, StoreUnavailable
from fgpuspawner.service import navigation
from fgpuspawner.service.handler import Handler, viewer_of
from fgpuspawner.service.model import Json
from fgpuspawner.service.problems import Problem
from fgpuspawner.text.times import moment


class PageHandler(Handler):
    """Answers with pages; an unknown caller is sent to the log-in."""

    shows_alarms: ClassVar[bool] = True

    async def prepare(self) -> None:
        site = self.service.site
        if self.request.method == "GET" and self.request.host_name == urlparse(site.hub_host).hostname:
            # Links lead to the Hub's host; the caller is identified at the service's own.
            self.redirect(site.own_host + (self.request.uri or ""))
            return
        await super().prepare()
        # Read for the banner; a page that needs the store reports itself that it cannot be read.
        with contextlib.suppress(StoreUnavailable):
            await self.service.reader.recent_world()

    def refuse_unknown(self) -> None:
        mode = self.request.headers.get("Sec-Fetch-Mode", "navigate")
        if self.request.method == "GET" and mode == "navigate":
            self.redirect(self.get_login_url())
        else:
            super().refuse_unknown()

    @property
    def path_here(self) -> str:
        """The address below the service's prefix."""
        return str(self.request.path.removeprefix(self.service.prefix))

    @property
    def here(self) -> navigation.NavigationEntry | None:
        """The navigation's page that this address belongs to."""
        return navigation.current(self.path_here)

    def get_template_namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = super().get_template_namespace()
        site = self.service.site
        viewer = getattr(self, "viewer", None)
        here = self.here
        for_admins = viewer is not None and viewer.admin and here is not None and here.admin
        return namespace | {
            "prefix": self.service.prefix,
            "hub_url": f"{site.hub_base_url}hub/",
            # At the service's own host, where the Hub answers too: the pages' policy allows pictures from there only.
            "hub_files": f"{site.base_url}hub/",
            "site_name": self.service.settings.site_name,
            "viewer": viewer,
            "title": navigation.title(self.path_here) or self.service.settings.site_name,
            "moment": moment,
            "navigation": navigation.entries(
                self.service.reader.engine,
                admin=viewer is not None and viewer.admin,
                of_group=viewer is not None and viewer.sees_others,
            ),
            "here": here,
            "alarms": self.service.alarms() if for_admins and self.shows_alarms else [],
            "banner": world.banner if viewer and (world := self.service.reader.last_world) else None,
        }

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        if self.wants_part:
            super().write_error(status_code, **kwargs)
        else:
            title = "Not found" if status_code == 404 else "Error"
            self.render("error.html", problem=kwargs["problem"], title=title)

    @property
    def xsrf(self) -> str:
        """The form's token against forgery. Reading it sets the cookie with which it is compared."""
        token = self.xsrf_token
        return token.decode("ascii") if isinstance(token, bytes) else token

    def field(self, name: str) -> str:
        """Return a field of the form, without surrounding space."""
        return self.get_body_argument(name, "")

    def send_parts(self, found: Json) -> None:
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(json.dumps(found))

    @property
    def wants_part(self) -> bool:
        """Whether the page's own script asks for the changed parts."""
        # Also read when refusing an argument that cannot be decoded.
        return any(self.request.query_arguments.get("part", ()))


class FormPage(PageHandler):
    """A page with forms that works without scripts: errors in a form are shown on the page."""

    async def get(self, *_: str) -> None:
        await self.show()

    async def post(self, *_: str) -> None:
        try:
            await self.submit()
        except (Problem, FGPUError) as e:
            trouble = self.problem_of(400, e)
            self.set_status(trouble.status)
            await self.show(trouble)

    @abstractmethod
    async def show(self, trouble: Problem | None = None) -> None:
        """Send the page."""

    @abstractmethod
    async def submit(self) -> None:
        """Do what the form asks for, and redirect to the result."""


class NoPage(PageHandler):
    """Every other address, with the caller's usual header."""

    needs_scope = None

    async def prepare(self) -> None:
        # Also if the Hub does not answer, and for callers who may open no page.
        with contextlib.suppress(Problem):
            model = await self.identify()
            if model is not None and self.hub_auth.check_scopes(self.hub_auth.access_scopes, model):
                self.current_user = model
                self.viewer = viewer_of(model, self.service.settings, self.hub_auth)
        raise Problem(404, "not_found", "There is no such page.")
