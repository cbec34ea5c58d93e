"""`volcano`: Volcano's scheduler with its vGPU device plugin and HAMi-core.

A Volcano that does not know ``volcano.sh/vgpu-use-gpuuuid`` ignores it: what a pod was given tells.

Sources: volcano-sh/volcano, docs/user-guide/how_to_use_volcano_vgpu.md (resources, ``volcano.sh/vgpu-mode``,
``volcano.sh/vgpu-use-gpuuuid``; in ``mig`` mode memory is rounded up) and pkg/scheduler/api/devices/nvidia/vgpu (both
annotations, six fields of a node's); Project-HAMi/volcano-vgpu-device-plugin, doc/config.md and pkg/plugin/register.go
(``gpu-memory-factor``: requests, registered memory and what pods were given all count in it), pkg/plugin/vgpu/plugin.go
(``CUDA_DISABLE_CONTROL``).
"""

from __future__ import annotations

from fgpuspawner.engines.kubernetes.dialects.hami_core import Card, HamiCoreDialect


class Volcano(HamiCoreDialect):
    """Volcano's vGPUs. ``memory_unit_mib`` is the plugin's ``gpu-memory-factor``: everything counts in it."""

    name = "volcano"
    memory_held_by = "HAMi-core"
    compute_held_by = "HAMi-core"

    scheduler = "volcano"
    number = "volcano.sh/vgpu-number"
    memory = "volcano.sh/vgpu-memory"
    cores = "volcano.sh/vgpu-cores"
    use_uuid = "volcano.sh/vgpu-use-gpuuuid"
    use_mode = "volcano.sh/vgpu-mode"
    register = "volcano.sh/node-vgpu-register"
    handshake = "volcano.sh/node-vgpu-handshake"
    allotted = "volcano.sh/vgpu-ids-new"

    def cards(self, text: str) -> list[Card]:
        lines = [line.split(",") for line in text.split(":") if line]
        return [
            Card(uuid, position, int(shares), int(memory), model, health == "true", mode)
            for position, (uuid, shares, memory, model, health, mode) in enumerate(lines)
        ]

    def allotted_mib(self, memory: int) -> int:
        return memory * self._unit_mib

    def registered_mib(self, memory: int) -> int:
        return memory * self._unit_mib
