"""The REST API v1, as docs/rest-api.md says."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

from tornado.iostream import StreamClosedError
from tornado.web import HTTPError, RequestHandler

from fgpu_scheduler import (
    ENDED,
    Caps,
    EndCause,
    Request,
    RequestForecast,
    Session,
    SessionState,
    StoreUnavailable,
    SystemClock,
    pending_refusals,
)
from fgpuspawner.form import ticket as tickets
from fgpuspawner.form.offer import Offer, Refused, Wanted
from fgpuspawner.form.options import parse, read_fields
from fgpuspawner.service import view
from fgpuspawner.service.base import KEEP_SCOPE, Handler, Service, viewer_of
from fgpuspawner.service.ending import audited, last_words, sent_message
from fgpuspawner.service.hub import HubUnreachable
from fgpuspawner.service.instead import INSTEAD_OF, without
from fgpuspawner.service.problems import Problem, hub_unavailable
from fgpuspawner.service.quota_left import quota_object
from fgpuspawner.service.reader import Changes
from fgpuspawner.service.view import Viewer

ENDED_SHOWN = 50
KEEPALIVE_S = 8.0
"""So often a stream says that it lives: its proxy keeps it open, and silent, when this service is killed."""


class Api(Handler):
    """Answers with JSON objects."""

    def set_default_headers(self) -> None:
        super().set_default_headers()
        # An answer has an ETag: who asks again with it is told whether anything changed. It is the caller's alone.
        self.set_header("Cache-Control", "private, no-cache")
        self.set_header("Vary", "Authorization, Cookie")

    def answer(self, found: view.Json, status: int = 200) -> None:
        """Send an object."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(json.dumps(found))

    def object_of(self, session: Session, world: view.World) -> view.Json:
        """Return a session as its object."""
        return view.session_object(session, world, self.viewer, self.service.site)

    async def visible_session(self, session_id: str) -> Session:
        """Return a session that the caller may see; otherwise there is none."""
        session = await self.service.reader.session(int(session_id))
        if session is None or not view.is_visible(session, self.viewer):
            raise no_such_session(session_id)
        return session


def no_such_session(session_id: str) -> Problem:
    """There is none, or none that the caller may know of."""
    return Problem(404, "no_such_session", f"there is no session {session_id}")


def already_ended(session_id: str) -> Problem:
    """There is nothing to end any more."""
    return Problem(409, "already_ended", f"session {session_id} has ended already")


class NotThere(Api):
    """Whatever the API does not have."""

    needs_scope = None

    async def prepare(self) -> None:
        raise Problem(404, "not_found", "there is no such address in the API; docs/rest-api.md lists them")


class Me(Api):
    needs_scope = None

    async def get(self) -> None:
        self.answer(view.me_object(self.viewer, await self.service.reader.world()))


class Sessions(Api):
    async def get(self) -> None:
        everybody, with_ended = self.flag("all"), self.flag("ended")
        if everybody and not self.viewer.admin:
            raise Problem(403, "forbidden", "all: only administrators see everybody's sessions", field="all")
        world = await self.service.reader.world()
        found = view.live_sessions(world, self.viewer, everybody=everybody)
        if with_ended and (everybody or self.viewer.user is not None):
            user = None if everybody else self.viewer.user
            found = (*found, *await self.service.reader.ended(user, ENDED_SHOWN))
        self.answer(view.sessions_object(found, world, self.viewer, self.service.site))


class OneSession(Api):
    async def get(self, session_id: str) -> None:
        session = await self.visible_session(session_id)
        shown = self.object_of(session, await self.service.reader.world())
        self.answer({"session": shown, "simulated": shown["simulated"]})

    async def delete(self, session_id: str) -> None:
        session = await end_session(self, session_id, message=sent_message(self))
        shown = self.object_of(session, await self.service.reader.world())
        self.answer({"session": shown, "simulated": shown["simulated"]}, status=202)


