"""`cce`: Huawei CCE's GPU virtualization. xGPU in the host's kernel holds memory and compute.

Memory is a count of 128 MiB and compute a multiple of 5 percent, both of one GPU (product H2 to H5). CCE chooses the GPU
on the node, and does not document that it says which: a pod's GPU stays unknown. Its virtual GPUs cannot be used in init
containers, so sessions get none, and no files of ours.

Sources: Huawei Cloud CCE, user guide, "Using GPU Virtualization" (cce_10_0646: the resources, their units, one isolation
mode on a GPU, 20 virtual GPUs on one, ``schedulerName: volcano``, init containers, the whole GPU at 100 percent) and
"Equal Distribution Scheduling on Virtual GPUs" (cce_10_0965). That a node's allocatable resources add up its GPUs
follows from how Kubernetes counts extended resources; it is not in these pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.kubernetes.dialects.base import (
    Beside,
    Dialect,
    Given,
    Manifest,
    NotKnown,
    PodPatch,
    Registered,
    Slice,
    label,
    limits_of,
    name_of,
    read,
)
from fgpuspawner.engines.kubernetes.quantity import count

MEMORY = "volcano.sh/gpu-mem.128Mi"
MEMORY_UNIT_MIB = 128
COMPUTE = "volcano.sh/gpu-core.percentage"
COMPUTE_UNIT_PERCENT = 5
MAX_SHARES = 20


class Cce(Dialect):
    """Virtual GPUs of CCE."""

    name = "cce"
    pins_card = False
    init_containers = False
    memory_held_by = "xGPU"
    compute_held_by = "xGPU"

    def _said(self, slices: Sequence[Slice], name: str) -> PodPatch:
        if len(slices) > 1:
            raise self.refusal(
                f"a pod has a share of one GPU, so {len(slices)} GPUs aren't possible; choose 1 GPU or less"
            )
        (one,) = slices
        limits = {
            MEMORY: str(self.units(one.share.memory_mib, MEMORY_UNIT_MIB, of="GPU memory", measure="MiB"))
        }
        if one.compute_percent is not None:
            steps = self.units(one.compute_percent, COMPUTE_UNIT_PERCENT, of="compute", measure="%")
            limits[COMPUTE] = str(steps * COMPUTE_UNIT_PERCENT)
        return PodPatch(limits=limits, scheduler_name="volcano")

    def capacity(self, node: Manifest, beside: Beside) -> Sequence[Registered]:
        """Return as many equal GPUs as the node's 100 percents: all GPUs of a node are taken to be of one model."""
        name = name_of(node)
        resources = (node.get("status") or {}).get("allocatable") or {}
        if MEMORY not in resources or COMPUTE not in resources:
            raise NotKnown(
                f"node {name} registers no {MEMORY} and {COMPUTE}; is GPU virtualization on there?"
            )
        units, percent = (read(f"{key} of node {name}", count, resources[key]) for key in (MEMORY, COMPUTE))
        gpus = percent // 100
        if percent % 100 or (gpus == 0) != (units == 0) or (gpus and units % gpus):
            raise NotKnown(f"node {name}: {units} x 128 MiB and {percent} % are not those of equal GPUs")
        model = label(node, "nvidia.com/gpu.product") or "GPU"
        return [
            Registered(
                FoundDevice(f"{name}/gpu-{index}", index, model, units // gpus * MEMORY_UNIT_MIB),
                MAX_SHARES,
                named=False,
            )
            for index in range(gpus)
        ]

    def given(self, pod: Manifest, beside: Beside) -> Sequence[Given]:
        return [
            Given(
                memory_mib=units * MEMORY_UNIT_MIB,
                compute_percent=read(f"{COMPUTE} of pod {name_of(pod)}", count, limits.get(COMPUTE, 0))
                or None,
            )
            for limits in limits_of(pod)
            if (units := read(f"{MEMORY} of pod {name_of(pod)}", count, limits.get(MEMORY, 0)))
        ]
