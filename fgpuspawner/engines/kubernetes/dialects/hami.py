"""`hami`: HAMi's scheduler, device plugin and HAMi-core.

A node's GPUs are in an annotation of the node, and what each container of a pod got in one of the pod.
``nvidia.com/gpumem: 0`` is no limit, so it is never written. HAMi denies pods with a privileged container (as Zero to
JupyterHub's network init container is), and lets a container's variable ``CUDA_DISABLE_CONTROL`` switch its limits off.

Sources: Project-HAMi/HAMi, docs/config.md (resource names and defaults, ``deviceMemoryScaling``, ``deviceSplitCount``);
docs/develop/protocol.md (both annotations; nine or seven fields); docs/gpu-memory-factor.md (units of a pod's request);
pkg/device/nvidia/device.go and pkg/device/devices.go (``nvidia.com/use-gpuuuid``, ``nvidia.com/vgpu-mode``; since 2.7 the
node's annotation is JSON, which leaves out what is 0 or false).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

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
    annotation,
    limits_of,
    name_of,
    positive,
    read,
)

MODE = "hami-core"
"""The mode of a GPU that is shared by HAMi-core. In ``mig`` a request is rounded up to an instance."""
SWITCH = "CUDA_DISABLE_CONTROL"
"""Switches HAMi-core off."""

SCHEDULER = "hami-scheduler"
NUMBER = "nvidia.com/gpu"
MEMORY = "nvidia.com/gpumem"
CORES = "nvidia.com/gpucores"
USE_UUID = "nvidia.com/use-gpuuuid"
USE_MODE = "nvidia.com/vgpu-mode"
REGISTER = "hami.io/node-nvidia-register"
HANDSHAKE = "hami.io/node-handshake"
ALLOTTED = "hami.io/vgpu-devices-allocated"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as a node's annotation has it; memory is in MiB."""

    uuid: str
    index: int
    max_shares: int
    memory_mib: int
    model: str
    healthy: bool
    mode: str


class Hami(Dialect):
    """HAMi. ``memory_unit_mib`` is its ``memoryFactor``: requests count in it, annotations in MiB.

    Several GPUs are possible where each gives the same, because the amounts are for each of them.
    """

    name = "hami"
    memory_held_by = "HAMi"
    compute_held_by = "HAMi"
    pins_card = True

    def __init__(self, *, memory_unit_mib: int = 1) -> None:
        self._unit_mib = memory_unit_mib

    def _said(self, slices: Sequence[Slice], name: str) -> PodPatch:
        first = slices[0]
        asked = {(one.share.memory_mib, one.compute_percent) for one in slices}
        if len(asked) > 1:
            raise self.refusal(
                f"each GPU of a pod gives the same, so {len(asked)} different shares aren't possible;"
                " choose GPUs of one model"
            )
        # Never 0: that is all of the GPU.
        units = self.units(first.share.memory_mib, self._unit_mib, of="GPU memory", measure="MiB")
        limits = {NUMBER: str(len(slices)), MEMORY: str(units)}
        if first.compute_percent is not None:
            limits[CORES] = str(first.compute_percent)
        uuids = ",".join(one.device.uuid for one in slices)
        return PodPatch(
            annotations={USE_UUID: uuids, USE_MODE: MODE},
            limits=limits,
            environment={SWITCH: None},
            scheduler_name=SCHEDULER,
        )

    def capacity(self, node: Manifest, beside: Beside) -> Sequence[Registered]:
        """Return the GPUs of the node's annotation that are shared by HAMi-core; those in other modes are not ours."""
        name = name_of(node)
        text = annotation(node, REGISTER)
        if text is None:
            raise NotKnown(f"node {name} has no annotation {REGISTER}; does its device plugin run?")
        if (annotation(node, HANDSHAKE) or "").startswith("Deleted"):
            raise NotKnown(
                f"node {name}: its device plugin doesn't answer the scheduler; look at the plugin's log"
            )
        return [
            Registered(
                FoundDevice(card.uuid, card.index, card.model, card.memory_mib),
                card.max_shares,
                card.healthy,
            )
            for card in read(f"the annotation {REGISTER} of node {name}", _cards, text)
            if card.mode == MODE
        ]

    def given(self, pod: Manifest, beside: Beside) -> Sequence[Given]:
        text = annotation(pod, ALLOTTED)
        if text is not None:
            return read(f"the annotation {ALLOTTED} of pod {name_of(pod)}", _devices, text)
        if any(limits.keys() & {NUMBER, MEMORY} for limits in limits_of(pod)):
            raise NotKnown(f"the pod {name_of(pod)} has no annotation {ALLOTTED} yet: it has no GPU so far")
        return []


def _devices(text: str) -> list[Given]:
    devices = [d.split(",") for container in text.split(";") for d in container.split(":") if d]
    # In `mig` mode the instance stands in brackets behind the GPU. No cores is no limit on compute.
    return [
        Given(uuid.partition("[")[0], positive(int(memory)), int(cores) or None)
        for uuid, _, memory, cores in devices
    ]


def _cards(text: str) -> list[Card]:
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
    return [_card(position, line.split(",")) for position, line in enumerate(filter(None, text.split(":")))]


def _card(position: int, fields: list[str]) -> Card:
    uuid, shares, memory, _cores, model, _numa, health = fields[:7]
    index, mode = (int(fields[7]), fields[8]) if len(fields) > 7 else (position, MODE)
    return Card(uuid, index, int(shares), int(memory), model, health == "true", mode)
