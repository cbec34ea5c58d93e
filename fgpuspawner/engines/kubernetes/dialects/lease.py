"""`lease`: pods of ours take whole GPUs from NVIDIA's device plugin; libfgpu makes the fractions. The default.

One lease pod for each GPU asks for ``nvidia.com/gpu: 1``, so that the cluster counts the GPU as used, and is asked which
GPU it got. A session's pod asks for none, because a device plugin would give it a whole GPU. It names the lease's GPU, in
the way that the lease got it:

1. ``variable``: the device plugin set NVIDIA_VISIBLE_DEVICES of the lease to a UUID, and the NVIDIA runtime reads that.
2. ``cdi``: it named a device of its own CDI specification (the GPU operator's default since 25.10). The NVIDIA runtime
   takes such a name in NVIDIA_VISIBLE_DEVICES. A bare UUID fails there: it is looked for in the specification
   "management.nvidia.com/gpu", which only has "all".
3. ``nri``: as 2, where there is no RuntimeClass. The toolkit's NRI plugin reads the name in an annotation of the pod.

Sources: NVIDIA k8s-device-plugin, README (``nvidia.com/gpu``; device list strategies ``envvar``, ``cdi-cri``; kind
``k8s.device-plugin.nvidia.com/gpu``); NVIDIA GPU operator, "Container Device Interface and Node Resource Interface Plugin
Support", issues 1994 and 2186; NVIDIA container toolkit, internal/modifier/cdi.go (qualified names in
NVIDIA_VISIBLE_DEVICES; ``accept-nvidia-visible-devices-envvar-when-unprivileged``, on unless switched off), the NRI
plugin's plugin.go (``nvidia.cdi.k8s.io/container.NAME``), issue 1239.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.kubernetes.dialects.base import (
    CONTAINER,
    LIBFGPU,
    TOLERATIONS,
    UUID,
    VISIBLE,
    AssignedGpu,
    Dialect,
    GpuRecords,
    GpuUnknown,
    Manifest,
    PodPatch,
    Slice,
    only_on,
    positive,
    read,
    sleeping_pod,
)

LEASE_LABEL = "fgpu.lease"
"""On each lease pod, with the installation that it leases for."""

GIVEN_AS = "given as:"
ASK = (
    "/bin/sh",
    "-c",
    "nvidia-smi --query-gpu=index,uuid,name,memory.total --format=csv,noheader,nounits"
    f' && echo "{GIVEN_AS}${VISIBLE}"',
)
"""The command in a lease pod that says which GPU it got, and by which value of NVIDIA_VISIBLE_DEVICES."""

AUTO, VARIABLE, CDI, NRI = INJECTIONS = ("auto", "variable", "cdi", "nri")
"""How a session's pod names its GPU; "auto" is as its lease got it."""
KIND = "k8s.device-plugin.nvidia.com/gpu"
"""The CDI devices of NVIDIA's device plugin, which are named by UUID."""
NRI_CONTAINER = "nvidia.cdi.k8s.io/container."


class LeaseUnanswered(GpuUnknown):
    """A lease pod has not reported its GPU yet. The Hub asks it as soon as it runs."""

    code = "not_asked"


