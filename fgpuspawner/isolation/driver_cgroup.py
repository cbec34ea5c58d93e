"""The driver's own memory limits for cgroups (r615 and newer), set by the NVIDIA container toolkit's hook."""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler import Device, Session
from fgpuspawner.isolation.backend import MIG_PREFIX, Prepared
from fgpuspawner.isolation.interposer import Interposer
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.none import with_more


class DriverCgroup(Interposer):
    """Memory is held by the driver; libfgpu holds what that leaves out: managed memory and compute."""

    name = "driver-cgroup"

    def available(self, devices: Sequence[Device]) -> str | None:
        """Return why the driver cannot hold sessions on these devices, or None if it can."""
        if any(d.simulated for d in devices):
            return "the GPUs are simulated"
        if any(d.uuid.startswith(MIG_PREFIX) for d in devices):
            return "the driver limits no memory of MIG instances"
        if not self.host.containers:
            return "sessions are local processes, which have no cgroup of their own"
        if not self.host.memory_limits:
            driver = f"driver {self.host.driver}" if self.host.driver else "the driver"
            return f"{driver} has no memory limits for cgroups; r615 or newer has"
        if not self.host.cgroup_v2:
            return "this machine does not use cgroup v2"
        return super().available(devices)

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Prepare for libfgpu, and ask the toolkit's hook for the driver's limit."""
        prepared = super().prepare(session, devices, neighbours)
        parts = [limit.memory_mib for limit in prepared.limits.devices if not limit.whole]
        if not parts:
            # Whole devices: there is nothing to hold, and the hook knows one amount for all of them.
            return prepared
        amount = str(min(parts))
        # Nothing happens unless both are set.
        both = {"NVIDIA_GPU_MEMORY_REQUEST": amount, "NVIDIA_GPU_MEMORY_LIMIT": amount}
        return with_more(prepared, environment=both)
