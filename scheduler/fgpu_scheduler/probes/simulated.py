"""Simulated GPUs for demos and tests on a machine without any."""

from __future__ import annotations

from dataclasses import dataclass

from fgpu_scheduler.ports import FoundDevice

MODEL = "Simulated GPU"


@dataclass(frozen=True, slots=True)
class SimulatedProbe:
    """Lists ``count`` simulated GPUs. Their UUIDs stay the same after a restart."""

    count: int
    memory_mib: int = 8192
    node_id: str = "local"

    def devices(self) -> tuple[FoundDevice, ...]:
        return tuple(
            FoundDevice(
                uuid=f"GPU-simulated-{self.node_id}-{index}",
                index=index,
                model=f"{MODEL} {self.memory_mib} MiB",
                memory_mib=self.memory_mib,
                simulated=True,
            )
            for index in range(self.count)
        )
