"""What the API's handlers share: JSON objects, and arguments of addresses."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from fgpu_scheduler import Session
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.model import World
from fgpuspawner.service.objects import Answer, OneSession
from fgpuspawner.service.problems import Problem, bad_argument, forbidden

LARGEST_BODY = 64 * 1024


class Api(Handler):
    def set_default_headers(self) -> None:
        super().set_default_headers()
        # Answers have an ETag, so that a client can ask whether anything changed. They are private to the caller.
        self.set_header("Cache-Control", "private, no-cache")
        self.set_header("Vary", "Authorization, Cookie")

    def answer(self, found: Answer, status: int = 200) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(found.as_json())

    def object_of(self, session: Session, world: World) -> Answer:
        shown = session_object(session, world, self.viewer, self.service.site)
        return OneSession.of(session=shown, simulated=shown.simulated)

    async def answer_session(self, session: Session, status: int = 200) -> None:
        self.answer(self.object_of(session, await self.service.reader.world()), status)

    def everybody(self, what: str, *, of_groups: bool = False) -> bool:
        """Return whether ``all=1`` asks for all users' objects, which only administrators may.

        ``of_groups``: administrators of a resource group may ask for that group's.
        """
        everybody = self.flag("all")
        if everybody and not (self.viewer.sees_others if of_groups else self.viewer.admin):
            raise forbidden(f"all: only administrators see everybody's {what}", field="all")
        return everybody

    def body(self, known: Collection[str]) -> dict[str, Any]:
        """Return the JSON object that was sent; fields other than these are refused."""
        try:
            found = sent_json(self.request.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Problem(400, "bad_argument", "the body must be a JSON object")
        _refuse_unknown(found, known)
        return found

    def query(self, known: Collection[str]) -> dict[str, str]:
        """Return the arguments of the address, empty if missing; unknown ones are refused."""
        _refuse_unknown(self.request.query_arguments, (*known, "_xsrf"), said=known)
        return {name: self.get_query_argument(name, "") for name in known}


def _refuse_unknown(
    given: Collection[str], known: Collection[str], said: Collection[str] | None = None
) -> None:
    for name in given:
        if name not in known:
            message = f"{name[:40]!r} is unknown; known are {', '.join(said or known)}"
            raise Problem(400, "bad_argument", message, field=name[:40])


def sent_json(body: bytes) -> object:
    """Return what was sent, an empty object for nothing.

    Raises:
        ValueError: it is not JSON, too large or too deep, or has text that is not Unicode, which no database stores.
    """
    if len(body) > LARGEST_BODY:
        raise ValueError("it is too large")
    try:
        found: object = json.loads(body or b"{}")
    except RecursionError:
        raise ValueError("it is too deep") from None
    # JSON can spell half of a surrogate pair.
    json.dumps(found, ensure_ascii=False).encode()
    return found


def sent_text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise bad_argument(field, "must be a text")
    return value


class NotThere(Api):
    """Every other address below ``api/``."""

    needs_scope = None

    async def prepare(self) -> None:
        raise Problem(404, "not_found", "there is no such address in the API; docs/rest-api.md lists them")
