"""`hami`: HAMi's scheduler, device plugin and HAMi-core.

A node's GPUs are in an annotation of the node, and the GPUs of a pod's containers in an annotation of the pod.
``nvidia.com/gpumem: 0`` means no limit, so it is never written. HAMi denies pods with a privileged container (as Zero to
JupyterHub's network init container is), and lets a container's variable ``CUDA_DISABLE_CONTROL`` switch its limits off.

Sources: Project-HAMi/HAMi, docs/config.md (resource names and defaults, ``deviceMemoryScaling``, ``deviceSplitCount``);
docs/develop/protocol.md (both annotations); docs/gpu-memory-factor.md (units of a pod's request);
pkg/device/nvidia/device.go and pkg/device/devices.go (``nvidia.com/use-gpuuuid``, ``nvidia.com/vgpu-mode``; since 2.7 the
node's annotation is JSON; that of older ones is not read).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.kubernetes.dialects.base import (
    AssignedGpu,
    Dialect,
    GpuRecords,
    GpuUnknown,
    Manifest,
    PodPatch,
    Slice,
    annotation,
    limits_of,
    name_of,
    positive,
    read,
)

MODE = "hami-core"
"""The mode of a GPU that is shared by HAMi-core. In ``mig`` a request is rounded up to an instance."""
SWITCH = "CUDA_DISABLE_CONTROL"
"""Turns HAMi-core off."""

NUMBER = "nvidia.com/gpu"
MEMORY = "nvidia.com/gpumem"
CORES = "nvidia.com/gpucores"
REGISTER = "hami.io/node-nvidia-register"
HANDSHAKE = "hami.io/node-handshake"
ALLOTTED = "hami.io/vgpu-devices-allocated"


class Hami(Dialect):
    """HAMi. ``memory_unit_mib`` is its ``memoryFactor``: requests count in it, annotations in MiB.

    Several GPUs are possible where each gives the same, because the amounts are for each of them.
    """

    name = "hami"
    held_by = "HAMi"
    pins_card = True

    def __init__(self, *, memory_unit_mib: int = 1) -> None:
        self._unit_mib = memory_unit_mib

    def _patch(self, slices: Sequence[Slice], name: str) -> PodPatch:
        first = slices[0]
        amounts = {(one.share.memory_mib, one.compute_percent) for one in slices}
        if len(amounts) > 1:
            raise self.refusal(
                f"each GPU of a pod gives the same, so {len(amounts)} different shares aren't possible;"
                " choose GPUs of one model"
            )
        units = self.units(first.share.memory_mib, self._unit_mib, of="GPU memory", measure="MiB")
        limits = {NUMBER: str(len(slices)), MEMORY: str(units)}
        if first.compute_percent is not None:
            limits[CORES] = str(first.compute_percent)
        uuids = ",".join(one.device.uuid for one in slices)
        return PodPatch(
            annotations={"nvidia.com/use-gpuuuid": uuids, "nvidia.com/vgpu-mode": MODE},
            limits=limits,
            environment={SWITCH: None},
            spec={"schedulerName": "hami-scheduler"},
        )

    def capacity(self, node: Manifest, records: GpuRecords) -> Sequence[FoundDevice]:
        """Return the GPUs of the node's annotation that HAMi-core shares; GPUs in other modes are left to others."""
        name = name_of(node)
        text = annotation(node, REGISTER)
        if text is None:
            raise GpuUnknown(f"node {name} has no annotation {REGISTER}; does its device plugin run?")
        if (annotation(node, HANDSHAKE) or "").startswith("Deleted"):
            raise GpuUnknown(
                f"node {name}: its device plugin doesn't answer the scheduler; look at the plugin's log"
            )
        return read(f"the annotation {REGISTER} of node {name}", _shared, text)

    def assigned(self, pod: Manifest, records: GpuRecords) -> Sequence[AssignedGpu]:
        text = annotation(pod, ALLOTTED)
        if text is not None:
            return read(f"the annotation {ALLOTTED} of pod {name_of(pod)}", _allotted, text)
        if any(limits.keys() & {NUMBER, MEMORY} for limits in limits_of(pod)):
            raise GpuUnknown(f"the pod {name_of(pod)} has no annotation {ALLOTTED} yet: it has no GPU so far")
        return []


def _allotted(text: str) -> list[AssignedGpu]:
    gpus = [gpu.split(",") for container in text.split(";") for gpu in container.split(":") if gpu]
    # The fields are UUID, vendor, MiB and cores. In `mig` mode the instance is in brackets behind the UUID.
    return [AssignedGpu(uuid.partition("[")[0]) for uuid, _, memory, _ in gpus if positive(int(memory))]


def _shared(text: str) -> list[FoundDevice]:
    """Return the healthy GPUs in HAMi-core's mode; the JSON leaves out what is 0 or false."""
    gpus = json.loads(text)
    if not isinstance(gpus, list):
        raise ValueError("no list")
    return [
        FoundDevice(gpu["id"], gpu.get("index", 0), gpu["type"], positive(gpu["devmem"]))
        for gpu in gpus
        if gpu.get("health") and (gpu.get("mode") or MODE) == MODE
    ]
