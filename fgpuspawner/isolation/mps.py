"""MPS: NVIDIA's daemon through which processes share a GPU, with a cap on each process's SMs and memory.

`auto` never chooses it: a process that dies inside a kernel can end its neighbours, and notebooks are killed often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fgpu_scheduler import Device, Session
from fgpuspawner.isolation.base import MIG_PREFIX, Mount, Prepared, with_more
from fgpuspawner.isolation.interposer import Interposer
from fgpuspawner.isolation.limits import Limits


class Mps(Interposer):
    """MPS limits compute; MPS and libfgpu limit memory, as MPS does not show a session its limit."""

    name = "mps"
    resizes = False
    limits_compute = False

    def available(self, devices: Sequence[Device]) -> str | None:
        if any(d.simulated for d in devices):
            return "the GPUs are simulated"
        if any(d.uuid.startswith(MIG_PREFIX) for d in devices):
            return "MIG instances need a daemon each"
        if self.host.mps_pipe is None:
            return "c.FGPU.mps_pipe_directory is empty"
        # With a wrong folder every session would silently get the whole GPU.
        return self.host.mps_trouble or super().available(devices)

    def prepare(self, session: Session, devices: Sequence[Device], neighbours: Sequence[Limits]) -> Prepared:
        """Prepare for libfgpu, and set the MPS variables of the session's processes."""
        prepared = super().prepare(session, devices, neighbours)
        pipe = self.host.mps_pipe
        assert pipe is not None, "not available"
        held = prepared.limits.devices
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(min(limit.compute_percent or 100 for limit in held)),
            # One limit for each visible ordinal: with one too many the driver ignores all limits.
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(
                f"{ordinal}={limit.memory_mib}M" for ordinal, limit in enumerate(held)
            ),
        }
        if not self.host.own_root:
            return with_more(prepared, environment=environment)
        # Clients and daemon also share memory.
        with_pipe = with_more(
            prepared, environment=environment, mounts=[Mount(pipe, str(pipe), read_only=False)]
        )
        return replace(with_pipe, hosts_ipc=True)
