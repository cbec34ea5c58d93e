"""What a user is asked before a start, what they answered, and what it is refused with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from jupyterhub.spawner import Spawner, SpawnException
from traitlets import HasTraits, default

from fgpu_scheduler import Banner, History, Node, Notice, Refusal, Session, StoreUnavailable
from fgpuspawner.form import page as form
from fgpuspawner.form import ticket
from fgpuspawner.form.advice import LOOKED_THROUGH, Advice, advice_by_image
from fgpuspawner.form.offer import Offer, Refused
from fgpuspawner.form.options import ACCEPT_IMAGE, parse_to_start, read_fields
from fgpuspawner.hub.hub_handlers import actor_name
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.spawner.failures import NEXT_STEP, end_words, last_end, last_failure

log = logging.getLogger("fgpu")

SESSIONS_LOOKED_AT = 50
"""How many of a user's latest sessions are read: enough to find some that differ."""
READ_WITHIN_S = 2.0
"""After this time the form goes without the database's answer."""
AGAIN = "again"
"""In a link to the form of a server: fill it in as the last session there was, which has ended."""
BANNER_WITHIN_S = 1.0
"""The longest wait of a page for the administrators' announcement."""


@dataclass(frozen=True, slots=True)
class Lately:
    """A user's last sessions, newest first, and what their last runs of each image would have needed."""

    sessions: Sequence[Session] = ()
    advice: Mapping[str, Advice] = field(default_factory=dict)


@dataclass(slots=True)
class Sent:
    """What one request to the Hub has sent of the form, or a link says of it, and why that is refused, if it is."""

    fields: Mapping[str, str]
    refusals: Sequence[Refusal] = ()
    by_link: bool = False
    again: bool = False
    """Fill the form in with what the last session of this server asked for."""


_sent: ContextVar[Sent | None] = ContextVar("fgpu_sent", default=None)
"""Of the request that is answered now, with the start that it makes.

The Hub shows a refused form again through the spawner of the server that was asked for, or of the user's default
server: of both, what was sent is this request's, and nothing is left of it once that is answered.
"""


def refused_here(refusals: Sequence[Refusal]) -> None:
    """Have the form that comes back say these at its fields, where what is refused came from the form or a link."""
    sent = _sent.get()
    if sent is not None:
        sent.refusals = refusals