async def end_session(handler: Handler, session_id: str, *, message: str = "") -> Session:
    """End or cancel a session through the Hub with the caller's own rights, and return it as it is then.

    Whether they may is the Hub's to say, not this service's. ``message`` is what an administrator says to its owner.
    """
    reader = handler.service.reader
    session = await reader.session(int(session_id))
    if session is None:
        raise no_such_session(session_id)
    knows = view.is_visible(session, handler.viewer)
    if session.state in ENDED:
        # Of somebody else's nobody learns that there was one.
        raise already_ended(session_id) if knows else no_such_session(session_id)
    if session.held and knows:
        # The Hub knows of no start that it could cancel, and would say that all is well.
        raise Problem(409, "held", "JupyterHub restarted and takes this request up again; try in a moment")
    if session.state is SessionState.TERMINATING and knows:
        # Not asked for again: the server may have its next session by now.
        return session
    try:
        async with last_words(handler, session, message):
            await _stop(handler, session, knows=knows)
    except HubUnreachable as e:
        raise hub_unavailable() from e
    return await reader.session(session.id) or session


async def _stop(handler: Handler, session: Session, *, knows: bool) -> None:
    # The Hub knows servers only. What was written since the first look may have waited for the database, and by now
    # the server may have its next session.
    newest = await handler.service.reader.session(session.id)
    if newest is None or newest.state in ENDED:
        raise already_ended(str(session.id)) if knows else no_such_session(str(session.id))
    if newest.state is SessionState.TERMINATING and knows:
        return
    asked = session.request
    found = await handler.service.hub.stop_server(asked.user, asked.server_name, token=handler.token)
    if found.status in (403, 404) and not knows:
        raise no_such_session(str(session.id))
    if found.status == 403:
        raise Problem(403, "forbidden", "JupyterHub does not let you end this session")
    if found.status == 404:
        # The Hub does not tell the two apart. The session is there, and goes on.
        message = "JupyterHub does not let you end this session, or no longer knows its server"
        raise Problem(409, "hub_refused", message)
    if found.status >= 500:
        raise Problem(502, "hub_failed", f"JupyterHub could not end it: {found.message or found.status}")
    if found.status >= 400:
        raise Problem(409, "hub_refused", f"JupyterHub did not end it: {found.message or found.status}")


class Keep(Api):
    """Answers the warning to the owner of an idle session: keep it."""

    needs_scope = KEEP_SCOPE

    async def post(self, session_id: str) -> None:
        session = await keep_session(self, session_id)
        shown = self.object_of(session, await self.service.reader.world())
        self.answer({"session": shown, "simulated": shown["simulated"]})


async def keep_session(handler: Handler, session_id: str) -> Session:
    """Put off the end of an idle session for as long as the administrator allows, and return it as it is then."""
    reader = handler.service.reader
    session = await reader.session(int(session_id))
    if session is None or not view.is_visible(session, handler.viewer):
        raise no_such_session(session_id)
    if session.ends_cause is not EndCause.IDLE:
        raise Problem(409, "nothing_to_keep", f"session {session_id} is not about to be ended for being idle")
    keep_s = handler.service.settings.keep_s(session.request.resource_group)
    kept = await reader.keep(session.id, keep_s)
    await audited(handler, session, "session.keep")
    return kept


class Queue(Api):
    async def get(self) -> None:
        world = await self.service.reader.world()
        known = world.groups if self.viewer.admin else self.viewer.groups
        group = self.get_query_argument("group", known[0] if known else "")
        if group not in known:
            message = f"group: there is no such group; choose one of {', '.join(known) or 'none'}"
            raise Problem(404, "no_such_group", message, field="group")
        self.answer(view.queue_object(group, world, self.viewer))


class Capacity(Api):
    async def get(self) -> None:
        step = self.service.settings.caps().fgpu_step_milli
        world = await self.service.reader.world()
        self.answer(view.capacity_object(world, self.viewer, fgpu_step_milli=step))


