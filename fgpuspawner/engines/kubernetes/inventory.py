"""What a cluster's nodes offer to sessions, after the usage of other pods. Pure."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines import marks
from fgpuspawner.engines.kubernetes.dialects.base import (
    MIB,
    AssignedGpu,
    Dialect,
    GpuRecords,
    GpuUnknown,
    Manifest,
    label,
    name_of,
    quantity,
)
from fgpuspawner.engines.kubernetes.dialects.lease import LEASE_LABEL, LeaseUnanswered
from fgpuspawner.settings.nodes import MachineFacts, Spec

GROUP = "fgpu.group"
"""The label of nodes that sessions may use; its value is their resource group."""
PLACEHOLDER = "fgpu.placeholder"
OVER = ("Succeeded", "Failed")
CLOSING = ("NoSchedule", "NoExecute")

LARGE = frozenset(("managedFields", "images", "env", "envFrom", "volumes", "volumeMounts"))


def pruned(found: Manifest, large: Collection[str] = LARGE) -> dict[str, Any]:
    """Return a node or pod without its large fields, which are not read; labels and annotations stay as they are."""

    def without(part: Any) -> Any:
        if isinstance(part, list):
            return [without(one) for one in part]
        if isinstance(part, dict):
            return {name: without(below) for name, below in part.items() if name not in large}
        return part

    metadata = {name: value for name, value in found["metadata"].items() if name not in large}
    return {
        "metadata": metadata,
        "spec": without(found.get("spec") or {}),
        "status": without(found.get("status") or {}),
    }


# --- Nodes ---


def is_ready(node: Manifest) -> bool:
    """Return whether a node is ready by its kubelet's last report to the cluster."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def is_closed(node: Manifest, session: Manifest) -> bool:
    """Return whether a node takes no pod with the spec ``session``, by the rules of Kubernetes' scheduler.

    It is cordoned, has a taint that the pod does not tolerate, or does not meet its node selector or required affinity.
    """
    spec, tolerations = node.get("spec") or {}, session.get("tolerations") or ()
    taints = [taint for taint in spec.get("taints") or () if taint.get("effect") in CLOSING]
    tolerated = all(any(_tolerates(one, taint) for one in tolerations) for taint in taints)
    return bool(spec.get("unschedulable")) or not tolerated or not _is_chosen(node, session)


def _tolerates(toleration: Manifest, taint: Manifest) -> bool:
    key, effect = toleration.get("key"), toleration.get("effect")
    if key not in (None, "", taint.get("key")) or effect not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(key) and toleration.get("value", "") == taint.get("value", "")


def _is_chosen(node: Manifest, session: Manifest) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (session.get("nodeSelector") or {}).items()):
        return False
    affinity = (session.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    fields = {"metadata.name": node["metadata"]["name"]}
    # A term without a requirement matches no node.
    return required is None or any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and all(_meets(labels, one) for one in term.get("matchExpressions") or ())
        and all(_meets(fields, one) for one in term.get("matchFields") or ())
        for term in required["nodeSelectorTerms"]
    )


def _meets(has: Mapping[str, str], requirement: Manifest) -> bool:
    value, values = has.get(requirement["key"]), list(requirement.get("values") or ())
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator if value is not None:
            with suppress(ValueError):
                return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
    return False


def is_ours(node: Manifest, named: Collection[str]) -> bool:
    """Return whether sessions may use a node: by its label, or because the settings name it."""
    return label(node, GROUP) is not None or node["metadata"]["name"] in named


def digest(node: Manifest) -> str:
    """Return a text that changes when a node changes in a way that matters for sessions."""
    allocatable = (node.get("status") or {}).get("allocatable")
    annotations = (node["metadata"].get("annotations") or {}).items()
    about_gpus = {k: v for k, v in annotations if "gpu" in k.lower() or "register" in k}
    spec, labels = node.get("spec") or {}, node["metadata"].get("labels")
    closes = [spec.get("unschedulable"), spec.get("taints")]
    return json.dumps([is_ready(node), closes, allocatable, labels, about_gpus], sort_keys=True)


# --- Nodes that the Hub may not read ---


