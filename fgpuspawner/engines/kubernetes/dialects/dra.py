"""`dra`: a ResourceClaim asks for memory of the very GPU; libfgpu holds it.

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
    Beside,
    Dialect,
    Given,
    Manifest,
    NotKnown,
    PodPatch,
    Registered,
    Slice,
    name_of,
    read,
)
from fgpuspawner.engines.kubernetes.quantity import mebibytes

DRIVER = "gpu.nvidia.com"


class Dra(Dialect):
    """Claims on GPUs of NVIDIA's DRA driver."""

    name = "dra"
    pins_card = True
    memory_held_by = LIBFGPU
    compute_held_by = LIBFGPU

    def __init__(self, *, device_class: str = DRIVER) -> None:
        self._device_class = device_class

    def _said(self, slices: Sequence[Slice], name: str) -> PodPatch:
        requests = [self._request(f"gpu-{index}", one) for index, one in enumerate(slices)]
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": requests}},
        }
        # What the claim gives comes beside it; without this an image that says "all" would get every GPU as well.
        return PodPatch(claims=(claim,), environment={VISIBLE: "void"})

    def _request(self, name: str, one: Slice) -> dict[str, Any]:
        # A JSON string is one of CEL, so a UUID can be nothing but a string.
        is_it = f'device.attributes["{DRIVER}"].uuid == {json.dumps(one.device.uuid)}'
        return {
            "name": name,
            "exactly": {
                "deviceClassName": self._device_class,
                "allocationMode": "ExactCount",
                "count": 1,
                "selectors": [{"cel": {"expression": is_it}}],
                "capacity": {"requests": {"memory": f"{one.share.memory_mib}Mi"}},
            },
        }

    def capacity(self, node: Manifest, beside: Beside) -> Sequence[Registered]:
        """Return the GPUs of the driver's slices for the node. Needs ``slices``.

        A GPU that cannot be allocated more than once has room for one session.
        """
        name = name_of(node)
        mine = [
            s for s in beside.slices if _spec(s).get("driver") == DRIVER and _spec(s).get("nodeName") == name
        ]
        if not mine:
            raise NotKnown(f"node {name} has no ResourceSlice of {DRIVER}; does its DRA driver run?")
        gpus = [
            d for s in _newest(mine, name) for d in _spec(s).get("devices") or () if _text(d, "type") == "gpu"
        ]
        return [
            read(f"the ResourceSlice of node {name}", lambda pair: _registered(*pair), pair)
            for pair in enumerate(gpus)
        ]

    def given(self, pod: Manifest, beside: Beside) -> Sequence[Given]:
        """Return what the pod's claims were allocated. Needs ``claims`` and ``slices``."""
        wanted = [_claim_of(pod, reference) for reference in pod["spec"].get("resourceClaims") or ()]
        space = pod["metadata"].get("namespace")
        by_name = {name_of(c): c for c in beside.claims if c["metadata"].get("namespace") == space}
        return [given for name in wanted for given in _allocated(name, by_name.get(name), beside.slices)]


def _spec(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest.get("spec") or {}
    return spec


def _text(device: Manifest, attribute: str) -> str | None:
    found = (device.get("attributes") or {}).get(attribute) or {}
    return found.get("string")


def _newest(slices: Sequence[Manifest], node: str) -> list[Manifest]:
    """Return the slices of each pool's newest generation; the API says that older ones are out of date."""
    pools = defaultdict(list)
    for one in slices:
        pools[_spec(one)["pool"]["name"]].append(one)
    newest = []
    for pool, ones in pools.items():
        generation = max(_spec(s)["pool"]["generation"] for s in ones)
        kept = [s for s in ones if _spec(s)["pool"]["generation"] == generation]
        if len(kept) != _spec(kept[0])["pool"]["resourceSliceCount"]:
            raise NotKnown(f"node {node}: not all ResourceSlices of the pool {pool} are there yet")
        newest += kept
    return newest


def _registered(position: int, device: Manifest) -> Registered:
    numbered = re.fullmatch(r"gpu-(\d+)", device["name"])
    uuid, model = device["attributes"]["uuid"]["string"], device["attributes"]["productName"]["string"]
    found = FoundDevice(
        uuid,
        int(numbered[1]) if numbered else position,
        model,
        mebibytes(device["capacity"]["memory"]["value"]),
    )
    kept_out = any(t.get("effect") in {"NoSchedule", "NoExecute"} for t in device.get("taints") or ())
    return Registered(found, None if device.get("allowMultipleAllocations") else 1, healthy=not kept_out)


def _claim_of(pod: Manifest, reference: Manifest) -> str:
    made = {
        s["name"]: s.get("resourceClaimName")
        for s in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    }
    name = reference.get("resourceClaimName") or made.get(reference["name"])
    if name is None:
        raise NotKnown(f"the claim {reference['name']} of pod {name_of(pod)} isn't made yet")
    return str(name)


def _allocated(name: str, claim: Manifest | None, slices: Sequence[Manifest]) -> list[Given]:
    allocation = ((claim or {}).get("status") or {}).get("allocation")
    if allocation is None:
        raise NotKnown(f"the ResourceClaim {name} isn't allocated yet")
    results = (allocation.get("devices") or {}).get("results") or ()
    return [_result(name, r, slices) for r in results if r["driver"] == DRIVER]


def _result(claim: str, result: Manifest, slices: Sequence[Manifest]) -> Given:
    uuids = [
        _text(device, "uuid")
        for s in slices
        if _spec(s).get("driver") == DRIVER and _spec(s)["pool"]["name"] == result["pool"]
        for device in _spec(s).get("devices") or ()
        if device["name"] == result["device"]
    ]
    if not uuids or uuids[-1] is None:
        raise NotKnown(f"the GPU {result['device']} of the ResourceClaim {claim} is in no ResourceSlice")
    consumed = result.get("consumedCapacity") or {}
    memory = consumed.get("memory", consumed.get(f"{DRIVER}/memory"))
    if memory is None:
        # Without consumable capacity an allocation is of the whole device.
        return Given(uuid=uuids[-1], whole=DRIVER)
    return Given(
        uuid=uuids[-1], memory_mib=read(f"the memory of the ResourceClaim {claim}", mebibytes, memory)
    )
