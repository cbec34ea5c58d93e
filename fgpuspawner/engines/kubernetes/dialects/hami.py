"""`hami`: HAMi's scheduler, device plugin and HAMi-core.

``nvidia.com/gpumem: 0`` is no limit, so it is never written. HAMi denies pods with a privileged container (as Zero to
JupyterHub's network init container is), and lets a container's variable ``CUDA_DISABLE_CONTROL`` switch its limits off.

Sources: Project-HAMi/HAMi, docs/config.md (resource names and defaults, ``deviceMemoryScaling``, ``deviceSplitCount``);
docs/develop/protocol.md (both annotations; nine or seven fields); docs/gpu-memory-factor.md (units of a pod's request);
pkg/device/nvidia/device.go and pkg/device/devices.go (``nvidia.com/use-gpuuuid``, ``nvidia.com/vgpu-mode``; since 2.7 the
node's annotation is JSON, which leaves out what is 0 or false).
"""

from __future__ import annotations

import json

from fgpuspawner.engines.kubernetes.dialects.hami_core import MODE, Card, HamiCoreDialect


class Hami(HamiCoreDialect):
    """HAMi. ``memory_unit_mib`` is its ``memoryFactor``: requests count in it, annotations in MiB."""

    name = "hami"
    memory_held_by = "HAMi"
    compute_held_by = "HAMi"

    scheduler = "hami-scheduler"
    number = "nvidia.com/gpu"
    memory = "nvidia.com/gpumem"
    cores = "nvidia.com/gpucores"
    use_uuid = "nvidia.com/use-gpuuuid"
    use_mode = "nvidia.com/vgpu-mode"
    register = "hami.io/node-nvidia-register"
    handshake = "hami.io/node-handshake"
    allotted = "hami.io/vgpu-devices-allocated"

    def cards(self, text: str) -> list[Card]:
        if text.lstrip().startswith("["):
            return [
                Card(
                    one["id"],
                    one.get("index", 0),
                    one.get("count", 0),
                    one["devmem"],
                    one["type"],
                    one.get("health", False),
                    one.get("mode", MODE),
                )
                for one in json.loads(text)
            ]
        return [
            _card(position, line.split(",")) for position, line in enumerate(filter(None, text.split(":")))
        ]

    def allotted_mib(self, memory: int) -> int:
        return memory

    def registered_mib(self, memory: int) -> int:
        return memory


def _card(position: int, fields: list[str]) -> Card:
    uuid, shares, memory, _cores, model, _numa, health = fields[:7]
    index, mode = (int(fields[7]), fields[8]) if len(fields) > 7 else (position, MODE)
    return Card(uuid, index, int(shares), int(memory), model, health == "true", mode)
