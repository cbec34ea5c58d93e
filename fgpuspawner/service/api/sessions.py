"""The API's sessions: listing, one of them, ending, keeping, extending and resizing it, and their meters."""

from __future__ import annotations

from fgpuspawner import scopes
from fgpuspawner.meter.model import BETWEEN_POINTS_S
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api, sent_json
from fgpuspawner.service.api.session_objects import sessions_object
from fgpuspawner.service.handler import needs
from fgpuspawner.service.model import is_simulated, live_sessions, meter_of
from fgpuspawner.service.problems import bad_argument, forbidden
from fgpuspawner.service.session_actions import (
    FIELDS,
    end_session,
    grant_wish,
    rename_session,
    resize_session,
    session_log,
    session_setup,
)
from fgpuspawner.text.logs import LINES_SHOWN, MOST_LINES

ENDED_SHOWN = 50


class Sessions(Api):
    async def get(self) -> None:
        everybody, with_ended = self.everybody("sessions", of_groups=True), self.flag("ended")
        world = await self.service.reader.world()
        found = live_sessions(world, self.viewer, everybody=everybody)
        if with_ended:
            found = (*found, *await self.ended_sessions(ENDED_SHOWN, everybody=everybody))
        self.answer(sessions_object(found, world, self.viewer, self.service.site))


class OneSession(Api):
    async def get(self, session_id: str) -> None:
        await self.answer_session(await self.visible_session(session_id))

    async def delete(self, session_id: str) -> None:
        await self.answer_session(await end_session(self, session_id, message=self._message()), status=202)

    async def patch(self, session_id: str) -> None:
        if not self.hub_auth.check_scopes(scopes.KEEP, self.current_user):
            raise forbidden(needs(scopes.KEEP))
        given = self.body((*FIELDS, "name"))
        if given.keys() == {"name"}:
            session = await rename_session(self, session_id, given["name"])
        elif "name" in given:
            raise bad_argument("name", "change the name and the amount in two calls")
        else:
            session = await resize_session(self, session_id, given)
        await self.answer_session(session, status=202)

    def _message(self) -> str:
        try:
            found = sent_json(self.request.body)
            message = found.get("message", "") if isinstance(found, dict) else None
        except ValueError:
            message = None
        if not isinstance(message, str):
            text = 'the body must be nothing, or a JSON object such as {"message": "repair at 15:00"}'
            raise bad_argument("message", text)
        return message


class SessionLog(Api):
    async def get(self, session_id: str) -> None:
        most = self.number("lines", default=LINES_SHOWN, least=1, most=MOST_LINES)
        lines = await session_log(self, session_id, lines=most)
        self.answer(objects.SessionLog(session_id=int(session_id), lines=lines))


class SessionSetup(Api):
    async def get(self, session_id: str) -> None:
        found = await session_setup(self, session_id)
        self.set_header("Cache-Control", "no-store")
        self.answer(objects.SessionSetup(variables=dict(found.variables), script=found.script))


class Wish(Api):
    """The last word of the address is one of `WISHES`."""

    needs_scope = scopes.KEEP

    async def post(self, session_id: str) -> None:
        wish = self.request.path.rpartition("/")[2]
        found = await grant_wish(self, session_id, wish)
        await self.answer_session(found, status=202 if wish in ("park", "wake") else 200)


class Meters(Api):
    """Of all running sessions that the caller may see, by id."""

    async def get(self) -> None:
        everybody = self.everybody("sessions", of_groups=True)
        world = await self.service.reader.world()
        found = live_sessions(world, self.viewer, everybody=everybody)
        meters = {str(s.id): live.now for s in found if (live := meter_of(s, world)) is not None}
        simulated = any(is_simulated(s, world) for s in found)
        every_s = self.service.settings.meter_every_s
        self.answer(objects.Meters.of(meters=meters, every_s=every_s, simulated=simulated))


class SessionMeter(Api):
    """Of one session, with the last minutes and its processes."""

    async def get(self, session_id: str) -> None:
        session = await self.visible_session(session_id)
        world = await self.service.reader.world()
        every_s = max(self.service.settings.meter_every_s, BETWEEN_POINTS_S)
        simulated = is_simulated(session, world)
        live = meter_of(session, world)
        unmeasured: dict[str, object] = {"now": None, "points": [], "processes": []} if live is None else {}
        self.answer(objects.SessionMeter.of(live, every_s=every_s, simulated=simulated, **unmeasured))
