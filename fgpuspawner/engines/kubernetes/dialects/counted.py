"""`cce` and `mig`: pods ask for counts of resources, and the cluster chooses the GPU on the pod's node.

Which GPU a pod got is not reported, so nodes' GPUs have placeholder names, and each pod of others that has a GPU hides
one of them.

`cce` is Huawei CCE's GPU virtualization: xGPU in the host's kernel enforces memory and compute. Memory is a count of
128 MiB and compute a multiple of 5 percent, both of one GPU (product H2 to H5).

`mig` gives a pod whole MIG instances of one profile; the hardware enforces memory and compute. The device plugin must run
with the MIG strategy "mixed", which makes each profile a resource.

Sources: Huawei Cloud CCE, user guide, "Using GPU Virtualization" (cce_10_0646: the resources, their units, one isolation
mode on a GPU, ``schedulerName: volcano``, the whole GPU at 100 percent). That a node's allocatable
resources add up its GPUs follows from how Kubernetes counts extended resources; it is not in these pages. NVIDIA
k8s-device-plugin, README, "MIG Support in Kubernetes", and its resource names (``nvidia.com/mig-PROFILE``, ``+`` written
as ``.``); release notes of 0.7.0 (a container can use one resource type at a time); NVIDIA GPU feature discovery, "MIG
'mixed' strategy" (``nvidia.com/mig-PROFILE.memory`` in MiB).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fgpu_scheduler import Device, FoundDevice
from fgpuspawner.engines.kubernetes.dialects.base import (
    AssignedGpu,
    Dialect,
    GpuRecords,
    GpuUnknown,
    Manifest,
    PodPatch,
    Slice,
    count,
    label,
    limits_of,
    name_of,
    positive,
    read,
)

MEMORY = "volcano.sh/gpu-mem.128Mi"
MEMORY_UNIT_MIB = 128
COMPUTE = "volcano.sh/gpu-core.percentage"
COMPUTE_UNIT_PERCENT = 5
MIG = "nvidia.com/mig-"
PRODUCT = "nvidia.com/gpu.product"
_PROFILE = re.compile(r"\bMIG[ -](\d+g\.\d+gb(?:[+.-][a-z.]+)?)$")


class Cce(Dialect):
    """Virtual GPUs of CCE."""

    name = "cce"
    pins_card = False
    held_by = "xGPU"

    def _patch(self, slices: Sequence[Slice], name: str) -> PodPatch:
        if len(slices) > 1:
            raise self.refusal(
                f"a pod has a share of one GPU, so {len(slices)} GPUs aren't possible; choose 1 GPU or less"
            )
        (one,) = slices
        units = self.units(one.share.memory_mib, MEMORY_UNIT_MIB, of="GPU memory", measure="MiB")
        limits = {MEMORY: str(units)}
        if one.compute_percent is not None:
            steps = self.units(one.compute_percent, COMPUTE_UNIT_PERCENT, of="compute", measure="%")
            limits[COMPUTE] = str(steps * COMPUTE_UNIT_PERCENT)
        return PodPatch(limits=limits, spec={"schedulerName": "volcano"})

    def capacity(self, node: Manifest, records: GpuRecords) -> Sequence[FoundDevice]:
        """Return one GPU for each 100 percent of the node; all GPUs of a node are taken to be equal."""
        name = name_of(node)
        resources = (node.get("status") or {}).get("allocatable") or {}
        if MEMORY not in resources or COMPUTE not in resources:
            raise GpuUnknown(
                f"node {name} registers no {MEMORY} and {COMPUTE}; is GPU virtualization on there?"
            )
        units, percent = (read(f"{key} of node {name}", count, resources[key]) for key in (MEMORY, COMPUTE))
        gpus = percent // 100
        if percent % 100 or (gpus == 0) != (units == 0) or (gpus and units % gpus):
            raise GpuUnknown(f"node {name}: {units} x 128 MiB and {percent} % are not those of equal GPUs")
        model = label(node, PRODUCT) or "GPU"
        return [
            FoundDevice(f"{name}/gpu-{index}", index, model, units // gpus * MEMORY_UNIT_MIB)
            for index in range(gpus)
        ]

    def assigned(self, pod: Manifest, records: GpuRecords) -> Sequence[AssignedGpu]:
        what = f"{MEMORY} of pod {name_of(pod)}"
        return [AssignedGpu() for limits in limits_of(pod) if read(what, count, limits.get(MEMORY, 0))]


class Mig(Dialect):
    """MIG instances that the cluster's administrator has made."""

    name = "mig"
    pins_card = False
    whole_only = True
    held_by = "hardware"

    def _patch(self, slices: Sequence[Slice], name: str) -> PodPatch:
        resources = set[str]()
        for share, device in slices:
            resource = self.resource_of(device)
            if resource is None:
                raise self.refusal(
                    f"a pod gets MIG instances, and {device.model} is none;"
                    ' choose a GPU whose model ends in its profile, as in "MIG 1g.10gb"'
                )
            if share.memory_mib != device.memory_mib:
                raise self.refusal(
                    f"a pod gets whole MIG instances, so {share.memory_mib} MiB isn't possible;"
                    f" choose all {device.memory_mib} MiB of the instance"
                )
            resources.add(resource)
        if len(resources) > 1:
            shown = " and ".join(sorted(resources))
            raise self.refusal(
                f"a pod gets MIG instances of one profile, so {shown} together aren't possible; choose one"
            )
        return PodPatch(limits={resources.pop(): str(len(slices))})

    def resource_of(self, device: Device | FoundDevice) -> str | None:
        profile = _PROFILE.search(device.model)
        return MIG + profile[1].replace("+", ".") if profile else None

    def capacity(self, node: Manifest, records: GpuRecords) -> Sequence[FoundDevice]:
        """Return the instances that the device plugin registers on the node; each takes one session."""
        name = name_of(node)
        resources = (node.get("status") or {}).get("allocatable")
        if resources is None:
            raise GpuUnknown(f"node {name} doesn't say what it has yet")
        product, found = label(node, PRODUCT) or "GPU", list[FoundDevice]()
        for resource in sorted(key for key in resources if key.startswith(MIG)):
            memory, profile = label(node, f"{resource}.memory"), resource.removeprefix(MIG)
            number = read(f"{resource} of node {name}", count, resources[resource])
            if not number:
                continue
            if memory is None:
                raise GpuUnknown(
                    f"node {name} has no label {resource}.memory; does GPU feature discovery run?"
                )
            memory_mib = read(f"{resource}.memory of node {name}", lambda text: positive(count(text)), memory)
            found += [
                FoundDevice(
                    f"{name}/mig-{profile}-{n}", len(found) + n, f"{product} MIG {profile}", memory_mib
                )
                for n in range(number)
            ]
        return found

    def assigned(self, pod: Manifest, records: GpuRecords) -> Sequence[AssignedGpu]:
        wanted = [item for limits in limits_of(pod) for item in sorted(limits.items())]
        return [
            AssignedGpu(resource=resource)
            for resource, number in wanted
            if resource.startswith(MIG)
            for _ in range(read(f"{resource} of pod {name_of(pod)}", count, number))
        ]
