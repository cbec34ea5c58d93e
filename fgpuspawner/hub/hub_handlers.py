"""Changes to JupyterHub's request handlers: requesters are recorded, health is reported, large requests are refused.

JupyterHub does not tell a spawner which user ends, deletes or opens a server. Every such request goes through a handler
of the Hub: its pages, its API, or the service's requests, which carry the caller's token or name the caller. Each
handler stores itself in a context variable for the duration of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs, urlparse

from jupyterhub import orm
from jupyterhub.apihandlers import APIHandler
from jupyterhub.apihandlers.auth import OAuthAuthorizeHandler
from jupyterhub.apihandlers.users import UserServerAPIHandler, UserTokenListAPIHandler
from jupyterhub.handlers import BaseHandler
from jupyterhub.handlers.pages import HealthCheckHandler
from jupyterhub.scopes import needs_scope
from jupyterhub.user import User
from jupyterhub.utils import url_path_join
from tornado.web import HTTPError

from fgpu_scheduler import FGPUError, UnknownSession
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.hub.disks import HubDisk
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.scopes import SERVICE, SESSION_HEADER

MOST_OF_A_USER = 16 << 10
"""Bytes of an ordinary user's request; the launch form has less than one KiB."""
MOST_TOKENS = 200
"""API tokens of one user, with those of the user's servers. Each is a row that token look-ups compare."""
LOOK_WITHIN_S = 5.0
LOOK_AGAIN_S = 1.0

_handler: ContextVar[Any] = ContextVar("handler", default=None)


def current_handler() -> Any:
    """Return the handler of the current request, also in a start that the request makes; None outside requests.

    `Spawner.handler` is that of the last request for a server, which may be another user's.
    """
    return _handler.get()


def current_login() -> str:
    """Return the log-in of the browser that asks, as JupyterHub's cookie names it; "" without one, as with a token."""
    handler = current_handler()
    return "" if handler is None else handler.get_session_cookie() or ""


def ended_by(owner: str) -> str | None:
    """Return who ends this user's server in the current request; None for the owner, or outside such a request."""
    handler = current_handler()
    # Other requests start work that outlives them.
    deletes = handler is not None and handler.request.method == "DELETE"
    return actor_name(handler.current_user if deletes else None, other_than=owner)


def actor_name(who: Any, *, other_than: str) -> str | None:
    """Return a user's or service's name for the audit log; None for ``other_than``."""
    if who is None:
        return None
    if isinstance(who, orm.Service):
        return f"service {who.name}"
    return None if who.name == other_than else str(who.name)


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
            if len(self.request.body) > MOST_OF_A_USER:
                user = self.current_user
                if isinstance(user, User) and not user.admin:
                    # The Hub stores what users send in its database, in any number of rows.
                    raise HTTPError(413, f"the request has more than {MOST_OF_A_USER >> 10} KiB; send less")
            _handler.set(self)

    class RecordingDeletes(Recording):
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

    class RecordingOpens(Recording):
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

    if issubclass(handler, UserServerAPIHandler):
        return RecordingDeletes
    return RecordingOpens if issubclass(handler, OAuthAuthorizeHandler) else Recording


class Tokens(UserTokenListAPIHandler):  # type: ignore[misc]
    """JupyterHub's `/users/{name}/tokens` with a limit on the number of a user's tokens."""

    async def post(self, user_name: str) -> None:
        # JupyterHub itself purges expired tokens only once an hour.
        orm.APIToken.purge_expired(self.db)
        user = self.find_user(user_name)
        own = self.db.query(orm.APIToken).filter_by(client_id="jupyterhub", user_id=user and user.id)
        if user is not None and own.count() >= MOST_TOKENS:
            raise HTTPError(
                429, f"A user may have {MOST_TOKENS} tokens; revoke tokens that you no longer use"
            )
        await super().post(user_name)


class DatabaseCheck:
    """Whether the scheduler's database can be written: one check for all requests of about the same time.

    Clients ask without a log-in and at any rate, and each check takes the lock that submissions, starts and ends need.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._look: asyncio.Future[bool] | None = None
        self._until = 0.0

    async def now(self) -> bool:
        look = self._look
        if look is None or (look.done() and asyncio.get_running_loop().time() >= self._until):
            look = self._look = asyncio.ensure_future(self._checked())
        try:
            async with asyncio.timeout(LOOK_WITHIN_S):
                return await asyncio.shield(look)
        except TimeoutError:
            return False

    async def _checked(self) -> bool:
        try:
            await asyncio.to_thread(self._check)
        except FGPUError:
            return False
        finally:
            self._until = asyncio.get_running_loop().time() + LOOK_AGAIN_S
        return True


class HubHealth(HealthCheckHandler):  # type: ignore[misc]
    """The Hub's health for monitors, without log-in and without details."""

    disk: HubDisk
    runtime: Runtime
    database: DatabaseCheck

    async def prepare(self) -> None:
        """Skip authentication: it would query the Hub's database."""

    async def get(self) -> None:
        room = self.disk.room
        disk = "full" if room.full else "short" if room.short else "ok"
        parts = {"disk": disk, "database": "ok", "engine": "ok"}
        if not await self.database.now():
            parts["database"] = "cannot be written"
        answering, silent = self.runtime.engine.answering()
        if silent:
            parts["engine"] = "some machines are silent" if answering else "silent"
        if why := self.runtime.why_not_all():
            parts["sessions"] = why
        works = parts["database"] == "ok" and parts["disk"] != "full" and parts["engine"] != "silent"
        works = works and self.runtime.has_begun
        fine = all(word == "ok" for word in parts.values())
        self.set_status(200 if works else 503)
        self.set_header("Cache-Control", "no-store")
        self.finish({"status": "ok" if fine else "degraded" if works else "unavailable", **parts})

    head = get


def serve_health(app: Any, disk: HubDisk, runtime: Runtime) -> None:
    """Replace the handler of the Hub's health address."""
    database = DatabaseCheck(runtime.store.check_writable)
    own = type("HubHealth", (HubHealth,), {"disk": disk, "runtime": runtime, "database": database})
    # In place: JupyterHub starts with this list object.
    app.handlers[:] = [
        (entry[0], own, *entry[2:]) if entry[1] is HealthCheckHandler else entry for entry in app.handlers
    ]


class SessionLogHandler(APIHandler):  # type: ignore[misc]
    """A session's log, for the managed service only: it knows who may read it."""

    runtime: Runtime

    async def get(self, session_id: str) -> None:
        asker = self.current_user
        if not isinstance(asker, orm.Service) or asker.name != SERVICE:
            raise HTTPError(403, "only the service reads logs")
        try:
            found = await self.runtime.logs.read(await self.runtime.queue.session(int(session_id)))
        except UnknownSession:
            raise HTTPError(404, "there is no such session") from None
        except EngineSilent as e:
            raise HTTPError(503, str(e)) from None
        self.set_header("Content-Type", "application/octet-stream")
        self.finish(found)


def serve_logs(app: Any, runtime: Runtime) -> None:
    """Add the address of sessions' logs to the Hub's API."""
    own = type("SessionLogHandler", (SessionLogHandler,), {"runtime": runtime})
    app.handlers.insert(0, (url_path_join(app.hub_prefix, "api/fgpu/log/([0-9]{1,18})"), own))
