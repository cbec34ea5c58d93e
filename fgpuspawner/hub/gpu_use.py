"""Since when nobody in a session has used its GPUs, as the driver says.

What the driver does not tell is not taken for idle: nobody is ended for what is not known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from fgpu_scheduler import FGPUError, Session
from fgpuspawner.isolation.drivers import Drivers, Place
from fgpuspawner.isolation.nvml_reader import NvmlUnknown

log = logging.getLogger("fgpu.idle")

LONGEST_LOOK_S = 5.0

Used = Mapping[str, Mapping[int, int | None] | NvmlUnknown]
"""By device and process, the percent of it that was used; None where that is not known."""


def idle_now(
    sessions: Iterable[Session], used: Used, owners: Mapping[int, int], unusable: Iterable[str] = ()
) -> frozenset[int]:
    """Return the sessions of which none of their processes has used any of their devices. Pure.

    ``unusable`` are devices that no program can use: simulated ones without a driver.
    """
    never = frozenset(unusable)
    return frozenset(
        session.id
        for session in sessions
        if session.placement is not None
        and all(
            share.device_uuid in never or _is_idle(session.id, used.get(share.device_uuid), owners)
            for share in session.placement.shares
        )
    )


def _is_idle(
    session_id: int, device: Mapping[int, int | None] | NvmlUnknown | None, owners: Mapping[int, int]
) -> bool:
    if device is None or isinstance(device, NvmlUnknown):
        return False
    return all(percent == 0 for pid, percent in device.items() if owners.get(pid) == session_id)


class GpuUse:
    """Looks at the GPUs whenever it is asked, and remembers since when each session has not used its own."""

    def __init__(self, drivers: Drivers) -> None:
        self._drivers = drivers
        self._since_s: dict[int, int] = {}

    async def idle_since(self, sessions: Sequence[Session], now_s: int) -> Mapping[int, int]:
        """Return since when each idle session's GPUs are: seen to be, from one question to the next."""
        wanted = {
            s.device_uuid for session in sessions if session.placement for s in session.placement.shares
        }
        used: dict[str, Mapping[int, int | None] | NvmlUnknown] = {}
        owners: dict[int, int] = {}
        unusable: list[str] = []
        looks = []
        for place, uuids in self._drivers.places().items():
            own = [uuid for uuid in uuids if uuid in wanted]
            if place.has_no_driver:
                unusable += own
            elif own:
                looks.append(self._look(place, own, used, owners))
        await asyncio.gather(*looks)
        idle = idle_now(sessions, used, owners, unusable)
        self._since_s = {i: self._since_s.get(i, now_s) for i in sorted(idle)}
        return dict(self._since_s)

    async def _look(
        self,
        place: Place,
        uuids: Sequence[str],
        used: dict[str, Mapping[int, int | None] | NvmlUnknown],
        owners: dict[int, int],
    ) -> None:
        try:
            async with asyncio.timeout(LONGEST_LOOK_S):
                found = await self._drivers.reader(place).use(uuids)
                pids = sorted(
                    {pid for device in found.values() if isinstance(device, Mapping) for pid in device}
                )
                owners.update(await self._drivers.owners(place, pids))
                used.update(found)
        except (FGPUError, TimeoutError) as e:
            log.warning("What the GPUs at %s do is not known, so nobody there is idle: %s", place, e)
