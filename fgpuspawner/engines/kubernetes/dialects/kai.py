"""`kai`: KAI-Scheduler counts memory of one GPU, and from 0.17 on holds it with its ``hamicore`` plugin.

KAI chooses the GPU on the node. A pod of its own reserves that GPU, and says its UUID once it runs; the pods that share
it carry the same ``runai-gpu-group``. Whole GPUs are asked for as such. libfgpu has to be told the GPU before the pod is
made, so it cannot hold these sessions.

What holds memory rounds a share up to a hundredth of the GPU. Nothing holds compute.

Sources: KAI-Scheduler, docs/gpu-sharing/README.md, gpu-memory.yaml and hami/README.md (annotation ``gpu-memory`` in MiB
without a unit, label ``kai.scheduler/queue``, ``schedulerName: kai-scheduler``, precision of two decimals);
pkg/common/constants (``runai-gpu-group``); pkg/resourcereservation (``run.ai/reserve_for_gpu_index`` is a UUID);
pkg/scheduler/api/node_info (a GPU's memory is the node's label ``nvidia.com/gpu.memory``, in older releases rounded down
to 100 MiB); NVIDIA GPU feature discovery, "Generated Labels".
"""

from __future__ import annotations

from collections.abc import Sequence

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.kubernetes.dialects.base import (
    UUID,
    Beside,
    Dialect,
    Given,
    Manifest,
    NotKnown,
    PodPatch,
    Registered,
    Slice,
    annotation,
    label,
    limits_of,
    name_of,
    read,
)
from fgpuspawner.engines.kubernetes.quantity import count

MEMORY = "gpu-memory"
FRACTION = "gpu-fraction"
QUEUE = "kai.scheduler/queue"
GROUP = "runai-gpu-group"
RESERVED = "run.ai/reserve_for_gpu_index"
GPU = "nvidia.com/gpu"
GRAIN_MIB = 100
"""Older releases count a GPU's memory in these, so that the last share would never fit: they are what is given away."""


class Kai(Dialect):
    """Memory of GPUs that KAI-Scheduler shares out, through one of its queues."""

    name = "kai"
    pins_card = False
    tells_card = True
    memory_held_by = "KAI from 0.17"
    compute_held_by = "nobody"

    def __init__(self, queue: str) -> None:
        self._queue = queue

    def _said(self, slices: Sequence[Slice], name: str) -> PodPatch:
        labels, scheduler = {QUEUE: self._queue}, "kai-scheduler"
        if all(one.whole for one in slices):
            return PodPatch(labels=labels, limits={GPU: str(len(slices))}, scheduler_name=scheduler)
        if len(slices) > 1:
            raise self.refusal(
                f"a pod has a share of one GPU or whole GPUs, so {len(slices)} shares aren't possible;"
                " choose less than 1 GPU, or whole GPUs"
            )
        memory = {MEMORY: str(slices[0].share.memory_mib)}
        return PodPatch(annotations=memory, labels=labels, scheduler_name=scheduler)

    def card(self, pod: Manifest) -> str | None:
        return label(pod, GROUP)

    def capacity(self, node: Manifest, beside: Beside) -> Sequence[Registered]:
        """Return the GPUs that GPU feature discovery writes on the node: all of one model."""
        name = name_of(node)
        number, memory = label(node, "nvidia.com/gpu.count"), label(node, "nvidia.com/gpu.memory")
        if number is None or memory is None:
            raise NotKnown(
                f"node {name} has no labels nvidia.com/gpu.count and nvidia.com/gpu.memory; does GPU feature"
                " discovery run?"
            )
        gpus = read(f"nvidia.com/gpu.count of node {name}", count, number)
        memory_mib = read(f"nvidia.com/gpu.memory of node {name}", count, memory)
        model = label(node, "nvidia.com/gpu.product") or "GPU"
        counted_mib = memory_mib - memory_mib % GRAIN_MIB
        return [
            Registered(FoundDevice(f"{name}/gpu-{index}", index, model, counted_mib), named=False)
            for index in range(gpus)
        ]

    def given(self, pod: Manifest, beside: Beside) -> Sequence[Given]:
        """Return what the pod was given. Needs ``pods``, KAI's own among them, to say of which GPU."""
        if annotation(pod, FRACTION) is not None:
            raise NotKnown(f"the pod {name_of(pod)} has a fraction of a GPU, and not an amount of memory")
        memory = annotation(pod, MEMORY)
        if memory is None and label(pod, GROUP) is not None:
            # KAI's own, which reserves the GPU for those that share it.
            return []
        whole = sum(
            read(f"{GPU} of pod {name_of(pod)}", count, limits.get(GPU, 0)) for limits in limits_of(pod)
        )
        if whole:
            return [Given(whole=GPU)] * whole
        if memory is None:
            return []
        memory_mib = read(f"{MEMORY} of pod {name_of(pod)}", count, memory)
        group = label(pod, GROUP)
        found = [
            annotation(p, RESERVED) for p in beside.pods if group is not None and label(p, GROUP) == group
        ]
        uuids = [uuid for uuid in found if uuid is not None and UUID.fullmatch(uuid)]
        if not uuids:
            raise NotKnown(f"KAI hasn't said yet which GPU the pod {name_of(pod)} has")
        return [Given(uuid=uuids[0], memory_mib=memory_mib)]
