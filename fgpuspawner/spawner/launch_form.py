"""The launch form of the Hub: what it shows, what it or a link sent, and how a refused start is shown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from jupyterhub.spawner import Spawner, SpawnException
from traitlets import HasTraits, default

from fgpu_scheduler import (
    Banner,
    History,
    Node,
    Notice,
    OwnPresets,
    Refusal,
    SavedSetup,
    Session,
    Setups,
    StoreUnavailable,
)
from fgpuspawner.form import page as form
from fgpuspawner.form import ticket
from fgpuspawner.form.advice import LOOKED_THROUGH, Advice, advice_by_image
from fgpuspawner.form.offer import LaunchRequest, Offer, RequestRefused
from fgpuspawner.form.options import ACCEPT_IMAGE, parse_to_start, read_fields
from fgpuspawner.form.own_setup import GIVEN
from fgpuspawner.hub.hub_handlers import actor_name, current_handler, current_login
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.images.frameworks import INSTALLING
from fgpuspawner.spawner.failures import NEXT_STEP, end_words, last_end, last_failure

log = logging.getLogger("fgpu")

SESSIONS_READ = 50
"""A user's latest sessions that are read: enough to find some that differ."""
READ_WITHIN_S = 2.0
"""After this time the form goes without the database's answer."""
AGAIN = "again"
"""Query parameter of a link to a server's form: fill it in with the options of the server's last session."""
BANNER_WITHIN_S = 1.0
"""Longest wait of a page for the administrators' announcement."""


@dataclass(frozen=True, slots=True)
class RecentSessions:
    """A user's last sessions, newest first, and advice on the amount for each image, from the last runs."""

    sessions: Sequence[Session] = ()
    advice: Mapping[str, Advice] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    setups: Mapping[int, SavedSetup] = field(default_factory=dict)


@dataclass(slots=True)
class SentForm:
    """The form's fields in the current request to the Hub, or in a link, and why they are refused, if they are."""

    fields: Mapping[str, str]
    refusals: Sequence[Refusal] = ()
    by_link: bool = False
    again: bool = False
    """Fill the form in with the options of this server's last session."""


_sent: ContextVar[SentForm | None] = ContextVar("fgpu_sent", default=None)
"""The form of the current request, also in the start that it makes.

The Hub shows a refused form again through the spawner of the requested server or of the user's default server. A context
variable reaches both, and is gone with the request.
"""


def show_refusals(refusals: Sequence[Refusal]) -> None:
    """Show these at the fields of the form that comes back, if the refused options came from the form or a link."""
    sent = _sent.get()
    if sent is not None:
        sent.refusals = refusals


