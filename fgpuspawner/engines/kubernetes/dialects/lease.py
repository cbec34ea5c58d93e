"""`lease`: pods of ours take whole GPUs from NVIDIA's device plugin; libfgpu makes the fractions. The default.

One lease pod for each GPU asks for ``nvidia.com/gpu: 1``, so that the cluster counts the GPU as used, and is asked which
GPU it got. A session's pod asks for none: it gets the GPU by its UUID, through the NVIDIA runtime.

Sources: NVIDIA k8s-device-plugin, README (``nvidia.com/gpu``, RuntimeClass ``nvidia``); NVIDIA container toolkit,
"Specialized Configurations" (``NVIDIA_VISIBLE_DEVICES`` takes UUIDs, and must be accepted from unprivileged
containers: ``accept-nvidia-visible-devices-envvar-when-unprivileged``, on unless switched off).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.kubernetes.dialects.base import (
    LIBFGPU,
    TOLERATIONS,
    UUID,
    VISIBLE,
    Beside,
    Dialect,
    Given,
    Manifest,
    NotKnown,
    PodPatch,
    Registered,
    Slice,
    label,
    name_of,
    read,
)

LEASE_LABEL = "fgpu.lease"
"""On each lease pod, with the installation that it leases for."""

ASK = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
"""The command in a lease pod that says which GPU it got."""


class NotAsked(NotKnown):
    """A lease pod has not said yet which GPU it has. The Hub asks it as soon as it runs."""

    code = "not_asked"


class Lease(Dialect):
    """GPUs that pods of ``installation`` hold for its sessions."""

    name = "lease"
    pins_card = True
    memory_held_by = LIBFGPU
    compute_held_by = LIBFGPU

    def __init__(self, installation: str, *, runtime_class: str = "nvidia", priority_class: str = "") -> None:
        self._installation = installation
        self._runtime_class = runtime_class
        self._priority_class = priority_class

    def _said(self, slices: Sequence[Slice], name: str) -> PodPatch:
        return PodPatch(
            environment={VISIBLE: ",".join(one.device.uuid for one in slices)},
            runtime_class=self._runtime_class,
        )

    def capacity(self, node: Manifest, beside: Beside) -> Sequence[Registered]:
        """Return the GPUs that running lease pods on the node hold. Needs ``pods``, and what those ``told``."""
        leases = [
            pod for pod in beside.pods if self._is_lease(pod) and pod["spec"].get("nodeName") == name_of(node)
        ]
        # In a container the first GPU is 0, whichever of the node's it is: the lease's own number tells them apart.
        found = {number_of(pod): told_by(name_of(pod), beside.told.get(name_of(pod))) for pod in leases}
        return [Registered(replace(device, index=n)) for n, device in sorted(found.items())]

    def given(self, pod: Manifest, beside: Beside) -> Sequence[Given]:
        variables = {v["name"]: v.get("value", "") for v in pod["spec"]["containers"][0].get("env") or ()}
        return [Given(uuid=name) for name in variables.get(VISIBLE, "").split(",") if UUID.fullmatch(name)]

    def _is_lease(self, pod: Manifest) -> bool:
        return (
            label(pod, LEASE_LABEL) == self._installation
            and (pod.get("status") or {}).get("phase") == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        )

    def lease_pod(self, *, name: str, node: str, image: str, command: Sequence[str]) -> dict[str, Any]:
        """Return the pod that leases one GPU of a node: ``command`` has to sleep, and ``image`` needs nothing else.

        The NVIDIA runtime adds the driver and nvidia-smi. One that waits for a GPU holds none, and is not counted.
        """
        gpu = {"nvidia.com/gpu": "1"}
        container = {
            "name": "lease",
            "image": image,
            "command": list(command),
            "env": [{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"}],
            # It sleeps. But held to that little it would take the better part of a minute to say which GPU it has.
            "resources": {
                "limits": {"cpu": "1", "memory": "256Mi", **gpu},
                "requests": {"cpu": "10m", "memory": "64Mi", **gpu},
            },
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {LEASE_LABEL: self._installation}},
            "spec": {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [on_node]}
                    }
                },
                "automountServiceAccountToken": False,
                "containers": [container],
                "enableServiceLinks": False,
                **({"priorityClassName": self._priority_class} if self._priority_class else {}),
                "restartPolicy": "Always",
                "runtimeClassName": self._runtime_class,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65534,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "terminationGracePeriodSeconds": 1,
                "tolerations": [dict(one) for one in TOLERATIONS],
            },
        }


def number_of(pod: Manifest) -> int:
    """Return the number of a lease pod among those of its node, with which its name ends."""
    return int(name_of(pod).rpartition("-")[2])


def told_by(pod: str, answer: str | None) -> FoundDevice:
    """Return the GPU that a lease pod has, by its answer to `ASK`.

    Raises:
        NotAsked: it has not answered.
        NotKnown: not with one GPU.
    """
    if answer is None:
        raise NotAsked(f"the lease pod {pod} hasn't said which GPU it has")

    def one(text: str) -> FoundDevice:
        (line,) = text.strip().splitlines()
        index, uuid, model, memory = (part.strip() for part in line.split(","))
        if not UUID.fullmatch(uuid):
            raise ValueError(uuid)
        return FoundDevice(uuid, int(index), model, int(memory))

    return read(f"what the lease pod {pod} said of its GPU", one, answer)
