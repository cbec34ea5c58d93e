"""What all handlers share: who asks, what they may do, and errors as one object or one page."""

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
from fgpuspawner.service.hub import Hub
from fgpuspawner.service.metrics import ERRORS
from fgpuspawner.service.model import Site, Viewer, World, administered, is_visible
from fgpuspawner.service.problems import (
    Problem,
    bad_argument,
    forbidden,
    hub_unavailable,
    no_such_session,
)
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
"""Of errors that are no fault of what was sent."""

AT_A_TIME = 4
"""Requests of one user that are worked on at a time; a browser has six connections, and a few tabs."""
MOST_THERE = 1000
"""Of one user, with those that wait."""

MOST_LOG_INS = 10_000
LONGEST_ADDRESS = 2000
"""To which a browser returns from a log-in."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)


@dataclass(frozen=True, slots=True)
class Service:
    """What handlers work with; one per process."""

    settings: FGPU
    reader: Reader
    watcher: Watcher
    hub: Hub
    site: Site
    prefix: str
    forecast_key: str
    background: Background = field(default_factory=lambda: Background(log))
    turns: Turns = field(default_factory=lambda: Turns(at_a_time=AT_A_TIME, most=MOST_THERE))


class LogIns(HubOAuth):  # type: ignore[misc]
    """Who asks, by the Hub. Of log-ins that were begun so many are kept at most: nobody has to be known for that."""

    def generate_state(self, next_url: str | None = None, **more: Any) -> str:
        """Note a log-in that begins, and return its id; too long an address is not returned to."""
        while len(self._oauth_states) >= MOST_LOG_INS:
            del self._oauth_states[next(iter(self._oauth_states.values))]
        short = next_url if len(next_url or "") <= LONGEST_ADDRESS else None
        return str(super().generate_state(short, **more))


class Handler(HubOAuthenticated, RequestHandler):  # type: ignore[misc]
    """Knows who asks before a method runs, or refuses.

    The application's own ``xsrf_cookies`` is off: tornado checks it before it is known who asks, and a
    token in a header needs no such check. `HubOAuth` makes it instead, whenever it is the cookie that
    would identify the caller.
    """

    needs_scope: ClassVar[str | None] = scopes.QUEUE_READ
    for_groups: ClassVar[bool] = False
    """Whether who administers a resource group needs no other scope. It then tells and changes what is of that only."""
    service: Service
    viewer: Viewer
    _whose_turn: str | None = None
    _has_gone = False

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
        """Who is written into the audit log: a user, or the service whose token it was."""
        return self.viewer.user or f"service {self.current_user.get('name', '')}"

    async def change(self, what: Callable[[Store, str, int], R]) -> R:
        """Write to the store: ``what`` is given it, who asks for it, and the time.

        Raises:
            StoreUnavailable: it cannot be written.
        """
        by = self.actor
        return await self.service.reader.change(lambda store, now_s: what(store, by, now_s))

    async def administered_world(self) -> World:
        """Return what is now, of it what the caller administers.

        Raises:
            StoreUnavailable: it cannot be read.
        """
        return administered(await self.service.reader.world(), self.viewer)

    async def ended(self, limit: int, *, everybody: bool) -> tuple[Session, ...]:
        """Return what ended last of the caller's own; with ``everybody``, of all's for administrators of everything."""
        user = self.viewer.user
        everybody = everybody and self.viewer.admin
        if user is None and not everybody:
            return ()
        return await self.service.reader.ask(
            lambda queue: queue.ended(user=None if everybody else user, limit=limit)
        )

    async def visible_session(self, session_id: str) -> Session:
        """Return a session that the caller may see; otherwise there is none."""
        session = await self.service.reader.session(int(session_id))
        if session is None or not is_visible(session, self.viewer):
            raise no_such_session(session_id)
        return session

    def send_csv(self, name: str, columns: Sequence[str], lines: Iterable[Sequence[Cell]]) -> None:
        """Send a table as a CSV file of this name."""
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        self.set_header("Content-Disposition", f'attachment; filename="{name}"')
        self.finish(csv_text(columns, lines))

    def link_to_rest(self, before: int | None) -> None:
        """Say where the rest of what is sent is: this address, before an id; nothing where there is no more."""
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
        # A page that refuses somebody is shown with their name, too.
        self.current_user = model
        self.viewer = viewer_of(model, self.service.settings, self.hub_auth)
        may = self.needs_scope is None or self.hub_auth.check_scopes(self.needs_scope, model)
        if not may and not (self.for_groups and self.viewer.administers):
            raise forbidden(needs(self.needs_scope, of_group="GROUP" if self.for_groups else None))
        await self.wait_for_turn()

    async def wait_for_turn(self) -> None:
        """Wait until this is among the few requests of its user that are worked on. Other services do not wait."""
        who = self.viewer.user
        if who is None:
            return
        try:
            await self.service.turns.take(who)
        except TooMany:
            message = f"{MOST_THERE} of your requests are waiting; send the next when some are answered"
            raise Problem(429, "too_many_requests", message) from None
        self._whose_turn = who
        if self._has_gone:
            raise Finish

    def on_connection_close(self) -> None:
        self._has_gone = True

    def leave_turn(self) -> None:
        """Let the next request of this user be worked on. Idempotent."""
        who, self._whose_turn = self._whose_turn, None
        if who is not None:
            self.service.turns.leave(who)

    async def _execute(self, *args: Any, **kwargs: Any) -> None:
        # Tornado has no hook for the end of a handler that holds also where the client has gone.
        try:
            await super()._execute(*args, **kwargs)
        finally:
            self.leave_turn()

    async def identify(self) -> dict[str, Any] | None:
        """Return the Hub's model of who asks; None for nobody that it knows."""
        try:
            model = await self.hub_auth.get_user(self, sync=False)
        except HTTPError as e:
            raise hub_unavailable() from e
        return cast("dict[str, Any] | None", model)

    def refuse_unknown(self) -> None:
        """Refuse a caller whom the Hub does not know."""
        if self.get_secure_cookie(self.hub_auth.cookie_name) is not None:
            try:
                self.check_xsrf_cookie()
            except HTTPError:
                message = (
                    "with a cookie this needs the header X-XSRFToken, with the value of the cookie _xsrf"
                )
                raise Problem(403, "xsrf", message) from None
        raise Problem(401, "unauthenticated", "log in, or send a token of JupyterHub that is still valid")

    @property
    def token(self) -> str:
        """The caller's own token, for calls on their behalf."""
        return str(self.hub_auth.get_token(self))

    def flag(self, name: str) -> bool:
        """Return a yes-or-no argument of the query."""
        value = self.get_query_argument(name, "0")
        if value not in ("0", "1"):
            raise bad_argument(name, "must be 0 or 1")
        return value == "1"

    def number(self, name: str, *, default: int | None, least: int, most: int) -> Any:
        """Return a whole number of the query, or the default where it is not there."""
        value = self.get_query_argument(name, None)
        if value is None:
            return default
        # No more digits than the largest has: the text may be of any length.
        if not (value.isascii() and value.isdigit() and len(value) <= len(str(most))) or not (
            least <= int(value) <= most
        ):
            raise bad_argument(name, f"must be {least} to {most}")
        return int(value)

    def problem_of(self, status: int, error: BaseException | None) -> Problem:
        """Return what may be shown of an error."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, StoreUnavailable):
            # Its text names the database; that is for the log.
            return Problem(503, error.code, "the scheduler's database cannot be read; try again in a moment")
        if isinstance(error, FGPUError):
            return Problem(STATUS_OF.get(error.code, 400), error.code, str(error))
        phrase = HTTPStatus(status).phrase if status in {s.value for s in HTTPStatus} else "error"
        return Problem(status, phrase.lower().replace(" ", "_").replace("-", "_"), phrase)

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        problem = self.problem_of(status_code, kwargs.get("exc_info", (None, None, None))[1])
        ERRORS.labels(problem.code).inc()
        super().send_error(problem.status, **kwargs)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        problem = self.problem_of(status_code, kwargs.get("exc_info", (None, None, None))[1])
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(problem.as_json())

    def log_exception(self, typ: Any, value: BaseException | None, tb: Any) -> None:
        if isinstance(value, Problem | FGPUError):
            log.info("%s %s: %s", self.request.method, self.request.path, value)
        else:
            super().log_exception(typ, value, tb)


def needs(scope: str | None, *, of_group: str | None = None) -> str:
    """Return who may do what needs this scope, for people, and for programs which scope that is.

    ``of_group``: the scope of who administers this resource group would do.
    """
    who = (
        "only administrators may do this"
        if scope == scopes.ADMIN
        else "you may not do this; ask an administrator"
    )
    return f"{who} (scope {scope}{f' or {scopes.admin_of(of_group)}' if of_group else ''})"


def viewer_of(model: dict[str, Any], settings: FGPU, hub_auth: HubOAuth) -> Viewer:
    """Return who asks, from the Hub's model of them."""
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
    """Return the name of the server whose token has these scopes; None for a person's.

    A server's token opens exactly one server of its owner; a person's opens them all.
    """
    opens = [s for s in scopes if s.partition("!")[0] == "access:servers"]
    own = f"access:servers!server={user}/"
    if len(opens) != 1 or not opens[0].startswith(own):
        return None
    return unquote(opens[0].removeprefix(own))
