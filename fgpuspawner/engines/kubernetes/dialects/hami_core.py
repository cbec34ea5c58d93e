"""What HAMi and Volcano have in common: HAMi-core in the session holds memory and compute, as their plugins tell it.

Both register a node's GPUs in an annotation of the node, and write into one of the pod what each of its containers got.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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
"""Switches HAMi-core off: with HAMi if it is true, with Volcano's plugin if a pod has it at all, even empty."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as a node's annotation has it; memory is in the plugin's own units."""

    uuid: str
    index: int
    max_shares: int
    memory: int
    model: str
    healthy: bool
    mode: str


class HamiCoreDialect(Dialect):
    """Shares that HAMi-core holds: memory is counted in units of ``memory_unit_mib``, the plugin's memory factor.

    Several GPUs are possible where each gives the same, because the amounts are for each of them.
    """

    pins_card = True

    scheduler: ClassVar[str]
    number: ClassVar[str]
    memory: ClassVar[str]
    cores: ClassVar[str]
    use_uuid: ClassVar[str]
    use_mode: ClassVar[str]
    register: ClassVar[str]
    handshake: ClassVar[str]
    allotted: ClassVar[str]

    def __init__(self, *, memory_unit_mib: int = 1) -> None:
        self._unit_mib = memory_unit_mib

    @abstractmethod
    def cards(self, text: str) -> list[Card]:
        """Return the GPUs that a node's annotation lists.

        Raises:
            ValueError and others: it is no such list.
        """

    @abstractmethod
    def allotted_mib(self, memory: int) -> int:
        """Return in MiB what a pod's annotation says of its memory."""

    @abstractmethod
    def registered_mib(self, memory: int) -> int:
        """Return in MiB what a node's annotation says of a GPU's memory."""

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
        limits = {self.number: str(len(slices)), self.memory: str(units)}
        if first.compute_percent is not None:
            limits[self.cores] = str(first.compute_percent)
        uuids = ",".join(one.device.uuid for one in slices)
        return PodPatch(
            annotations={self.use_uuid: uuids, self.use_mode: MODE},
            limits=limits,
            environment={SWITCH: None},
            scheduler_name=self.scheduler,
        )

    def capacity(self, node: Manifest, beside: Beside) -> Sequence[Registered]:
        """Return the GPUs of the node's annotation that are shared by HAMi-core; those in other modes are not ours."""
        name = name_of(node)
        text = annotation(node, self.register)
        if text is None:
            raise NotKnown(f"node {name} has no annotation {self.register}; does its device plugin run?")
        if (annotation(node, self.handshake) or "").startswith("Deleted"):
            raise NotKnown(
                f"node {name}: its device plugin doesn't answer the scheduler; look at the plugin's log"
            )
        return [
            Registered(
                FoundDevice(card.uuid, card.index, card.model, self.registered_mib(card.memory)),
                card.max_shares,
                card.healthy,
            )
            for card in read(f"the annotation {self.register} of node {name}", self.cards, text)
            if card.mode == MODE
        ]

    def given(self, pod: Manifest, beside: Beside) -> Sequence[Given]:
        text = annotation(pod, self.allotted)
        if text is not None:
            return read(f"the annotation {self.allotted} of pod {name_of(pod)}", self._devices, text)
        if any(limits.keys() & {self.number, self.memory} for limits in limits_of(pod)):
            raise NotKnown(
                f"the pod {name_of(pod)} has no annotation {self.allotted} yet: it has no GPU so far"
            )
        return []

    def _devices(self, text: str) -> list[Given]:
        devices = [d.split(",") for container in text.split(";") for d in container.split(":") if d]
        # In `mig` mode the instance stands in brackets behind the GPU. No cores is no limit on compute.
        return [
            Given(uuid.partition("[")[0], self.allotted_mib(positive(int(memory))), int(cores) or None)
            for uuid, _, memory, cores in devices
        ]
