"""The REST API of the meter: what running sessions hold and use of their GPUs."""

from __future__ import annotations

from fgpuspawner.meter.model import BETWEEN_POINTS_S
from fgpuspawner.service import objects
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.model import is_simulated, live_sessions, meter_of


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
        self.answer(objects.SessionMeter.of(live, every_s=every_s, simulated=simulated))
