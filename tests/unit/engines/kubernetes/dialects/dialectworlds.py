"""Shares, a session's pod, and clusters that bind it and note what it got, as their own sources say."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fgpu_scheduler import Device, Share, ShareMode
from fgpuspawner.engines.kubernetes.dialects import (
    Beside,
    Cce,
    Dialect,
    Dra,
    Hami,
    Lease,
    Mig,
    PodPatch,
)
from fgpuspawner.engines.kubernetes.quantity import count, mebibytes

ALL: tuple[Dialect, ...] = (Lease("lab"), Dra(), Hami(), Cce(), Mig())
BY_NAME = {dialect.name: dialect for dialect in ALL}

NODE = "gpu-1"


def gpu(index: int = 0, *, memory_mib: int = 16160, model: str = "Tesla T4") -> Device:
    uuid = f"GPU-0000000{index}-5c87-89ac-b1a6-7b53aa24b0ec"
    return Device(uuid, NODE, index, model, memory_mib, capacity_milli=1000)


def instance(index: int = 0, *, profile: str = "1g.10gb", memory_mib: int = 9856) -> Device:
    return gpu(index, memory_mib=memory_mib, model=f"NVIDIA H100 80GB HBM3 MIG {profile}")


def share(device: Device, memory_mib: int, compute_percent: int | None = None) -> Share:
    """Return a share of so much memory, and of compute if that is given."""
    mode = ShareMode.MEMORY if compute_percent is None else ShareMode.MEMORY_COMPUTE
    return Share(device.uuid, 0, memory_mib, compute_percent or 0, mode)


def said(dialect: Dialect, *shares: Share, of: Sequence[Device]) -> PodPatch:
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
"""A session's pod that Pod Security's level "restricted" takes, before a dialect adds to it."""


def bound(dialect: Dialect, patch: PodPatch, devices: Sequence[Device]) -> tuple[dict[str, Any], Beside]:
    """Return a pod as it is once its cluster has bound it, with what stands beside it."""
    pod = json.loads(json.dumps(patch.applied(POD)))
    pod["spec"]["nodeName"] = NODE
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    notes = pod["metadata"].setdefault("annotations", {})
    match dialect.name:
        case "hami":
            notes["hami.io/vgpu-devices-allocated"] = _allotted(
                notes["nvidia.com/use-gpuuuid"],
                limits,
                "nvidia.com/gpu",
                "nvidia.com/gpumem",
                "nvidia.com/gpucores",
            )
        case "dra":
            return pod, Beside(
                claims=[_allocated(claim, devices) for claim in patch.claims], slices=[slice_of(devices)]
            )
    return pod, Beside()


def _allotted(uuids: str, limits: Mapping[str, str], number: str, memory: str, cores: str) -> str:
    each = f"NVIDIA,{count(limits[memory])},{count(limits.get(cores, 0))}:"
    given = [f"{uuid},{each}" for uuid in uuids.split(",")[: count(limits[number])]]
    # A container that asks for no GPU has an empty entry.
    return ";" + "".join(given) + ";"


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


def _allocated(claim: Mapping[str, Any], devices: Sequence[Device]) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(dict(claim))
    made["metadata"]["namespace"] = POD["metadata"]["namespace"]
    results = []
    for request in made["spec"]["devices"]["requests"]:
        (selector,) = request["exactly"]["selectors"]
        (device,) = [d for d in devices if f'.uuid == "{d.uuid}"' in selector["cel"]["expression"]]
        memory = request["exactly"]["capacity"]["requests"]["memory"]
        # The API writes quantities in its own way.
        shown = f"{mebibytes(memory) // 1024}Gi" if mebibytes(memory) % 1024 == 0 else memory
        results.append(
            {
                "driver": "gpu.nvidia.com",
                "pool": NODE,
                "device": f"gpu-{device.index}",
                "request": request["name"],
                "consumedCapacity": {"memory": shown},
            }
        )
    made["status"] = {"allocation": {"devices": {"results": results}}}
    return made
