"""Asks the drivers for the health of every GPU, also of unused ones, and writes it for the service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from fgpu_scheduler import Clock, FGPUError
from fgpuspawner.concurrency.background import Background
from fgpuspawner.isolation.gpu_poller import Drivers, NvmlSource
from fgpuspawner.meter.gpu_health import HEALTH, GpuHealth, GpuHealthState, health_of

EVERY_S = 20


class GpuWatch:
    def __init__(self, drivers: Drivers, clock: Clock, *, data: Path) -> None:
        self._drivers = drivers
        self._clock = clock
        self._data = data
        # Xid errors from before a restart of the Hub have been reported already.
        self._known: Mapping[str, GpuHealth] = HEALTH.read(data).devices

    def begin(self, background: Background) -> None:
        background.every(EVERY_S, self.look, failed="How the GPUs are is not known")

    async def look(self) -> None:
        """Ask every driver once, concurrently, so that one that hangs delays no other."""
        sources = {p: uuids for p, uuids in self._drivers.sources().items() if not p.has_no_driver}
        answers = await asyncio.gather(*(self._one(source, uuids) for source, uuids in sources.items()))
        self._known = {
            uuid: health.after(self._known.get(uuid)) for found in answers for uuid, health in found.items()
        }
        await asyncio.to_thread(HEALTH.write, self._data, GpuHealthState(self._known))

    async def _one(self, source: NvmlSource, uuids: list[str]) -> dict[str, GpuHealth]:
        now_s = self._clock.now_s()
        try:
            reader = await asyncio.to_thread(self._drivers.reader, source)
            answer = await reader.ask({"do": "health", "uuids": sorted(uuids)})
            return {uuid: health_of(answer["devices"][uuid], now_s) for uuid in uuids}
        except FGPUError as e:
            trouble = str(e)
        except (KeyError, TypeError, ValueError) as e:
            trouble = f"an answer that makes no sense ({e!r})"
        except OSError as e:
            # A failure of one machine: the others are asked all the same.
            trouble = str(e)
        return {uuid: GpuHealth(now_s, trouble=trouble) for uuid in uuids}
