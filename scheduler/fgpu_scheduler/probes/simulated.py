"""Simulated GPUs, for a machine without any: a demo, and tests."""

from __future__ import annotations

from dataclasses import dataclass

from fgpu_scheduler.ports import FoundDevice

MODEL = "Simulated GPU"


@dataclass(frozen=True, slots=True)
class SimulatedProbe:
    """A `DeviceProbe` that reports ``count`` equal GPUs of ``memory_mib``, marked as simulated.

    Their UUIDs are stable, so that a restart finds the same devices.
    """

    count: int
    memory_mib: int = 8192
    node_id: str = "local"

    def devices(self) -> tuple[FoundDevice, ...]:
        """Return the simulated GPUs in order of their index."""
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
