"""What the administrators' pages and their part of the API share."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fgpu_scheduler import SystemClock, memory_words
from fgpuspawner import scopes
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.pages.base import FormPage, PageHandler
from fgpuspawner.service.pages.session_rows import percent
from fgpuspawner.text.times import duration


class AdminPage(PageHandler):
    needs_scope = scopes.ADMIN

    @property
    def address(self) -> str:
        """The address of the navigation's page that this page belongs to."""
        return self.service.prefix + (self.here.address if self.here else "")

    def get_template_namespace(self) -> dict[str, Any]:
        return super().get_template_namespace() | {
            "xsrf": self.xsrf,
            "address": self.address,
            "duration": duration,
            "memory_words": memory_words,
            "percent": percent,
            "urlencode": urlencode,
            "now_s": SystemClock().now_s(),
        }

    def back(self, fragment: str = "", **query: str) -> None:
        kept = {name: value for name, value in query.items() if value}
        after = (f"?{urlencode(kept)}" if kept else "") + (f"#{fragment}" if fragment else "")
        self.redirect(self.address + after, status=303)


class AdminFormPage(AdminPage, FormPage):
    pass


class AdminApi(Api):
    needs_scope = scopes.ADMIN
