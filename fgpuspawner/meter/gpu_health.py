"""The health of each GPU: use, temperature, power and errors; and the file in which the Hub publishes it.

A value that the driver does not tell is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fgpuspawner.isolation.files import HubFile
from fgpuspawner.isolation.nvml_child import PROGRAMS_XIDS, worse_xid

OLD_S = 120
"""An older reading counts as unknown."""
HOT_C = 90
XID_STANDS_S = 7 * 24 * 3600
"""How long an error is shown if none follows it."""


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """The last reading of one GPU. ``trouble`` says why nothing is known.

    ``ecc_errors`` counts uncorrected errors since the driver was loaded. ``xid`` is the driver's last error, seen at
    ``xid_at_s``; 0 is none since the Hub watches.
    """

    at_s: int
    use_percent: int | None = None
    memory_used_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    ecc_errors: int | None = None
    xid: int | None = None
    xid_at_s: int | None = None
    trouble: str | None = None

    def after(self, before: GpuHealth | None) -> GpuHealth:
        """Return this reading with the last error from before, if it has none of its own."""
        old = before.xid if before is not None else None
        if before is None or not old or self.at_s - (before.xid_at_s or 0) > XID_STANDS_S:
            return replace(self, xid_at_s=self.at_s) if self.xid else self
        if self.xid and worse_xid(self.xid, old) == self.xid:
            return replace(self, xid_at_s=self.at_s)
        return replace(self, xid=old, xid_at_s=before.xid_at_s)

    @property
    def problem(self) -> str:
        """The problem that an administrator must solve, in words; empty if none is known."""
        found = []
        if self.trouble:
            found.append(f"its driver does not tell how it is: {self.trouble}")
        if self.ecc_errors:
            found.append(f"{self.ecc_errors} uncorrected memory errors (ECC)")
        if self.xid and self.xid not in PROGRAMS_XIDS:
            found.append(f"error {self.xid} of the driver (Xid)")
        if self.temperature_c is not None and self.temperature_c >= HOT_C:
            found.append(f"{self.temperature_c} °C")
        return "; ".join(found)


@dataclass(frozen=True, slots=True)
class GpuHealthState:
    """What the Hub published last, by the GPU's UUID."""

    devices: Mapping[str, GpuHealth] = field(default_factory=dict)

    def of(self, uuid: str, now_s: int) -> GpuHealth | None:
        """Return the current health of a GPU; None if unknown for a while."""
        found = self.devices.get(uuid)
        return found if found is not None and abs(now_s - found.at_s) <= OLD_S else None


def health_of(answer: Mapping[str, Any], now_s: int) -> GpuHealth:
    """Return the health in the driver's answer for a GPU; raises ValueError, TypeError or KeyError if it is invalid."""
    if "error" in answer:
        return GpuHealth(now_s, trouble=str(answer["error"])[:500])
    found = {name: None if value is None else int(value) for name, value in answer.items()}
    used, power_mw, limit_mw = found["memory_used_bytes"], found["power_mw"], found["power_limit_mw"]
    return GpuHealth(
        now_s,
        use_percent=found["use_percent"],
        memory_used_mib=None if used is None else used // 2**20,
        temperature_c=found["temperature_c"],
        power_w=None if power_mw is None else round(power_mw / 1000, 1),
        power_limit_w=None if limit_mw is None else round(limit_mw / 1000, 1),
        ecc_errors=found["ecc_errors"],
        xid=found["xid"],
    )


HEALTH = HubFile("gpu_health.json", GpuHealthState)
