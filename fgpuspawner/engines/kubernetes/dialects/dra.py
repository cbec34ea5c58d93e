"""`dra`: a ResourceClaim requests memory of one named GPU; libfgpu enforces it.

Sources: Kubernetes API reference, ResourceClaim and ResourceSlice of resource.k8s.io/v1, and KEP-5075, "DRA Consumable
Capacity" (``capacity.requests``, ``consumedCapacity``, ``allowMultipleAllocations``; beta and on since 1.36);
dra-driver-nvidia-gpu, demo/specs/consumable-shares and deviceinfo.go (DeviceClass and driver ``gpu.nvidia.com``,
attributes ``uuid``, ``productName``, ``type``, capacity ``memory`` in steps of 1 MiB with ``--consumable-shares=memory``,
an alpha feature that enforces nothing); NVIDIA container toolkit (``NVIDIA_VISIBLE_DEVICES=void`` in its own CDI files).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.kubernetes.dialects.base import (
    LIBFGPU,
    VISIBLE,
    AssignedGpu,
    Dialect,
    GpuRecords,
    GpuUnknown,
    Manifest,
    PodPatch,
    Slice,
    mebibytes,
    name_of,
    positive,
    read,
)

DRIVER = "gpu.nvidia.com"


class Dra(Dialect):
    """Claims on GPUs of NVIDIA's DRA driver."""

    name = "dra"
    pins_card = True
    memory_held_by = LIBFGPU
    compute_held_by = LIBFGPU

    def _patch(self, slices: Sequence[Slice], name: str) -> PodPatch:
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [_request(f"gpu-{n}", one) for n, one in enumerate(slices)]}},
        }
        # The claim's GPU is added to this; an image that says "all" would get every GPU without it.
        return PodPatch(claims=(claim,), environment={VISIBLE: "void"})

    def capacity(self, node: Manifest, records: GpuRecords) -> Sequence[FoundDevice]:
        """Return the GPUs of the driver's slices for the node. Reads ``slices``."""
        name = name_of(node)
        mine = [
            s for s in records.slices if _spec(s).get("driver") == DRIVER and _spec(s).get("nodeName") == name
        ]
        if not mine:
            raise GpuUnknown(f"node {name} has no ResourceSlice of {DRIVER}; does its DRA driver run?")
        gpus = [
            d for s in _newest(mine, name) for d in _spec(s).get("devices") or () if _text(d, "type") == "gpu"
        ]
        what = f"the ResourceSlice of node {name}"
        found = [read(what, lambda pair: _device(*pair), pair) for pair in enumerate(gpus)]
        return [device for device, gpu in zip(found, gpus, strict=True) if not _is_tainted(gpu)]

    def assigned(self, pod: Manifest, records: GpuRecords) -> Sequence[AssignedGpu]:
        """Return the GPUs allocated to the pod's claims. Reads ``claims`` and ``slices``."""
        wanted = [_claim_of(pod, reference) for reference in pod["spec"].get("resourceClaims") or ()]
        space = pod["metadata"].get("namespace")
        by_name = {name_of(c): c for c in records.claims if c["metadata"].get("namespace") == space}
        return [gpu for name in wanted for gpu in _allocated(name, by_name.get(name), records.slices)]


def _request(name: str, one: Slice) -> dict[str, Any]:
    # A JSON string is a CEL string, so a UUID cannot be read as an expression.
    is_it = f'device.attributes["{DRIVER}"].uuid == {json.dumps(one.device.uuid)}'
    return {
        "name": name,
        "exactly": {
            "deviceClassName": DRIVER,
            "allocationMode": "ExactCount",
            "count": 1,
            "selectors": [{"cel": {"expression": is_it}}],
            "capacity": {"requests": {"memory": f"{one.share.memory_mib}Mi"}},
        },
    }


def _spec(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest.get("spec") or {}
    return spec


def _text(device: Manifest, attribute: str) -> str | None:
    found = (device.get("attributes") or {}).get(attribute) or {}
    return found.get("string")


def _newest(slices: Sequence[Manifest], node: str) -> list[Manifest]:
    """Return the slices of each pool's newest generation; by the API's rules older ones are out of date."""
    pools = defaultdict(list)
    for one in slices:
        pools[_spec(one)["pool"]["name"]].append(one)
    newest = []
    for pool, ones in pools.items():
        generation = max(_spec(s)["pool"]["generation"] for s in ones)
        current = [s for s in ones if _spec(s)["pool"]["generation"] == generation]
        if len(current) != _spec(current[0])["pool"]["resourceSliceCount"]:
            raise GpuUnknown(f"node {node}: not all ResourceSlices of the pool {pool} are there yet")
        newest += current
    return newest


def _device(position: int, device: Manifest) -> FoundDevice:
    numbered = re.fullmatch(r"gpu-(\d+)", device["name"])
    uuid, model = device["attributes"]["uuid"]["string"], device["attributes"]["productName"]["string"]
    memory_mib = positive(mebibytes(device["capacity"]["memory"]["value"]))
    return FoundDevice(uuid, int(numbered[1]) if numbered else position, model, memory_mib)


def _is_tainted(device: Manifest) -> bool:
    return any(t.get("effect") in {"NoSchedule", "NoExecute"} for t in device.get("taints") or ())


def _claim_of(pod: Manifest, reference: Manifest) -> str:
    statuses = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    made = {s["name"]: s.get("resourceClaimName") for s in statuses}
    name = reference.get("resourceClaimName") or made.get(reference["name"])
    if name is None:
        raise GpuUnknown(f"the claim {reference['name']} of pod {name_of(pod)} isn't made yet")
    return str(name)


def _allocated(name: str, claim: Manifest | None, slices: Sequence[Manifest]) -> list[AssignedGpu]:
    allocation = ((claim or {}).get("status") or {}).get("allocation")
    if allocation is None:
        raise GpuUnknown(f"the ResourceClaim {name} isn't allocated yet")
    results = (allocation.get("devices") or {}).get("results") or ()
    return [AssignedGpu(_uuid_of(name, r, slices)) for r in results if r["driver"] == DRIVER]


def _uuid_of(claim: str, result: Manifest, slices: Sequence[Manifest]) -> str:
    uuids = [
        _text(device, "uuid")
        for s in slices
        if _spec(s).get("driver") == DRIVER and _spec(s)["pool"]["name"] == result["pool"]
        for device in _spec(s).get("devices") or ()
        if device["name"] == result["device"]
    ]
    if not uuids or uuids[-1] is None:
        raise GpuUnknown(f"the GPU {result['device']} of the ResourceClaim {claim} is in no ResourceSlice")
    return uuids[-1]
