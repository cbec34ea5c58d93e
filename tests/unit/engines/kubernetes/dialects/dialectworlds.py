"""GPUs, shares, a session's pod, and the objects in which a DRA driver reports GPUs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from fgpu_scheduler import Device, Share, ShareMode
from fgpuspawner.engines.kubernetes.dialects.base import Dialect, GpuRecords, PodPatch
from fgpuspawner.engines.kubernetes.dialects.counted import Cce, Mig
from fgpuspawner.engines.kubernetes.dialects.dra import Dra
from fgpuspawner.engines.kubernetes.dialects.hami import Hami
from fgpuspawner.engines.kubernetes.dialects.lease import Lease

ALL: tuple[Dialect, ...] = (Lease("lab"), Dra(), Hami(), Cce(), Mig())
BY_NAME = {dialect.name: dialect for dialect in ALL}

NODE = "gpu-1"


def gpu(index: int = 0, *, memory_mib: int = 16160, model: str = "Tesla T4") -> Device:
    uuid = f"GPU-0000000{index}-5c87-89ac-b1a6-7b53aa24b0ec"
    return Device(uuid, NODE, index, model, memory_mib, capacity_milli=1000)


def instance(index: int = 0, *, profile: str = "1g.10gb", memory_mib: int = 9856) -> Device:
    return gpu(index, memory_mib=memory_mib, model=f"NVIDIA H100 80GB HBM3 MIG {profile}")


def share(device: Device, memory_mib: int, compute_percent: int | None = None) -> Share:
    """Return a share of this memory, and of compute if that is given."""
    mode = ShareMode.MEMORY if compute_percent is None else ShareMode.MEMORY_COMPUTE
    return Share(device.uuid, 0, memory_mib, compute_percent or 0, mode)


def patch_of(dialect: Dialect, *shares: Share, of: Sequence[Device]) -> PodPatch:
    return dialect.patch(shares, of, name="fgpu-lab-7-1")


POD: Mapping[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "fgpu-lab-7-1",
        "namespace": "jupyter",
        "labels": {"fgpu.installation": "lab", "fgpu.session": "7", "fgpu.attempt": "1"},
    },
    "spec": {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
                    ]
                }
            }
        },
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": "session",
                "image": "registry.lab/pytorch:2.9",
                "args": ["jupyterhub-singleuser"],
                "env": [{"name": "LANG", "value": "C.UTF-8"}],
                "ports": [{"containerPort": 8888, "name": "server"}],
                "resources": {
                    "limits": {"cpu": "2", "memory": "4Gi"},
                    "requests": {"cpu": "2", "memory": "4Gi"},
                },
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    },
}
"""A session's pod that meets Pod Security "restricted", without a dialect's patch."""


def slice_of(devices: Sequence[Device], *, shared: bool = True) -> dict[str, Any]:
    """Return the ResourceSlice of the node, as NVIDIA's driver publishes it."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{NODE}-gpu.nvidia.com-x7k2p"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": f"gpu-{device.index}",
                    "attributes": {
                        "type": {"string": "gpu"},
                        "uuid": {"string": device.uuid},
                        "productName": {"string": device.model},
                    },
                    "capacity": {"memory": {"value": f"{device.memory_mib}Mi"}},
                    **({"allowMultipleAllocations": True} if shared else {}),
                }
                for device in devices
            ],
        },
    }


def allocated(patch: PodPatch, devices: Sequence[Device]) -> tuple[dict[str, Any], GpuRecords]:
    """Return a bound pod of a DRA session, and the objects in which its claim's GPUs are found."""
    (claim,) = (copy.deepcopy(dict(claim)) for claim in patch.claims)
    claim["metadata"]["namespace"] = POD["metadata"]["namespace"]
    results = [
        {"driver": "gpu.nvidia.com", "pool": NODE, "device": f"gpu-{device.index}", "request": "gpu-0"}
        for device in devices
    ]
    claim["status"] = {"allocation": {"devices": {"results": results}}}
    return patch.applied(POD), GpuRecords(claims=[claim], slices=[slice_of(devices)])
