"""The driver's own memory limits for cgroups (r615 and newer), set by the hook of the NVIDIA container toolkit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fgpu_scheduler import Device, Session
from fgpuspawner.isolation.base import MIG_PREFIX, Prepared, with_more
from fgpuspawner.isolation.facts import NVML
from fgpuspawner.isolation.interposer import Interposer
from fgpuspawner.isolation.limits import DeviceLimit, Limits
from fgpuspawner.isolation.nvml_reader import NvmlReader, NvmlUnknown

log = logging.getLogger("fgpu.isolation")

MIB = 2**20


class DriverCgroup(Interposer):
    """The driver limits memory; libfgpu limits managed memory and compute, which the driver leaves out."""

    name = "driver-cgroup"
    resizes = False

    def available(self, devices: Sequence[Device]) -> str | None:
        if any(d.simulated for d in devices):
            return "the GPUs are simulated"
        if any(d.uuid.startswith(MIG_PREFIX) for d in devices):
            return "the driver limits no memory of MIG instances"
        if not self.host.own_root:
            return "sessions are local processes, which have no cgroup of their own"
        if not self.host.memory_limits:
            driver = f"driver {self.host.driver}" if self.host.driver else "the driver"
            return f"{driver} has no memory limits for cgroups; r615 or newer has"
        if not self.host.cgroup_v2:
            return "this machine does not use cgroup v2"
        return super().available(devices)

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Prepare for libfgpu, and request the driver's limit from the toolkit's hook."""
        prepared = super().prepare(session, devices, neighbours)
        parts = [limit.memory_mib for limit in prepared.limits.devices if not limit.whole]
        if not parts:
            # Whole devices need no limit, and the hook takes one amount for all devices.
            return prepared
        amount = str(min(parts))
        # The hook does nothing unless both are set.
        both = {"NVIDIA_GPU_MEMORY_REQUEST": amount, "NVIDIA_GPU_MEMORY_LIMIT": amount}
        return with_more(prepared, environment=both)

    async def driver_problems(self, limits: Limits, cgroup: str | None) -> list[str]:
        """Ask the driver: the probe cannot tell, since libfgpu shows the session its limits in any case.

        An unanswered question is only logged, because libfgpu limits the session too.
        """
        reader = NvmlReader(NVML)
        try:
            parts = [limit for limit in limits.devices if not limit.whole]
            return [p for limit in parts if (p := await _problem(reader, limit, cgroup)) is not None]
        finally:
            reader.close()


async def _problem(reader: NvmlReader, limit: DeviceLimit, cgroup: str | None) -> str | None:
    trouble: object = "the session's cgroup is not known"
    for path in (cgroup, f"/sys/fs/cgroup{cgroup}") if cgroup is not None else ():
        try:
            hard = (await reader.ask({"do": "cgroup", "uuid": limit.uuid, "cgroup": path}))["hard_limit"]
        except NvmlUnknown as e:
            trouble = e
            continue
        if 0 < hard <= limit.memory_mib * MIB:
            return None
        return (
            f"the driver does not hold the session to {limit.memory_mib} MiB of GPU {limit.uuid}; the NVIDIA container "
            "toolkit must be 1.20.1 or newer, with its hook apply-cuda-memory-limits"
        )
    log.warning("The driver's limit of GPU %s could not be read: %s", limit.uuid, trouble)
    return None