class LaunchFormSpawner(HasTraits):
    """Part of a `Spawner`: the launch form, and the options from the form, a link or the API."""

    # Attributes of the Hub's spawners.
    user: Any
    user_options: Any
    orm_spawner: Any
    log: Any
    hub: Any
    handler: Any
    name: str

    @property
    def runtime(self) -> Runtime:
        """The Hub's one runtime."""
        return Runtime.current()

    @property
    def hub_groups(self) -> list[str]:
        """The user's groups in JupyterHub, by name."""
        return sorted(group.name for group in self.user.groups)

    def offer(self) -> Offer:
        """Return what this user may choose."""
        return self.runtime.offer(self.user.name, self.hub_groups)

    @default("options_form")
    def _default_options_form(self) -> Any:
        return self._render_form

    async def _render_form(self, spawner: Spawner) -> str:
        await self.runtime.ready()
        try:
            offer = self.offer()
        except RequestRefused as e:
            return form.refusal_html(e)
        sent = _sent.get()
        recent = await self._recent([n for n in offer.nodes if n.resource_group in offer.groups])
        given, now_s = {} if sent is None else sent.fields, int(time.time())
        failed = None if given else last_failure(recent.sessions, self.name, now_s=now_s)
        again = failed or (last_end(recent.sessions, self.name, now_s=now_s) if sent and sent.again else None)
        most = self.most_sessions(offer.caps.max_count)
        return form.render(
            replace(offer, caps=replace(offer.caps, max_count=most)),
            hub_prefix=self.hub.base_url,
            ticket=self.forecast_ticket(),
            given=given,
            refusals=() if sent is None else sent.refusals,
            by_link=sent is not None and sent.by_link,
            fewer_sessions=most < offer.caps.max_count,
            presets=self.runtime.settings.presets,
            installing=INSTALLING.read(self.runtime.settings.data_path()),
            sessions=recent.sessions,
            advice=recent.advice,
            again=again,
            next_step=NEXT_STEP[failed.end_cause] if failed is not None and failed.end_cause else "",
            notice=await self.announcement(),
            own_presets=recent.presets,
            setups=recent.setups if self._asked_by_owner() else None,
        )

    def refuse_others_answer(self, image: str) -> None:
        """Refuse that another user accepts an image for this server's owner: its programs could read the owner's files.

        A group's administrator may start servers for others, but not read their files. Stored options do not count as
        an answer: others may have written them.

        Raises:
            Refused: the answer is not in a request of the owner.
        """
        if self._asked_by_owner(ACCEPT_IMAGE):
            return
        message = f"image: only {self.user.name} can accept {image}, on the page My images or with a start of their own"
        raise RequestRefused([Refusal("image", "others_answer", message)])

    def _asked_by_owner(self, *said: str) -> bool:
        """Return whether the current request is of the user, and its body has one of these names, if any."""
        handler = current_handler()
        asker = None if handler is None else handler.current_user
        if asker is None or actor_name(asker, other_than=self.user.name) is not None:
            return False
        return not said or any(name.encode() in handler.request.body for name in said)

    async def with_saved_setup(self, wanted: LaunchRequest) -> LaunchRequest:
        """Store the given variables and script, and return the request with the id of what is stored.

        Only the user gives them: the script runs as the user. Stored options do not count, as others may have written
        them.

        Raises:
            Refused: they are another user's, or are no longer saved.
        """
        own, user, setups = wanted.own, self.user.name, Setups(self.runtime.store)
        if own is not None and not own.script and not own.variables:
            return replace(wanted, setup=0, own=None)
        read = lambda: asyncio.to_thread(setups.get, wanted.setup, user)  # noqa: E731
        saved = await self.runtime.queue.patiently(read) if wanted.setup else None
        if wanted.setup and saved is None:
            message = "setup: it is no longer saved; give the variables and the script again"
            raise RequestRefused([Refusal("setup", "no_setup", message, nearest="0")])
        if own is None:
            return wanted
        if not self._asked_by_owner(*GIVEN):
            message = f"variables: only {user} gives variables and a script to their own sessions"
            raise RequestRefused([Refusal("variables", "others_setup", message)])
        before = {} if saved is None else saved.variables
        variables = {n: before.get(n) if value is None else value for n, value in own.variables.items()}
        if (missing := next((n for n, value in variables.items() if value is None), None)) is not None:
            message = f"variables: {missing} has no saved value; write {missing}=value"
            raise RequestRefused([Refusal("variables", "no_value", message)])
        values, now_s = {n: value for n, value in variables.items() if value is not None}, int(time.time())
        put = lambda: asyncio.to_thread(setups.put, user, values, own.script, now_s=now_s)  # noqa: E731
        return replace(wanted, setup=await self.runtime.queue.patiently(put), own=None)

    def forget_values(self) -> None:
        """Take variables and script out of the server's options, which the Hub stores and shows to administrators."""
        if any(name in (self.user_options or {}) for name in GIVEN):
            self.user_options = {k: v for k, v in self.user_options.items() if k not in GIVEN}
            self.orm_spawner.user_options = self.user_options
            self.user.db.commit()

    def most_sessions(self, most: int) -> int:
        """Return how many of ``most`` sessions one request may start: each but the first needs a named server."""
        if most > 1 and not self.user.settings.get("allow_named_servers"):
            return 1
        limit = self.named_server_limit()
        names = self.further_names()
        named = {name for name in self.user.orm_spawners if name}
        found = 1
        while found < most:
            named.add(next(names))
            if limit and len(named) > limit:
                break
            found += 1
        return found

    def further_names(self) -> Iterator[str]:
        """Yield free names for the other servers of a submission: the lowest numbers."""
        taken = {name for name, spawner in self.user.spawners.items() if spawner.active}
        names = (f"{self.name or 'gpu'}-{number}" for number in count(2))
        return (name for name in names if name not in taken)

    def named_server_limit(self) -> int:
        """Return how many named servers the user may have, 0 for any number."""
        limit = self.user.settings.get("named_server_limit_per_user") or 0
        if callable(limit):
            # It needs a request; without one the start checks the limit.
            limit = 0 if self.handler is None else limit(self.handler)
        return limit if isinstance(limit, int) and limit > 0 else 0

    def forecast_ticket(self) -> str:
        """Return the ticket with which this server's pages ask the service for forecasts; see `ticket`."""
        # Not of `self.handler`: the waiting page may be of a later log-in than the start.
        login, now_s = current_login(), int(time.time())
        return ticket.make(ticket.KEY, self.user.name, self.hub_groups, login=login, now_s=now_s)

    async def announcement(self) -> Notice | None:
        """Return the administrators' announcement; None also if the database does not answer in time.

        Its ``text`` is plain, and to be escaped; ``level`` is "info" or "warning".
        """
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(BANNER_WITHIN_S):
                return await self.runtime.read_for_form(Banner(self.runtime.store).at, int(time.time()))
        return None

    async def last_end(self) -> tuple[Session, str] | None:
        """Return this server's last session if it ended recently, and why in words, for the server's page."""
        found = last_end((await self._recent(())).sessions, self.name, now_s=int(time.time()))
        return None if found is None else (found, end_words(found))

    async def is_filled_in_again(self) -> bool:
        """Return whether this server's form has the options of its failed start; refused options are not kept."""
        recent = await self._recent(())
        return last_failure(recent.sessions, self.name, now_s=int(time.time())) is not None

    async def has_ended(self) -> bool:
        """Return whether this server has no live session; false while the database does not answer."""
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(READ_WITHIN_S):
                serving = self.runtime.store.serving
                return await self.runtime.read_for_form(serving, self.user.name, self.name) is None
        return False

    async def _recent(self, nodes: Sequence[Node]) -> RecentSessions:
        """Return the user's recent sessions; none while the database does not answer."""
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                return await self.runtime.read_for_form(self._read_recent, nodes)
        except (StoreUnavailable, TimeoutError) as e:
            log.warning("The launch form has no recent sessions of %s: %s", self.user.name, e)
            return RecentSessions()

    def _read_recent(self, nodes: Sequence[Node]) -> RecentSessions:
        store, user = self.runtime.store, self.user.name
        return RecentSessions(
            store.latest(user=user, limit=SESSIONS_READ),
            advice_by_image(
                History(store).measured_runs(user, limit=LOOKED_THROUGH),
                step_milli=self.runtime.settings.caps().fgpu_step_milli,
                images=self.runtime.catalogue.images,
                devices=[device for node in nodes for device in node.devices],
            ),
            OwnPresets(store).of(user),
            Setups(store).of(user),
        )

    async def get_options_form(self) -> str:
        """Return the launch form, never an empty one: without a form the Hub has every link start a server."""
        found = await super().get_options_form()  # type: ignore[misc]
        return str(found or await self._render_form(self))

    def options_from_query(self, query_data: Mapping[str, list[str]]) -> Any:
        """Fill the form in with what a link says, and start nothing: any page of any site can have a link followed.

        Raises:
            OnlyFilledIn: always. The Hub then shows the form.
        """
        if AGAIN in query_data:
            _sent.set(SentForm({}, again=True))
            raise OnlyFilledIn
        # Following a link neither accepts an image nor brings a script.
        said = {name: values for name, values in query_data.items() if name not in (ACCEPT_IMAGE, *GIVEN)}
        sent = SentForm(form.first_of(said), by_link=True)
        try:
            parse_to_start(read_fields(said), self.offer())
        except RequestRefused as e:
            sent.refusals = e.refusals
        _sent.set(sent)
        raise OnlyFilledIn

    @default("options_from_form")
    def _default_options_from_form(self) -> Any:
        return self._read_form

    def _read_form(self, fields: dict[str, list[str]]) -> dict[str, object]:
        # The token against forgery, which JupyterHub has checked, is no option.
        fields = {name: values for name, values in fields.items() if name != "_xsrf"}
        _sent.set(SentForm(form.first_of(fields)))
        try:
            wanted, accepted = parse_to_start(read_fields(fields), self.offer())
            own = wanted.own
            # `start` stores them and takes them out of the options: here the asking user is not known yet.
            given = {} if own is None else {"variables": dict(own.variables), "script": own.script}
            return wanted.as_options() | given | ({ACCEPT_IMAGE: accepted} if accepted else {})
        except RequestRefused as e:
            show_refusals(e.refusals)
            raise refusal(e, "; ".join(form.refusal_words(e))) from None

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Any:
        # `start` hands them to the scheduler.
        return lambda spawner, options: None


class OnlyFilledIn(Exception):
    """A link has filled the form in. The Hub shows no message beside the form."""

    jupyterhub_message = jupyterhub_html_message = ""


def without_tracebacks(record: logging.LogRecord) -> bool:
    """Filter the Hub's log: a refused form is one line, and a link that only filled the form in is none."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, NotStarted):
        words = f"{record.getMessage()}: {error.jupyterhub_message}"
        record.msg, record.args, record.exc_info = " ".join(words.split()), None, None
    return not isinstance(error, OnlyFilledIn)


class NotStarted(SpawnException):  # type: ignore[misc]
    """A start that fails, with a message that the Hub's pages and API show."""

    def __init__(self, message: str, *, reason: str, html: str, status_code: int = 400) -> None:
        super().__init__(message, reason=reason, message_html=html, status_code=status_code)
        # The Hub's pages show only these two, or else the exception's name.
        self.jupyterhub_message = message
        self.jupyterhub_html_message = html


def refusal(refused: RequestRefused, message: str = "") -> NotStarted:
    """Return the error for options that cannot be accepted; ``message`` replaces the text for the API."""
    return NotStarted(
        message or str(refused), reason=refused.refusals[0].code, html=form.refusal_html(refused)
    )