def untold(specs: Sequence[Spec]) -> str:
    """Return what ``c.FGPU.nodes`` lacks for a Hub that may not read nodes; empty if it lacks nothing."""
    lacking = [spec["name"] for spec in specs if not {"cpu", "memory_mib"} <= spec.keys()]
    if specs and not lacking:
        return ""
    words = f"has no cpu and memory_mib for {lacking[0]}" if lacking else "is empty"
    return f"the Hub may not list nodes, and c.FGPU.nodes {words}; write them there, or give it the right"


def told_node(spec: Spec, pods: Iterable[Manifest]) -> Manifest:
    """Return a node that the Hub may not read: as ``c.FGPU.nodes`` describes it, with what our pods there report.

    The cluster marks the pods of a node that is away as not ready, and leaves their containers' state as it was. The
    number of GPUs is that of the UUIDs in the description; else one more than our leases hold, so that one lease tries.
    """
    name, gpus = spec["name"], spec.get("gpus")
    running = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
    here = [pod for pod in running if pod["spec"].get("nodeName") == name]
    number = len(gpus) if isinstance(gpus, list) else 1 + sum(label(p, LEASE_LABEL) is not None for p in here)
    amounts = {"cpu": str(spec["cpu"]), "memory": f"{spec['memory_mib']}Mi", "nvidia.com/gpu": str(number)}
    ready = {"type": "Ready", "status": str(not any(map(_is_cut_off, here)))}
    return {
        "metadata": {"name": name},
        "spec": {},
        "status": {"allocatable": amounts, "conditions": [ready]},
    }


def _is_cut_off(pod: Manifest) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or ()}
    gated = bool(pod["spec"].get("readinessGates"))
    return not gated and conditions.get("ContainersReady") == "True" and conditions.get("Ready") == "False"


# --- Pods ---


def pod_requests(pod: Manifest) -> Counter[str]:
    """Return a pod's resource requests in thousandths, as Kubernetes' scheduler counts them.

    That is the sum of its containers and sidecars, or, if more, an init container's beside the sidecars that run before
    it. Requests of the pod as a whole take precedence; overhead is added.

    Raises:
        ValueError: an amount cannot be read.
    Source: Kubernetes, component-helpers/resource, PodRequests.
    """
    spec = pod.get("spec") or {}
    most, running = Counter[str](), Counter[str]()
    for container in spec.get("initContainers") or ():
        needed = running + _requests(container)
        most |= needed
        if container.get("restartPolicy") == "Always":
            running = needed
    for container in spec.get("containers") or ():
        running += _requests(container)
    whole = _thousandths((spec.get("resources") or {}).get("requests") or {})
    return Counter({**(most | running), **whole}) + _thousandths(spec.get("overhead") or {})


