"""MIG: instances that the administrator created, separated by the hardware."""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler import Device
from fgpuspawner.isolation.base import MIG_PREFIX
from fgpuspawner.isolation.interposer import Interposer


class Mig(Interposer):
    """The hardware separates instances; libfgpu separates sessions that share one."""

    name = "mig"
    resizes = False

    def available(self, devices: Sequence[Device]) -> str | None:
        others = [d.uuid for d in devices if not d.uuid.startswith(MIG_PREFIX)]
        if others or not devices:
            return f"{others[0] if others else 'no GPU'} is not a MIG instance"
        return super().available(devices)
