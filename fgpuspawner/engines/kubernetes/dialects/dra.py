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
CLOSING = {"NoSchedule", "NoExecute"}


class Dra(Dialect):
    """Claims on GPUs of NVIDIA's DRA driver."""

    name = "dra"
    pins_card = True
    held_by = LIBFGPU

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
        specs = [_spec(s) for s in records.slices]
        mine = [spec for spec in specs if (spec.get("driver"), spec.get("nodeName")) == (DRIVER, name)]
        if not mine:
            raise GpuUnknown(f"node {name} has no ResourceSlice of {DRIVER}; does its DRA driver run?")
        devices = [device for spec in _newest(mine, name) for device in spec.get("devices") or ()]
        gpus = enumerate(device for device in devices if _text(device, "type") == "gpu")
        return [
            read(f"the ResourceSlice of node {name}", lambda pair: _device(*pair), (n, gpu))
            for n, gpu in gpus
            if not {taint.get("effect") for taint in gpu.get("taints") or ()} & CLOSING
        ]

    def assigned(self, pod: Manifest, records: GpuRecords) -> Sequence[AssignedGpu]:
        """Return the GPUs allocated to the pod's claims. Reads ``claims`` and ``slices``."""
        space, status = pod["metadata"].get("namespace"), pod.get("status") or {}
        made = {s["name"]: s.get("resourceClaimName") for s in status.get("resourceClaimStatuses") or ()}
        claims = {name_of(c): c for c in records.claims if c["metadata"].get("namespace") == space}
        uuids = {
            (_spec(s)["pool"]["name"], device["name"]): _text(device, "uuid")
            for s in records.slices
            if _spec(s).get("driver") == DRIVER
            for device in _spec(s).get("devices") or ()
        }
        found: list[AssignedGpu] = []
        for reference in pod["spec"].get("resourceClaims") or ():
            name = reference.get("resourceClaimName") or made.get(reference["name"])
            if name is None:
                raise GpuUnknown(f"the claim {reference['name']} of pod {name_of(pod)} isn't made yet")
            allocation = (claims.get(name, {}).get("status") or {}).get("allocation")
            if allocation is None:
                raise GpuUnknown(f"the ResourceClaim {name} isn't allocated yet")
            results = (allocation.get("devices") or {}).get("results") or ()
            for pool, device in ((r["pool"], r["device"]) for r in results if r["driver"] == DRIVER):
                uuid = uuids.get((pool, device))
                if uuid is None:
                    raise GpuUnknown(f"the GPU {device} of the ResourceClaim {name} is in no ResourceSlice")
                found.append(AssignedGpu(uuid))
        return found


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


def _newest(specs: Sequence[Manifest], node: str) -> list[Manifest]:
    """Return the slices of each pool's newest generation; by the API's rules older ones are out of date."""
    newest: list[Manifest] = []
    for pool in dict.fromkeys(spec["pool"]["name"] for spec in specs):
        own = [spec for spec in specs if spec["pool"]["name"] == pool]
        generation = max(spec["pool"]["generation"] for spec in own)
        current = [spec for spec in own if spec["pool"]["generation"] == generation]
        if len(current) != current[0]["pool"]["resourceSliceCount"]:
            raise GpuUnknown(f"node {node}: not all ResourceSlices of the pool {pool} are there yet")
        newest += current
    return newest


def _device(position: int, device: Manifest) -> FoundDevice:
    numbered = re.fullmatch(r"gpu-(\d+)", device["name"])
    uuid, model = device["attributes"]["uuid"]["string"], device["attributes"]["productName"]["string"]
    memory_mib = positive(mebibytes(device["capacity"]["memory"]["value"]))
    return FoundDevice(uuid, int(numbered[1]) if numbered else position, model, memory_mib)