class Forecast(Api):
    """Also for the Hub's launch form, which shows a ticket in place of a login."""

    async def prepare(self) -> None:
        text = self.request.headers.get("X-FGPU-Ticket")
        if text is None:
            await super().prepare()
            return
        try:
            ticket = tickets.read(self.service.forecast_key, text, now_s=SystemClock().now_s())
        except tickets.BadTicket as e:
            raise Problem(401, e.code, str(e)) from None
        groups = self.service.settings.groups_of(ticket.user, ticket.hub_groups)
        self.viewer = Viewer(ticket.user, groups=groups, hub_groups=ticket.hub_groups)

    async def get(self) -> None:
        reader, viewer = self.service.reader, self.viewer
        if viewer.user is None:
            raise Problem(403, "forbidden", "only users start sessions")
        world = await reader.now()
        simulated = world.simulated(viewer.groups)
        # Decoded by tornado, which refuses what is not UTF-8; the check against forgery is no option.
        fields = {
            name: self.get_query_arguments(name) for name in self.request.query_arguments if name != "_xsrf"
        }
        if instead_of := fields.pop(INSTEAD_OF, None):
            world = without(world, viewer.user, instead_of[-1])
        quota = None
        try:
            offer = reader.offer(world, viewer.user, viewer.hub_groups, viewer.groups)
            # Its name is none that a server can have: the request is only thought of.
            group = (fields.get("group") or [""])[0]
            asker = replace(offer.default, group=group if group in offer.groups else offer.default.group)
            quota = quota_object(world.snapshot, asker.request(viewer.user, "/", viewer.hub_groups))
            wanted = parse(read_fields(fields), offer)
            _refuse_beside(
                world, wanted.request(viewer.user, "/", viewer.hub_groups), wanted.count, offer.caps
            )
        except Refused as e:
            refused = view.refused_object(e.refusals, count=_count(fields), simulated=simulated)
            self.answer(refused | {"quota": quota})
            return
        found = await self._forecast(wanted, offer, world)
        simulated = world.simulated([wanted.group])
        told = view.forecast_object(found, world, viewer, count=wanted.count, simulated=simulated)
        self.answer(told | {"quota": quota})

    async def _forecast(self, wanted: Wanted, offer: Offer, world: view.World) -> RequestForecast:
        """Return what would become of the request. Of other amounts it names those that its image may have."""

        async def ask(asked: Wanted) -> RequestForecast:
            return await self.service.reader.forecast(asked, offer.user, offer.hub_groups, world)

        found = await ask(wanted)
        named = found.largest_now_milli or found.soonest_milli
        if named is None or offer.takes(wanted, named):
            return found
        # What is too little for the image: the least that is not starts no later than all others.
        found = replace(found, largest_now_milli=None, soonest_milli=None, soonest_at_s=None)
        least = next(offer.takeable_milli(wanted), wanted.fgpu_milli)
        if found.startable_now == wanted.count or (least >= wanted.fgpu_milli and not wanted.gpu_memory_mib):
            return found
        at_s = (await ask(wanted.with_fgpu(least))).expected_start_at_s
        if at_s is None or at_s >= (found.expected_start_at_s or at_s + 1):
            return found
        return replace(found, soonest_milli=least, soonest_at_s=at_s)


def _refuse_beside(world: view.World, asked: Request, count: int, caps: Caps) -> None:
    """Refuse what the scheduler would when it is asked for it now: more than may wait at a time."""
    waiting = [s.request for s in world.snapshot.sessions if s.state is SessionState.PENDING]
    refusals = pending_refusals(asked, count, waiting, caps, world.snapshot.quotas)
    if refusals:
        raise Refused(refusals)


def _count(fields: dict[str, list[str]]) -> int:
    asked = (fields.get("count") or ["1"])[0]
    return int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 10 else 1


class Images(Api):
    needs_scope = None

    async def get(self) -> None:
        reader, viewer = self.service.reader, self.viewer
        world = await reader.world()
        shown = reader.shown_images(world, viewer.user or "", viewer.hub_groups)
        default = next((image for image in shown if image.default), next(iter(shown), None))
        self.answer(view.images_object(shown, default=default, simulated=world.simulated(viewer.groups)))