class LaunchFormSpawner(HasTraits):
    """Part of a `Spawner`: the launch form, and the options that come from it, from a link or from the API."""

    # What a spawner of the Hub has.
    user: Any
    user_options: Any
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
    def _asking_options_form(self) -> Any:
        return self._render_form

    async def _render_form(self, spawner: Spawner) -> str:
        await self.runtime.ready()
        try:
            offer = self.offer()
        except Refused as e:
            return form.refusal_html(e)
        sent = _sent.get()
        lately = await self._lately([n for n in offer.nodes if n.resource_group in offer.groups])
        given, now_s = {} if sent is None else sent.fields, int(time.time())
        failed = None if given else last_failure(lately.sessions, self.name, now_s=now_s)
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
            sessions=lately.sessions,
            advice=lately.advice,
            again=failed
            or (last_end(lately.sessions, self.name, now_s=now_s) if sent and sent.again else None),
            next_step=NEXT_STEP[failed.end_cause]
            if failed is not None and failed.end_cause is not None
            else "",
            notice=await self.announcement(),
        )

    def refuse_others_answer(self, image: str) -> None:
        """Refuse that another user accepts an image for this server's owner: its programs could read the owner's files.

        A group's administrator may start servers for others, but not read their files. Stored options do not count as
        an answer: others may have written them.

        Raises:
            Refused: the answer is not in a request of the owner.
        """
        asker = None if self.handler is None else self.handler.current_user
        said_now = asker is not None and ACCEPT_IMAGE.encode() in self.handler.request.body
        if said_now and actor_name(asker, other_than=self.user.name) is None:
            return
        message = f"image: only {self.user.name} can accept {image}, on the page My images or with a start of their own"
        raise Refused([Refusal("image", "others_answer", message)])

    def most_sessions(self, most: int) -> int:
        """Return how many of ``most`` sessions one request may start: each but the first is a named server more."""
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
        """Yield the names that further servers of this one may have: the lowest numbers that are free."""
        taken = {name for name, spawner in self.user.spawners.items() if spawner.active}
        names = (f"{self.name or 'gpu'}-{number}" for number in count(2))
        return (name for name in names if name not in taken)

    def named_server_limit(self) -> int:
        """Return how many named servers the user may have, 0 for any number."""
        limit = self.user.settings.get("named_server_limit_per_user") or 0
        if callable(limit):
            # Asked of a request; where there is none, it is found out at the start.
            limit = 0 if self.handler is None else limit(self.handler)
        return limit if isinstance(limit, int) and limit > 0 else 0

    def forecast_ticket(self) -> str:
        """Return what this server's pages show to the service for forecasts; see `ticket`."""
        login = "" if self.handler is None else self.handler.get_session_cookie() or ""
        now_s = int(time.time())
        return ticket.make(ticket.KEY, self.user.name, self.hub_groups, login=login, now_s=now_s)

    async def announcement(self) -> Notice | None:
        """Return what the administrators announce on every page; None also where the database does not answer in time.

        Its ``text`` is plain, and to be escaped; ``level`` is "info" or "warning".
        """
        try:
            async with asyncio.timeout(BANNER_WITHIN_S):
                return await self.runtime.read_for_form(Banner(self.runtime.store).at, int(time.time()))
        except (StoreUnavailable, TimeoutError):
            return None

    async def last_end(self) -> tuple[Session, str] | None:
        """Return this server's session where it has ended lately, and in words why: the page of the server says it."""
        found = last_end((await self._lately(())).sessions, self.name, now_s=int(time.time()))
        return None if found is None else (found, end_words(found))

    async def is_filled_in_again(self) -> bool:
        """Return whether this server's form has what its failed start asked for; what was refused is not kept."""
        lately = await self._lately(())
        return last_failure(lately.sessions, self.name, now_s=int(time.time())) is not None

    async def has_ended(self) -> bool:
        """Return whether nothing of this server waits, starts or runs; not while the database does not answer."""
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                serving = self.runtime.store.serving
                return await self.runtime.read_for_form(serving, self.user.name, self.name) is None
        except (StoreUnavailable, TimeoutError):
            return False

    async def _lately(self, nodes: Sequence[Node]) -> Lately:
        """Return the user's recent launches; none while the database does not answer."""
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                return await self.runtime.read_for_form(self._read_lately, nodes)
        except (StoreUnavailable, TimeoutError) as e:
            log.warning("The launch form is without %s's last launches: %s", self.user.name, e)
            return Lately()

    def _read_lately(self, nodes: Sequence[Node]) -> Lately:
        store, user = self.runtime.store, self.user.name
        return Lately(
            store.latest(user=user, limit=SESSIONS_LOOKED_AT),
            advice_by_image(
                History(store).measured_runs(user, limit=LOOKED_THROUGH),
                step_milli=self.runtime.settings.caps().fgpu_step_milli,
                images=self.runtime.catalogue.images,
                devices=[device for node in nodes for device in node.devices],
            ),
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
            _sent.set(Sent({}, again=True))
            raise OnlyFilledIn
        sent = Sent(form.first_of(query_data), by_link=True)
        # Following a link does not accept an image.
        said = {name: values for name, values in query_data.items() if name != ACCEPT_IMAGE}
        try:
            parse_to_start(read_fields(said), self.offer())
        except Refused as e:
            sent.refusals = e.refusals
        _sent.set(sent)
        raise OnlyFilledIn

    @default("options_from_form")
    def _asking_options_from_form(self) -> Any:
        return self._read_form

    def _read_form(self, fields: dict[str, list[str]]) -> dict[str, object]:
        _sent.set(Sent(form.first_of(fields)))
        try:
            wanted, accepted = parse_to_start(read_fields(fields), self.offer())
            return wanted.as_options() | ({ACCEPT_IMAGE: accepted} if accepted else {})
        except Refused as e:
            refused_here(e.refusals)
            raise refusal(e, "; ".join(form.refusal_words(e))) from None

    @default("apply_user_options")
    def _asking_apply_user_options(self) -> Any:
        # They are applied by asking the scheduler for them, in `start`.
        return lambda spawner, options: None


class OnlyFilledIn(Exception):
    """A link has filled the form in. What the Hub is to say of it beside the form is nothing: the form says it."""

    jupyterhub_message = jupyterhub_html_message = ""


def is_no_link(record: logging.LogRecord) -> bool:
    """Return whether a line of the Hub's log says something else than that a link only filled the form in."""
    return not (record.exc_info and record.exc_info[0] is OnlyFilledIn)


class NotStarted(SpawnException):  # type: ignore[misc]
    """What the Hub is told of a start that comes to nothing, with words that its pages and its API show."""

    def __init__(self, message: str, *, reason: str, html: str, status_code: int = 400) -> None:
        super().__init__(message, reason=reason, message_html=html, status_code=status_code)
        # The Hub's pages look for these two only, and else show nothing, or the exception's name.
        self.jupyterhub_message = message
        self.jupyterhub_html_message = html


def refusal(refused: Refused, message: str = "") -> NotStarted:
    """Return what the Hub is told of options that cannot be accepted; ``message``: in other words than the API's."""
    return NotStarted(
        message or str(refused), reason=refused.refusals[0].code, html=form.refusal_html(refused)
    )
