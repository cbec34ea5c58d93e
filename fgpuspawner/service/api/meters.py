"""The REST API of the meter: what running sessions hold and use of their GPUs."""

from __future__ import annotations

from dataclasses import asdict

from fgpuspawner.meter.model import BETWEEN_POINTS_S
from fgpuspawner.service.api.base import Api
from fgpuspawner.service.api.session_objects import meter_object
from fgpuspawner.service.model import is_simulated, live_sessions, meter_of


class Meters(Api):
    """Of all running sessions that the caller may see, by id."""

    async def get(self) -> None:
        everybody = self.everybody("sessions", of_groups=True)
        world = await self.service.reader.world()
        found = live_sessions(world, self.viewer, everybody=everybody)
        meters = {str(s.id): meter_object(meter_of(s, world)) for s in found}
        self.answer(
            {
                "meters": {session_id: one for session_id, one in meters.items() if one is not None},
                "every_s": self.service.settings.meter_every_s,
                "simulated": any(is_simulated(s, world) for s in found),
            }
        )


class SessionMeter(Api):
    """Of one session, with the last minutes and its processes."""

    async def get(self, session_id: str) -> None:
        session = await self.visible_session(session_id)
        world = await self.service.reader.world()
        live = meter_of(session, world)
        self.answer(
            {
                "now": meter_object(live),
                # So far apart are the points: whoever draws them knows by it what is a gap.
                "every_s": max(self.service.settings.meter_every_s, BETWEEN_POINTS_S),
                "points": [point._asdict() for point in live.points] if live else [],
                "processes": [asdict(process) for process in live.processes] if live else [],
                "simulated": is_simulated(session, world),
            }
        )
