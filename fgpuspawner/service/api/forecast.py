"""The API's forecast: what would become of a request."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler import (
    Caps,
    Request,
    RequestForecast,
    SessionState,
    SystemClock,
    pending_refusals,
)
from fgpuspawner.form import ticket as tickets
from fgpuspawner.form.offer import Offer, Refused, Wanted
from fgpuspawner.form.options import parse, read_fields
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.api.forecast_objects import (
    INSTEAD_OF,
    forecast_object,
    quota_object,
    refused_object,
    without_session,
)
from fgpuspawner.service.model import Viewer, World
from fgpuspawner.service.problems import Problem, forbidden


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
            raise forbidden("only users start sessions")
        world = await reader.now()
        simulated = world.simulated(viewer.groups)
        # Decoded by tornado, which refuses what is not UTF-8; the check against forgery is no option.
        fields = {
            name: self.get_query_arguments(name) for name in self.request.query_arguments if name != "_xsrf"
        }
        if instead_of := fields.pop(INSTEAD_OF, None):
            world = without_session(world, viewer.user, instead_of[-1])
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
            refused = refused_object(e.refusals, count=_count(fields), simulated=simulated)
            self.answer(refused | {"quota": quota})
            return
        found = await self._forecast(wanted, offer, world)
        simulated = world.simulated([wanted.group])
        told = forecast_object(found, world, viewer, count=wanted.count, simulated=simulated)
        self.answer(told | {"quota": quota})

    async def _forecast(self, wanted: Wanted, offer: Offer, world: World) -> RequestForecast:
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


def _refuse_beside(world: World, asked: Request, count: int, caps: Caps) -> None:
    """Refuse what the scheduler would when it is asked for it now: more than may wait at a time."""
    waiting = [s.request for s in world.snapshot.sessions if s.state is SessionState.PENDING]
    refusals = pending_refusals(asked, count, waiting, caps, world.snapshot.quotas)
    if refusals:
        raise Refused(refusals)


def _count(fields: dict[str, list[str]]) -> int:
    asked = (fields.get("count") or ["1"])[0]
    return int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 10 else 1