class Events(Api):
    """Server-sent events, until the caller leaves, may no longer listen, or the store fails."""

    async def get(self) -> None:
        after_id = self._last_event_id()
        listener = await self.service.watcher.listen(str(self.current_user["name"]))
        self._left = listener.end
        try:
            sent = await self._begin(after_id)
            checked_at = time.monotonic()
            while True:
                quiet, changes = False, None
                try:
                    changes = await listener.next(KEEPALIVE_S)
                except TimeoutError:
                    quiet = True
                # Not only when nothing happens: in a large installation something always does.
                if quiet or time.monotonic() - checked_at >= KEEPALIVE_S:
                    if not await self._still_allowed():
                        return
                    checked_at = time.monotonic()
                if quiet:
                    await self._send("event: alive\ndata: {}\n\n")
                elif changes is None:
                    return
                elif changes.last_event_id > sent:
                    await self._tell(changes, sent)
                    sent = changes.last_event_id
        except StreamClosedError:
            pass
        except StoreUnavailable:
            if not self._headers_written:
                raise
        finally:
            self.service.watcher.leave(listener)

    def _last_event_id(self) -> int | None:
        given = self.request.headers.get("Last-Event-ID") or self.get_query_argument("last_event_id", "")
        if not given:
            return None
        if not (given.isascii() and given.isdigit() and len(given) < 19):
            raise Problem(
                400, "bad_argument", "Last-Event-ID: must be an event's number", field="Last-Event-ID"
            )
        return int(given)

    async def _begin(self, after_id: int | None) -> int:
        """Send what was missed, or else where the stream stands; return the id up to which all is told."""
        reader = self.service.reader
        newest = await reader.last_event_id()
        changes = None if after_id is None or after_id > newest else await reader.changes(after_id)
        if changes is None:
            # Nothing to resume from: they are to read everything once.
            changes = Changes(newest, ())
        await reader.world()
        self.set_header("Content-Type", "text/event-stream; charset=utf-8")
        # Some proxies would otherwise hold the stream back until it ends.
        self.set_header("X-Accel-Buffering", "no")
        await self._send("retry: 2000\n\n")
        await self._tell(changes, after_id or 0)
        return changes.last_event_id

    async def _tell(self, changes: Changes, after_id: int) -> None:
        world = await self.service.reader.world()
        for event_id, session in changes.sessions:
            if event_id > after_id and view.is_visible(session, self.viewer):
                shown = self.object_of(session, world)
                await self._event("change", event_id, {"session": shown, "simulated": shown["simulated"]})
        simulated = world.simulated(None if self.viewer.admin else self.viewer.groups)
        about = {"version": world.snapshot.version, "simulated": simulated}
        await self._event("queue", changes.last_event_id, about)

    async def _event(self, name: str, event_id: int, data: dict[str, Any]) -> None:
        await self._send(f"event: {name}\nid: {event_id}\ndata: {json.dumps(data)}\n\n")

    async def _send(self, text: str) -> None:
        self.write(text)
        await self.flush()

    async def _still_allowed(self) -> bool:
        """Ask the Hub again (it is cached for a while): a stream must not outlive its token."""
        try:
            model = await self.hub_auth.user_for_token(
                self.token, session_id=self.hub_auth.get_session_id(self), sync=False
            )
        except HTTPError:
            # The Hub restarts: whoever was let in stays until it answers.
            return True
        if model is None or not self.hub_auth.check_scopes(self.needs_scope, model):
            return False
        self.viewer = viewer_of(model, self.service.settings, self.hub_auth)
        return True

    def on_connection_close(self) -> None:
        super().on_connection_close()
        left = getattr(self, "_left", None)
        if left is not None:
            left()


class Health(RequestHandler):
    """For the Hub and for monitoring; needs no login and tells nothing else."""

    def initialize(self, service: Service) -> None:
        self.service = service

    async def get(self) -> None:
        self.set_header("Cache-Control", "no-store")
        try:
            async with asyncio.timeout(5.0):
                await self.service.reader.last_event_id()
        except (StoreUnavailable, TimeoutError):
            self.set_status(503)
            self.finish({"status": "unavailable"})
        else:
            # Nobody who asks here is known: that something is wrong, and not what.
            images = self.service.reader.images
            wrong = images.problem or images.trouble
            self.finish({"status": "ok"} | ({"catalogue": "last good"} if wrong else {}))