def _requests(container: Mapping[str, Any]) -> Counter[str]:
    resources = container.get("resources") or {}
    return _thousandths({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _thousandths(amounts: Mapping[str, Any]) -> Counter[str]:
    return Counter({name: ceil(1000 * quantity(amount)) for name, amount in amounts.items()})


@dataclass(frozen=True, slots=True)
class PodOwner:
    """Recognises our pods by the installation's label and namespace. In other namespaces the label may be forged."""

    installation: str
    namespace: str

    def owns(self, pod: Manifest, mark: str) -> bool:
        """Return whether a pod is ours by the label ``mark``."""
        return label(pod, mark) == self.installation and pod["metadata"].get("namespace") == self.namespace


@dataclass(frozen=True, slots=True)
class PodUsage:
    """What one pod that is none of our sessions takes of its node; small, because a cluster has thousands of pods.

    ``memory_milli`` is in thousandths of a byte. ``trouble`` says why the amounts cannot be read. ``pod`` is set for a
    ``lease`` of ours, and for a pod that may have a GPU.
    """

    node: str
    cpu_milli: int = 0
    memory_milli: int = 0
    trouble: str = ""
    lease: bool = False
    pod: Manifest | None = None


def usage_of(pod: Manifest, dialect: Dialect, owner: PodOwner) -> PodUsage | None:
    """Return what a pod takes of its node; None for a session of ours, an ended pod, and one without a node."""
    node = (pod.get("spec") or {}).get("nodeName")
    over = (pod.get("status") or {}).get("phase") in OVER
    # Placeholders are for sessions, and give way to them.
    ours = owner.owns(pod, marks.INSTALLATION) or owner.owns(pod, PLACEHOLDER)
    if not node or over or ours:
        return None
    node, lease = sys.intern(str(node)), owner.owns(pod, LEASE_LABEL)
    own = pruned(pod, LARGE - {"env"}) if lease or _may_have_gpu(pod, dialect) else None
    try:
        amounts = pod_requests(pod)
    except ValueError as e:
        return PodUsage(node, trouble=f"pod {name_of(pod)}: {e}", lease=lease, pod=own)
    return PodUsage(node, amounts["cpu"], amounts["memory"], lease=lease, pod=own)


def _may_have_gpu(pod: Manifest, dialect: Dialect) -> bool:
    try:
        return bool(dialect.assigned(pod, GpuRecords()))
    except GpuUnknown:
        # It asked for a GPU. Which one is in other objects, or reported later.
        return True


def by_node(usage: Iterable[PodUsage]) -> Mapping[str, list[PodUsage]]:
    found = defaultdict[str, list[PodUsage]](list)
    for one in usage:
        found[one.node].append(one)
    return found


def machine_of(
    node: Manifest,
    others: Sequence[PodUsage],
    dialect: Dialect,
    records: GpuRecords,
    session: Manifest,
    held: Collection[str] = (),
) -> MachineFacts | None:
    """Return what a node offers to sessions beside the pods of ``others``; None if it is not ready.

    ``session`` is the spec of a session's pod without its node; ``held`` are the devices that sessions hold.

    Raises:
        ValueError: the node, or one of these pods, has an amount that cannot be read.
    """
    if not is_ready(node):
        return None
    if trouble := next((one.trouble for one in others if one.trouble), ""):
        raise ValueError(trouble)
    has = (node.get("status") or {}).get("allocatable") or {}
    left = _thousandths({name: has.get(name, "0") for name in ("cpu", "memory")})
    left["cpu"] -= sum(one.cpu_milli for one in others)
    left["memory"] -= sum(one.memory_milli for one in others)
    foreign = [one.pod for one in others if one.pod is not None and not one.lease]
    own = MachineFacts(
        max(0, left["cpu"]),
        max(0, left["memory"]) // (1000 * MIB),
        group=label(node, GROUP),
        closed=is_closed(node, session),
        found=True,
    )
    try:
        return replace(own, devices=_devices(node, foreign, dialect, records, held))
    except GpuUnknown as e:
        return replace(own, trouble=str(e), coming=isinstance(e, LeaseUnanswered))


def _devices(
    node: Manifest, foreign: Sequence[Manifest], dialect: Dialect, records: GpuRecords, held: Collection[str]
) -> tuple[FoundDevice, ...]:
    """Return the node's GPUs without those that other pods use, even in part: we do not divide these."""
    devices = dialect.capacity(node, records)
    if dialect.pins_card:
        used = {gpu.uuid for pod in foreign for gpu in dialect.assigned(pod, records)}
    else:
        used = _used_at_most(devices, foreign, dialect, held)
    return tuple(device for device in devices if device.uuid not in used)


def _used_at_most(
    devices: Sequence[FoundDevice], foreign: Sequence[Manifest], dialect: Dialect, held: Collection[str]
) -> set[str | None]:
    """Return as many GPUs as other pods may use, where the cluster does not report which ones.

    GPUs without sessions come first, so that a session's GPU stays listed.
    """
    used: set[str | None] = set()
    for pod in foreign:
        try:
            assigned = dialect.assigned(pod, GpuRecords())
        except GpuUnknown:
            assigned = [AssignedGpu()]
        for gpu in assigned:
            fits = [
                device.uuid
                for device in devices
                if device.uuid not in used and gpu.resource in (None, dialect.resource_of(device))
            ]
            free = [uuid for uuid in fits if uuid not in held]
            used |= set((free or fits)[-1:])
    return used
