"""What all handlers share: the caller, their rights, and errors as one object or one page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import unquote, urlencode

from jupyterhub.services.auth import HubOAuth, HubOAuthenticated
from tornado.web import Finish, HTTPError, RequestHandler

from fgpu_scheduler import FGPUError, Session, Store, StoreUnavailable
from fgpuspawner import scopes
from fgpuspawner.concurrency.background import Background
from fgpuspawner.concurrency.turns import TooMany, Turns
from fgpuspawner.service.csv_file import Cell, csv_text
from fgpuspawner.service.frameworks import FrameworkInstaller
from fgpuspawner.service.hub import Hub
from fgpuspawner.service.metrics import ERRORS
from fgpuspawner.service.model import Site, Viewer, World, administered, is_visible
from fgpuspawner.service.problems import Problem, bad_argument, forbidden, hub_unavailable, no_such_session
from fgpuspawner.service.reader import Reader
from fgpuspawner.service.stream import Watcher
from fgpuspawner.settings import FGPU

log = logging.getLogger(__name__)

R = TypeVar("R")

STATUS_OF = {
    "image_refused": 409,
    "image_name_taken": 409,
    "image_in_use": 409,
    "over_image_quota": 409,
    "no_such_image": 404,
}
"""HTTP statuses of errors that the request did not cause."""

CONCURRENT_REQUESTS = 4
"""Requests of one user that are handled at a time; a browser has six connections, and a few tabs."""
MAX_REQUESTS = 1000
"""Most requests of one user, waiting ones included."""
MAX_LOG_INS = 10_000
MAX_ADDRESS_LENGTH = 2000
"""Longest address, in characters, to return to after a log-in."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)


@dataclass(frozen=True, slots=True)
class Service:
    """Shared by all handlers; one per process."""

    settings: FGPU
    reader: Reader
    watcher: Watcher
    hub: Hub
    site: Site
    prefix: str
    forecast_key: str
    background: Background = field(default_factory=lambda: Background(log))
    frameworks: FrameworkInstaller = field(default_factory=FrameworkInstaller)
    turns: Turns = field(default_factory=lambda: Turns(at_a_time=CONCURRENT_REQUESTS, most=MAX_REQUESTS))

    def alarms(self) -> list[str]:
        """Return what administrators must know at once: no room on the disk, or sharing of images without domains."""
        room, settings = self.reader.room(), self.settings
        danger = settings.danger_of_sharing(
            saves_images=self.reader.engine.saves_images, subdomain_host=self.site.hub_host
        )
        return [words for words in (room and room.words(settings.data_path()), danger) if words]


class LogIns(HubOAuth):  # type: ignore[misc]
    """Identifies callers through the Hub. It keeps a limited number of begun log-ins, as anyone can begin one."""

    def generate_state(self, next_url: str | None = None, **more: Any) -> str:
        """Note a log-in that begins, and return its id. An address that is too long is not returned to."""
        while len(self._oauth_states) >= MAX_LOG_INS:
            del self._oauth_states[next(iter(self._oauth_states.values))]
        short = next_url if len(next_url or "") <= MAX_ADDRESS_LENGTH else None
        return str(super().generate_state(short, **more))


