"""MPS: NVIDIA's daemon through which processes share a GPU, with a cap on each one's SMs and memory.

Never chosen by itself: a process that dies inside a kernel can end its neighbours, and notebooks are killed all the
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fgpu_scheduler import Device, Session
from fgpuspawner.isolation.base import MIG_PREFIX, Mount, Prepared, with_more
from fgpuspawner.isolation.interposer import Interposer
from fgpuspawner.isolation.limits import Limits


class Mps(Interposer):
    """Compute is held by MPS, memory by MPS and libfgpu: MPS does not show a session its limit."""

    name = "mps"
    resizes = False
    limits_compute = False

    def available(self, devices: Sequence[Device]) -> str | None:
        """Return why the daemon cannot be used, or None if it can."""
        if any(d.simulated for d in devices):
            return "the GPUs are simulated"
        if any(d.uuid.startswith(MIG_PREFIX) for d in devices):
            return "MIG instances need a daemon each"
        if self.host.mps_pipe is None:
            return "c.FGPU.mps_pipe_directory is empty"
        # A wrong folder would silently give every session the whole GPU.
        return self.host.mps_trouble or super().available(devices)

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Prepare for libfgpu, and tell the session's processes of the daemon and of their part of it."""
        prepared = super().prepare(session, devices, neighbours)
        pipe = self.host.mps_pipe
        assert pipe is not None, "not available"
        held = prepared.limits.devices
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(min(limit.compute_percent or 100 for limit in held)),
            # By ordinal of the visible devices, exactly one each: one too many, and every limit is dropped.
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(
                f"{ordinal}={limit.memory_mib}M" for ordinal, limit in enumerate(held)
            ),
        }
        if not self.host.own_root:
            return with_more(prepared, environment=environment)
        # Clients and daemon meet in shared memory, too.
        with_pipe = with_more(
            prepared, environment=environment, mounts=[Mount(pipe, str(pipe), read_only=False)]
        )
        return replace(with_pipe, hosts_ipc=True)
