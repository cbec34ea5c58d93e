"""Records the user behind a request to end, delete or open another user's server; JupyterHub does not tell spawners.

Every such request goes through a handler of the Hub: its pages, its API, or this service's requests, which carry the
caller's token or name the caller. Each handler stores the user in a context variable for the duration of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs, urlparse

from jupyterhub import orm
from jupyterhub.apihandlers.auth import OAuthAuthorizeHandler
from jupyterhub.apihandlers.users import UserServerAPIHandler
from jupyterhub.handlers import BaseHandler
from jupyterhub.scopes import needs_scope
from jupyterhub.user import User
from tornado.web import HTTPError

from fgpuspawner.scopes import SESSION_HEADER

MOST_OF_A_USER = 16 << 10
"""Bytes of an ordinary user's request; the launch form has less than one KiB."""

_deletes: ContextVar[Any] = ContextVar("deletes", default=None)
"""The user of the current DELETE request. Only those: other requests start work that outlives them."""


def ended_by(owner: str) -> str | None:
    """Return who ends this user's server in the current request; None for the owner, or outside such a request."""
    return actor_name(_deletes.get(), other_than=owner)


def actor_name(who: Any, *, other_than: str) -> str | None:
    """Return a user's or service's name for the audit log; None for ``other_than``."""
    if who is None:
        return None
    if isinstance(who, orm.Service):
        return f"service {who.name}"
    return None if who.name == other_than else str(who.name)


def _is_ordinary(who: Any) -> bool:
    return isinstance(who, User) and not who.admin


def record_requesters(app: Any, opened: Callable[[str, str, str], None]) -> None:
    """Make the handlers of a starting Hub record their users; ``opened`` gets owner, server and the opening user."""
    app.handlers[:] = [(one[0], _recording(one[1], opened), *one[2:]) for one in app.handlers]


def _recording(handler: Any, opened: Callable[[str, str, str], None]) -> Any:
    if not (isinstance(handler, type) and issubclass(handler, BaseHandler)):
        return handler

    class Recording(handler):  # type: ignore[misc]
        async def prepare(self) -> None:
            await super().prepare()
            # Read only where needed: `/hub/health` identifies no user, and raises when asked for one.
            if len(self.request.body) > MOST_OF_A_USER and _is_ordinary(self.current_user):
                # The Hub stores what users send in its database, in any number of rows.
                raise HTTPError(413, f"the request has more than {MOST_OF_A_USER >> 10} KiB; send less")
            if self.request.method == "DELETE":
                _deletes.set(self.current_user)

    if issubclass(handler, UserServerAPIHandler):
        return _for_named_session(Recording)
    if not issubclass(handler, OAuthAuthorizeHandler):
        return Recording

    class RecordingOpener(Recording):
        def send_oauth_response(self, headers: Any, body: Any, status: int) -> None:
            super().send_oauth_response(headers, body, status)
            if "code" not in parse_qs(urlparse(headers.get("Location", "")).query):
                return
            client = self.oauth_provider.fetch_by_client_id(self.get_argument("client_id"))
            if client is None or client.spawner is None:
                return
            owner, server = client.spawner.user.name, client.spawner.name
            by = actor_name(self.current_user, other_than=owner)
            if by is not None:
                opened(owner, server, by)

    return RecordingOpener


def _for_named_session(handler: Any) -> Any:
    class ForNamedSession(handler):  # type: ignore[misc]
        @needs_scope("delete:servers")  # type: ignore[untyped-decorator]
        async def delete(self, user_name: str, server_name: str = "") -> None:
            meant = self.request.headers.get(SESSION_HEADER)
            user = self.find_user(user_name)
            if meant and user is not None and server_name in user.spawners:
                # A client that ends one session must not end the server's next one.
                serves = getattr(user.spawners[server_name], "session_id", None)
                if serves is not None and str(serves) != meant:
                    raise HTTPError(409, f"session {meant} has ended, and its server has another one by now")
            await super().delete(user_name, server_name)

    return ForNamedSession
