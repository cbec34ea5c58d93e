"""`mig`: a pod gets whole MIG instances of one profile. The hardware holds memory and compute.

The device plugin chooses the instance: a pod is held to its node and profile. The plugin must run with the MIG strategy
"mixed", so that each profile is a resource of its own.

Sources: NVIDIA k8s-device-plugin, README, "MIG Support in Kubernetes", and its resource names
(``nvidia.com/mig-PROFILE``, ``+`` written as ``.``); release notes of 0.7.0 (a container can use one resource type at a
time); NVIDIA GPU feature discovery, "MIG 'mixed' strategy" (``nvidia.com/mig-PROFILE.memory`` in MiB).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fgpu_scheduler import Device, FoundDevice
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

PREFIX = "nvidia.com/mig-"
_PROFILE = re.compile(r"\bMIG[ -](\d+g\.\d+gb(?:[+.-][a-z.]+)?)$")


class Mig(Dialect):
    """Instances that the cluster's administrator has made."""

    name = "mig"
    pins_card = False
    whole_only = True
    memory_held_by = "hardware"
    compute_held_by = "hardware"

    def __init__(self, *, runtime_class: str | None = None) -> None:
        self._runtime_class = runtime_class

    def _said(self, slices: Sequence[Slice], name: str) -> PodPatch:
        resources = {self._resource(one.device) for one in slices}
        for share, device in slices:
            if share.memory_mib != device.memory_mib:
                raise self.refusal(
                    f"a pod gets whole MIG instances, so {share.memory_mib} MiB isn't possible;"
                    f" choose all {device.memory_mib} MiB of the instance"
                )
        if len(resources) > 1:
            shown = " and ".join(sorted(resources))
            raise self.refusal(
                f"a pod gets MIG instances of one profile, so {shown} together aren't possible; choose one"
            )
        (resource,) = resources
        return PodPatch(limits={resource: str(len(slices))}, runtime_class=self._runtime_class)

    def _resource(self, device: Device) -> str:
        profile = _PROFILE.search(device.model)
        if profile is None:
            raise self.refusal(
                f"a pod gets MIG instances, and {device.model} is none;"
                ' choose a GPU whose model ends in its profile, as in "MIG 1g.10gb"'
            )
        return PREFIX + profile[1].replace("+", ".")

    def capacity(self, node: Manifest, beside: Beside) -> Sequence[Registered]:
        """Return the instances that the device plugin registers on the node: each takes one session."""
        name = name_of(node)
        resources = (node.get("status") or {}).get("allocatable")
        if resources is None:
            raise NotKnown(f"node {name} doesn't say what it has yet")
        profiles = sorted(key for key in resources if key.startswith(PREFIX))
        found = [(p, i) for p in profiles for i in range(read(f"{p} of node {name}", count, resources[p]))]
        return [
            Registered(self._instance(node, profile, of_profile, index), 1, named=False, resource=profile)
            for index, (profile, of_profile) in enumerate(found)
        ]

    def _instance(self, node: Manifest, resource: str, of_profile: int, index: int) -> FoundDevice:
        name, profile = name_of(node), resource.removeprefix(PREFIX)
        memory = label(node, f"{resource}.memory")
        if memory is None:
            raise NotKnown(f"node {name} has no label {resource}.memory; does GPU feature discovery run?")
        product = label(node, "nvidia.com/gpu.product") or "GPU"
        return FoundDevice(
            f"{name}/mig-{profile}-{of_profile}",
            index,
            f"{product} MIG {profile}",
            read(f"{resource}.memory of node {name}", count, memory),
        )

    def given(self, pod: Manifest, beside: Beside) -> Sequence[Given]:
        wanted = [(key, value) for limits in limits_of(pod) for key, value in sorted(limits.items())]
        return [
            Given(whole=resource)
            for resource, number in wanted
            if resource.startswith(PREFIX)
            for _ in range(read(f"{resource} of pod {name_of(pod)}", count, number))
        ]