class Lease(Dialect):
    """GPUs that pods of ``installation`` hold for its sessions."""

    name = "lease"
    pins_card = True
    held_by = LIBFGPU

    def __init__(
        self,
        installation: str,
        *,
        runtime_class: str = "nvidia",
        priority_class: str = "",
        injection: str = AUTO,
        measures: bool = False,
    ) -> None:
        self._installation = installation
        self._runtime_class = runtime_class
        self._priority_class = priority_class
        self._injection = injection
        #: Whether lease pods see the processes of their node, which NVML names.
        self.measures = measures
        self.given_as: dict[str, str] = {}
        """NVIDIA_VISIBLE_DEVICES in the lease that holds a GPU, by the GPU's UUID."""

    def _patch(self, slices: Sequence[Slice], name: str) -> PodPatch:
        uuids = [one.device.uuid for one in slices]
        way = self.way_of(uuids[0])
        devices = ",".join(uuids if way == VARIABLE else [f"{KIND}={uuid}" for uuid in uuids])
        if way == NRI:
            return PodPatch(
                annotations={f"{NRI_CONTAINER}{CONTAINER}": devices}, environment={VISIBLE: "void"}
            )
        runtime = {"runtimeClassName": self._runtime_class} if self._runtime_class else {}
        return PodPatch(environment={VISIBLE: devices}, spec=runtime)

    def way_of(self, uuid: str) -> str:
        """Return how a session's pod names a GPU: as the setting says, or so that it gets it as the GPU's lease did."""
        if self._injection != AUTO:
            return self._injection
        given = self.given_as.get(uuid)
        if given is not None and UUID.match(given):
            return VARIABLE
        if not self._runtime_class:
            return NRI
        # The GPUs of c.FGPU.nodes may have no lease.
        return VARIABLE if given is None else CDI

    def capacity(self, node: Manifest, records: GpuRecords) -> Sequence[FoundDevice]:
        """Return the GPUs that the node's lease pods hold. Reads ``leases``."""
        # In a container every GPU has index 0: the number at the end of the lease's name tells them apart.
        found = {
            int(name.rpartition("-")[2]): gpu_of(name, answer) for name, answer in records.leases.items()
        }
        return [replace(device, index=n) for n, device in sorted(found.items())]

    def assigned(self, pod: Manifest, records: GpuRecords) -> Sequence[AssignedGpu]:
        variables = (v for c in pod["spec"]["containers"] for v in c.get("env") or () if v["name"] == VISIBLE)
        notes = (pod["metadata"].get("annotations") or {}).items()
        said = [str(v.get("value", "")) for v in variables]
        said += [value for key, value in notes if key.startswith(NRI_CONTAINER)]
        return [AssignedGpu(uuid) for uuid in UUID.findall(",".join(said))]

    def lease_pod(self, *, name: str, node: str, image: str) -> dict[str, Any]:
        """Return the pod that leases one GPU of a node; ``image`` needs a shell.

        NVIDIA's toolkit adds the driver and nvidia-smi. One that waits for a GPU holds none, and is not counted.
        """
        gpu = {"nvidia.com/gpu": "1"}
        container = {
            "name": "lease",
            "image": image,
            "env": [{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"}],
            # It sleeps, but with a limit as low as its requests nvidia-smi takes most of a minute.
            "resources": {
                "limits": {"cpu": "1", "memory": "256Mi", **gpu},
                "requests": {"cpu": "10m", "memory": "64Mi", **gpu},
            },
        }
        where: dict[str, Any] = {
            "affinity": only_on(node),
            "tolerations": [dict(one) for one in TOLERATIONS],
            "hostPID": self.measures,
            "priorityClassName": self._priority_class,
            "runtimeClassName": self._runtime_class,
        }
        where = {key: value for key, value in where.items() if value}
        return sleeping_pod(name, {LEASE_LABEL: self._installation}, container, where)


def given_as(answer: str) -> str:
    """Return the value of NVIDIA_VISIBLE_DEVICES that an answer to `ASK` names; empty if there is none."""
    lines = answer.splitlines()
    return next((line.removeprefix(GIVEN_AS) for line in lines if line.startswith(GIVEN_AS)), "")


def gpu_of(pod: str, answer: str | None) -> FoundDevice:
    """Return the GPU of a lease pod, by its answer to `ASK`.

    Raises:
        LeaseUnanswered: there is no answer.
        GpuUnknown: the answer is not one GPU.
    """
    if answer is None:
        raise LeaseUnanswered(f"the lease pod {pod} hasn't said which GPU it has")

    def one(text: str) -> FoundDevice:
        (line,) = (line for line in text.strip().splitlines() if not line.startswith(GIVEN_AS))
        index, uuid, model, memory = (part.strip() for part in line.split(","))
        if not UUID.fullmatch(uuid):
            raise ValueError(uuid)
        return FoundDevice(uuid, int(index), model, positive(int(memory)))

    return read(f"what the lease pod {pod} said of its GPU", one, answer)
