"""What the administrators' pages and their part of the API share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar
from urllib.parse import urlencode

from fgpu_scheduler import BadSettings, SystemClock
from fgpu_scheduler.store.store import Store
from fgpuspawner.service.base import ADMIN_SCOPE
from fgpuspawner.service.ending import actor_of
from fgpuspawner.service.figures import percent
from fgpuspawner.service.handlers import Api
from fgpuspawner.service.page import instant
from fgpuspawner.service.pages import PageHandler, xsrf_text
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.sent import sent_json

R = TypeVar("R")


class AdminPage(PageHandler):
    """A page for administrators. It works without scripts: whatever it changes is a form."""

    needs_scope = ADMIN_SCOPE
    address = ""

    def get_template_namespace(self) -> dict[str, Any]:
        return super().get_template_namespace() | {
            "xsrf": xsrf_text(self.xsrf_token),
            "address": f"{self.service.prefix}{self.address}",
            "instant": instant,
            "duration": duration_words,
            "percent": percent,
            "urlencode": urlencode,
            "now_s": SystemClock().now_s(),
        }

    def field(self, name: str) -> str:
        """Return a field of the form, without the space around it."""
        return self.get_body_argument(name, "")

    def back(self, fragment: str = "", **query: str) -> None:
        """Go back to the page, after a change of it."""
        kept = {name: value for name, value in query.items() if value}
        text = f"?{urlencode(kept)}" if kept else ""
        self.redirect(
            f"{self.service.prefix}{self.address}{text}{'#' if fragment else ''}{fragment}", status=303
        )


class AdminApi(Api):
    """Answers administrators with JSON objects."""

    needs_scope = ADMIN_SCOPE

    def body(self, known: Collection[str]) -> dict[str, Any]:
        """Return the JSON object that was sent."""
        try:
            found = sent_json(self.request.body)
        except ValueError:
            raise Problem(400, "bad_argument", "the body must be a JSON object") from None
        if not isinstance(found, dict):
            raise Problem(400, "bad_argument", "the body must be a JSON object")
        for key in found:
            if key not in known:
                message = f"{key[:40]!r} is unknown; known are {', '.join(known)}"
                raise Problem(400, "bad_argument", message, field=key[:40])
        return found

    def query(self, known: Collection[str]) -> dict[str, str]:
        """Return the arguments of the address; those of none that is known are refused."""
        for name in self.request.query_arguments:
            if name not in (*known, "_xsrf"):
                message = f"{name[:40]!r} is unknown; known are {', '.join(known)}"
                raise Problem(400, "bad_argument", message, field=name[:40])
        return {name: self.get_query_argument(name, "") for name in known}


def duration_words(seconds: int) -> str:
    """Return how long something takes, as exactly as it matters."""
    minutes, s = divmod(max(0, seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h} h"
    if hours:
        return f"{hours} h {m} min"
    return f"{m} min {s} s" if 0 < m < 10 and s else f"{m} min" if m else f"{s} s"


async def change(handler: PageHandler | Api, what: Callable[[Store, str, int], R]) -> R:
    """Write to the store: ``what`` is given it, who asks for it, and the time.

    Raises:
        StoreUnavailable: it cannot be written.
    """
    by = actor_of(handler)
    return await handler.service.reader.change(lambda store, now_s: what(store, by, now_s))


def problem_of(error: BadSettings, fields: Collection[str]) -> Problem:
    """Return what was wrong with a field, where the message begins with the name of one."""
    name = str(error).partition(":")[0]
    return Problem(400, "bad_argument", str(error), field=name if name in fields else None)


def whole(name: str, given: object, *, least: int, most: int) -> int:
    """Return a whole number from a form, an address or a JSON object.

    Raises:
        Problem: it is none, or not between ``least`` and ``most``.
    """
    number = given
    if isinstance(given, str):
        text = given.strip().removeprefix("-")
        number = int(given) if text.isascii() and text.isdigit() and len(text) < 16 else None
    if type(number) is not int or not least <= number <= most:
        message = f"{name}: must be a whole number from {least} to {most}"
        raise Problem(400, "bad_argument", message, field=name)
    return number