class Handler(HubOAuthenticated, RequestHandler):  # type: ignore[misc]
    """Identifies the caller before a method runs, or refuses.

    The application's own ``xsrf_cookies`` is off: tornado would check it before the caller is known, and a token in a
    header needs no such check. `HubOAuth` makes the check whenever a cookie would identify the caller.
    """

    #: The scope that the caller needs; None: any user of the service.
    needs_scope: ClassVar[str | None] = scopes.QUEUE_READ
    #: Whether administrators of a resource group need no other scope. The handler then shows and changes only that group.
    for_groups: ClassVar[bool] = False
    service: Service
    viewer: Viewer
    #: The user with the turn that this request holds.
    _turn_of: str | None = None
    _disconnected = False

    def initialize(self, service: Service) -> None:
        self.service = service

    def set_default_headers(self) -> None:
        self.set_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")
        self.clear_header("Server")

    @property
    def actor(self) -> str:
        return self.viewer.user or f"service {self.current_user.get('name', '')}"

    async def change(self, what: Callable[[Store, str, int], R]) -> R:
        """Write to the store with ``what(store, actor, now_s)``."""
        by = self.actor
        return await self.service.reader.change(lambda store, now_s: what(store, by, now_s))

    async def administered_world(self) -> World:
        return administered(await self.service.reader.world(), self.viewer)

    async def ended_sessions(self, limit: int, *, everybody: bool) -> tuple[Session, ...]:
        """Return the caller's latest ended sessions; with ``everybody``, those of all users, for administrators."""
        user = self.viewer.user
        everybody = everybody and self.viewer.admin
        if user is None and not everybody:
            return ()
        return await self.service.reader.read_queue(
            lambda queue: queue.ended(user=None if everybody else user, limit=limit)
        )

    async def visible_session(self, session_id: str) -> Session:
        """Return a session that the caller may see, or raise `Problem` 404."""
        session = await self.service.reader.session(int(session_id))
        if session is None or not is_visible(session, self.viewer):
            raise no_such_session(session_id)
        return session

    def send_csv(self, name: str, columns: Sequence[str], lines: Iterable[Sequence[Cell]]) -> None:
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        self.set_header("Content-Disposition", f'attachment; filename="{name}"')
        self.finish(csv_text(columns, lines))

    def link_next_page(self, before: int | None) -> None:
        """Add a ``Link`` header to the next part: this address with ``before``; none after the last part."""
        if before is not None:
            given = {name: self.get_query_argument(name) for name in self.request.query_arguments}
            given.pop("_xsrf", None)
            self.set_header("Link", f'<?{urlencode(given | {"before": str(before)})}>; rel="next"')

    async def prepare(self) -> None:
        model = await self.identify()
        if model is None:
            self.refuse_unknown()
            return
        if not self.hub_auth.check_scopes(self.hub_auth.access_scopes, model):
            raise forbidden(needs(scopes.ACCESS))
        # A page that refuses a user also shows their name.
        self.current_user = model
        self.viewer = viewer_of(model, self.service.settings, self.hub_auth)
        may = self.needs_scope is None or self.hub_auth.check_scopes(self.needs_scope, model)
        if not may and not (self.for_groups and self.viewer.administers):
            raise forbidden(needs(self.needs_scope, of_group="GROUP" if self.for_groups else None))
        await self.wait_for_turn()

    async def wait_for_turn(self) -> None:
        """Wait until fewer than `CONCURRENT_REQUESTS` requests of this user are handled. Other services do not wait."""
        user = self.viewer.user
        if user is None:
            return
        try:
            await self.service.turns.take(user)
        except TooMany:
            message = f"{MAX_REQUESTS} of your requests are waiting; send the next when some are answered"
            raise Problem(429, "too_many_requests", message) from None
        self._turn_of = user
        if self._disconnected:
            raise Finish

    def on_connection_close(self) -> None:
        self._disconnected = True

    def leave_turn(self) -> None:
        """Let the next request of this user run. Idempotent."""
        user, self._turn_of = self._turn_of, None
        if user is not None:
            self.service.turns.leave(user)

    async def _execute(self, *args: Any, **kwargs: Any) -> None:
        # Tornado's ``on_finish`` does not run if the client has gone.
        try:
            await super()._execute(*args, **kwargs)
        finally:
            self.leave_turn()

    async def identify(self) -> dict[str, Any] | None:
        """Return the Hub's model of the caller, or None if the Hub does not know them."""
        try:
            model = await self.hub_auth.get_user(self, sync=False)
        except HTTPError as e:
            raise hub_unavailable() from e
        return cast("dict[str, Any] | None", model)

    def refuse_unknown(self) -> None:
        if self.get_secure_cookie(self.hub_auth.cookie_name) is not None:
            try:
                self.check_xsrf_cookie()
            except HTTPError:
                message = "send the header X-XSRFToken with the value of the cookie _xsrf"
                raise Problem(403, "xsrf", message) from None
        raise Problem(401, "unauthenticated", "log in, or send a token of JupyterHub that is still valid")

    @property
    def token(self) -> str:
        """The caller's own token, for calls on their behalf."""
        return str(self.hub_auth.get_token(self))

    def flag(self, name: str) -> bool:
        value = self.get_query_argument(name, "0")
        if value not in ("0", "1"):
            raise bad_argument(name, "must be 0 or 1")
        return value == "1"

    def number(self, name: str, *, default: int | None, least: int, most: int) -> Any:
        """Return a whole number of the query, or its default."""
        value = self.get_query_argument(name, None)
        if value is None:
            return default
        return whole_number(name, value, least=least, most=most)

    def problem_of(self, status: int, error: BaseException | None) -> Problem:
        """Return what a user may be shown of an error."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, StoreUnavailable):
            # The error's text names the database, so it goes only to the log.
            return Problem(503, error.code, "the scheduler's database cannot be read; try again in a moment")
        if isinstance(error, FGPUError):
            return Problem(STATUS_OF.get(error.code, 400), error.code, str(error))
        phrase = HTTPStatus(status).phrase if status in {s.value for s in HTTPStatus} else "error"
        return Problem(status, phrase.lower().replace(" ", "_").replace("-", "_"), phrase)

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        problem = self.problem_of(status_code, kwargs.get("exc_info", (None, None, None))[1])
        ERRORS.labels(problem.code).inc()
        super().send_error(problem.status, problem=problem, **kwargs)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(kwargs["problem"].as_json())

    def log_exception(self, typ: Any, value: BaseException | None, tb: Any) -> None:
        if isinstance(value, Problem | FGPUError):
            log.info("%s %s: %s", self.request.method, self.request.path, value)
        else:
            super().log_exception(typ, value, tb)


def whole_number(name: str, given: object, *, least: int, most: int) -> int:
    """Return a whole number from a form, an address or a JSON object."""
    number = given
    if isinstance(given, str):
        text = given.strip().removeprefix("-")
        # The text may be of any length: only a short one is parsed.
        number = int(given) if text.isascii() and text.isdigit() and len(text) < 17 else None
    if type(number) is not int or not least <= number <= most:
        raise bad_argument(name, f"must be a whole number from {least} to {most}")
    return number


def needs(scope: str | None, *, of_group: str | None = None) -> str:
    """Return who may do this and which scope a program needs; ``of_group``: that of its administrators will do."""
    admins = scope == scopes.ADMIN
    who = "only administrators may do this" if admins else "you may not do this; ask an administrator"
    return f"{who} (scope {scope}{f' or {scopes.admin_of(of_group)}' if of_group else ''})"


def viewer_of(model: dict[str, Any], settings: FGPU, hub_auth: HubOAuth) -> Viewer:
    admin = bool(hub_auth.check_scopes(scopes.ADMIN, model))
    groups = settings.resource_groups()
    administers = tuple(g for g in groups if admin or hub_auth.check_scopes(scopes.admin_of(g), model))
    if model.get("kind", "user") != "user":
        return Viewer(None, admin, administers=administers)
    user, hub_groups = str(model["name"]), tuple(model.get("groups") or ())
    return Viewer(
        user,
        admin,
        settings.groups_of(user, hub_groups),
        server_of(user, model.get("scopes", ())),
        hub_groups,
        administers,
    )


def server_of(user: str, scopes: Any) -> str | None:
    """Return the server that a token with these scopes belongs to, or None for a person's token.

    A server's token opens exactly one server of its owner; a person's opens all.
    """
    opens = [s for s in scopes if s.partition("!")[0] == "access:servers"]
    own = f"access:servers!server={user}/"
    if len(opens) != 1 or not opens[0].startswith(own):
        return None
    return unquote(opens[0].removeprefix(own))
