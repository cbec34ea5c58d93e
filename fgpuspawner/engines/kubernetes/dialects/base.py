"""What a dialect is: it writes our shares into pods for one cluster, and reads GPUs back from nodes and pods. Pure.

Manifests are plain mappings in the API's JSON form (camelCase). Nothing here calls a cluster.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple, TypeVar

from fgpu_scheduler import Device, FGPUError, FoundDevice, Share, ShareMode

Manifest = Mapping[str, Any]
"""An object as the API has it."""
T = TypeVar("T")

CONTAINER = "notebook"
"""A session's container: KubeSpawner's name for it, which administrators' tools know."""

LIBFGPU = "libfgpu"
"""Enforces memory or compute where the cluster only counts it: the session needs our files."""

TOLERATIONS: tuple[Manifest, ...] = (
    # GPU nodes often carry this taint, and a pod that asks for no GPU by that name may not run there.
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    # The cluster would end pods of a node that is away for five minutes; they keep their shares until it is back.
    {"key": "node.kubernetes.io/not-ready", "operator": "Exists"},
    {"key": "node.kubernetes.io/unreachable", "operator": "Exists"},
)
"""Of each session and each lease."""
TOLERATING: Manifest = {"tolerations": TOLERATIONS}
"""The spec of a session's pod for which nothing else is set."""

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
"""Which GPUs the NVIDIA runtime gives a container: by UUID, or "void" for none. Images often say "all"."""
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+")


class UnsupportedShare(FGPUError):
    """A dialect cannot express a share. The message names the dialect's rule, and the nearest possible amount."""

    code = "not_sayable"


class GpuUnknown(FGPUError):
    """A node's or a pod's GPUs are not reported yet, or the report cannot be read; treat them as unknown, not as none."""

    code = "not_known"


@dataclass(frozen=True, slots=True)
class PodPatch:
    """What a dialect adds to a session's pod.

    ``limits`` are extended resources of the session's container, written to its requests as well; ``environment`` are
    variables of that container, None for one to remove. ``spec`` are fields of the pod's spec, ``claims`` are objects
    that the pod owns, made in its namespace.
    """

    annotations: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str | None] = field(default_factory=dict)
    spec: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[Manifest, ...] = ()

    def applied(self, pod: Manifest) -> dict[str, Any]:
        """Return a copy of the pod with this patch, which takes precedence. The session's container is the first."""
        made: dict[str, Any] = copy.deepcopy(dict(pod))
        spec = made["spec"]
        container = spec["containers"][0]
        if self.annotations:
            made.setdefault("metadata", {}).setdefault("annotations", {}).update(self.annotations)
        if self.limits:
            for key in ("limits", "requests"):
                container.setdefault("resources", {}).setdefault(key, {}).update(self.limits)
        if self.environment:
            kept = [v for v in container.get("env", ()) if v["name"] not in self.environment]
            variables = ({"name": n, "value": v} for n, v in self.environment.items() if v is not None)
            container["env"] = [*kept, *variables]
        spec.update(self.spec)
        for index, claim in enumerate(self.claims):
            name, of = f"gpu-{index}", {"resourceClaimName": name_of(claim)}
            spec.setdefault("resourceClaims", []).append({"name": name, **of})
            container.setdefault("resources", {}).setdefault("claims", []).append({"name": name})
        return made


@dataclass(frozen=True, slots=True)
class AssignedGpu:
    """A GPU that a cluster assigned to a pod.

    ``uuid`` is None if the cluster does not report it. With ``resource`` the GPU is one with this `resource_of`.
    """

    uuid: str | None = None
    resource: str | None = None


@dataclass(frozen=True, slots=True)
class GpuRecords:
    """What dialects read beside a node or pod: lists of the API, and by name the answers of a node's lease pods.

    The answer is None for a lease pod that was not asked yet.
    """

    claims: Sequence[Manifest] = ()
    slices: Sequence[Manifest] = ()
    leases: Mapping[str, str | None] = field(default_factory=dict)


class Slice(NamedTuple):
    """A share with its GPU. ``compute_percent`` is None where compute is not limited."""

    share: Share
    device: Device

    @property
    def compute_percent(self) -> int | None:
        return self.share.compute_percent if self.share.mode is ShareMode.MEMORY_COMPUTE else None


class Dialect(ABC):
    """One way to share GPUs on Kubernetes.

    ``pins_card``: the pod gets exactly the GPU of its share, otherwise any GPU of its node. ``whole_only``: a session has
    all of each of its devices.
    ``held_by`` names what enforces a share of memory and compute.
    """

    name: ClassVar[str]
    pins_card: ClassVar[bool]
    whole_only: ClassVar[bool] = False
    held_by: ClassVar[str]

    def patch(self, shares: Sequence[Share], devices: Sequence[Device], *, name: str) -> PodPatch:
        """Return the patch that gives the pod ``name`` these shares, one or more, of one node's devices.

        Amounts are rounded down to the cluster's units, so they never exceed the share; they are never 0, which would
        mean no limit.

        Raises:
            UnsupportedShare: this dialect cannot express them; with its rule.
        """
        of = {d.uuid: d for d in devices}
        slices = [Slice(share, of[share.device_uuid]) for share in shares]
        if not slices:
            raise ValueError("a pod without a share needs no dialect")
        for one in slices:
            self._check(one)
        patch = self._patch(slices, name)
        # A device plugin sets VISIBLE to the GPU that it chose; the pod's own value would take precedence over it.
        environment = {VISIBLE: None, **patch.environment}
        if not self.pins_card:
            # CUDA would look for a GPU of our placeholder name, and find none.
            environment = {CUDA_VISIBLE: None, **environment}
        return replace(patch, environment=environment)

    @property
    def libfgpu_holds(self) -> bool:
        """Whether sessions need libfgpu. Where another library enforces limits, sessions must not load both."""
        return self.held_by == LIBFGPU

    @abstractmethod
    def _patch(self, slices: Sequence[Slice], name: str) -> PodPatch: ...

    @abstractmethod
    def capacity(self, node: Manifest, records: GpuRecords) -> Sequence[FoundDevice]:
        """Return the healthy GPUs that a node registers, with their memory including oversubscription.

        Where the cluster names no GPUs, the UUID is a placeholder such as NODE/gpu-0. Empty only if the node is known
        to have no GPU.

        Raises:
            GpuUnknown: with the node's name, what is missing, and what to look at.
        """

    @abstractmethod
    def assigned(self, pod: Manifest, records: GpuRecords) -> Sequence[AssignedGpu]:
        """Return the GPUs that any bound pod was assigned through this dialect; empty if it asked for none.

        Raises:
            GpuUnknown: it asked, and its GPU is not reported (yet).
        """

    def resource_of(self, device: FoundDevice) -> str | None:
        """Return the extended resource that stands for one whole device, if devices of one node differ in it."""
        return None

    def refusal(self, rule: str) -> UnsupportedShare:
        """Return the refusal of a share for a rule of this dialect."""
        return UnsupportedShare(f"{self.name}: {rule}")

    def units(self, amount: int, unit: int, *, of: str, measure: str) -> int:
        """Return the amount in whole units, rounded down; raises UnsupportedShare below one unit."""
        if amount < unit:
            raise self.refusal(
                f"{of} is counted in units of {unit} {measure}, so {amount} {measure} isn't possible;"
                f" choose {unit} {measure} or more"
            )
        return amount // unit

    def _check(self, one: Slice) -> None:
        share, device = one
        if not 1 <= share.memory_mib <= device.memory_mib:
            raise self.refusal(
                f"GPU memory of {share.memory_mib} MiB isn't possible on a GPU of {device.memory_mib} MiB;"
                f" choose 1 to {device.memory_mib} MiB"
            )
        if one.compute_percent is not None and not 1 <= one.compute_percent <= 100:
            raise self.refusal(f"compute of {one.compute_percent} % isn't possible; choose 1 to 100 %")


# --- Pods of ours ---


def only_on(node: str, affinity: Manifest | None = None) -> dict[str, Any]:
    """Return an affinity that only this node meets; with ``nodeName`` no scheduler would count the pod's requests."""
    own = {"key": "metadata.name", "operator": "In", "values": [node]}
    nodes = (affinity or {}).get("nodeAffinity") or {}
    required = nodes.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [
        {**term, "matchFields": [*(term.get("matchFields") or ()), own]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    only = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {**(affinity or {}), "nodeAffinity": {**nodes, **only}}


MOVABLE = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
"""On pods that keep no node: a pod of no controller keeps its node from an autoscaler without this."""
NO_PRIVILEGES: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
NO_ROOT: Manifest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
"""With `NO_PRIVILEGES` what Pod Security "restricted" requires."""
SLEEP = ("/bin/sh", "-c", "while :; do sleep 3600; done")


def sleeping_pod(
    name: str, labels: Mapping[str, str], container: Mapping[str, Any], spec: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a pod of one container that sleeps, without privileges; ``spec`` says where."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels), "annotations": dict(MOVABLE)},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [{"command": list(SLEEP), "securityContext": dict(NO_PRIVILEGES), **container}],
            "enableServiceLinks": False,
            "restartPolicy": "Always",
            "securityContext": dict(NO_ROOT, runAsUser=65534),
            "terminationGracePeriodSeconds": 1,
            **spec,
        },
    }


# --- Reading manifests ---


def name_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def with_owner(owned: Manifest, pod: Manifest) -> dict[str, Any]:
    """Return an object that the cluster deletes with a pod."""
    found = pod["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": found["name"], "uid": found["uid"]}
    return {**owned, "metadata": {**owned["metadata"], "ownerReferences": [owner]}}


def annotation(manifest: Manifest, key: str) -> str | None:
    value = (manifest["metadata"].get("annotations") or {}).get(key)
    return None if value is None else str(value)


def label(manifest: Manifest, key: str) -> str | None:
    value = (manifest["metadata"].get("labels") or {}).get(key)
    return None if value is None else str(value)


def limits_of(pod: Manifest) -> list[dict[str, Any]]:
    """Return the limits of each container, by resource; init containers are left out, they end first."""
    return [dict((c.get("resources") or {}).get("limits") or {}) for c in pod["spec"]["containers"]]


def read(what: str, reader: Callable[[Any], T], value: Any) -> T:
    """Return ``reader(value)``; raises GpuUnknown, naming ``what``, if the cluster's value cannot be read."""
    try:
        return reader(value)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
        raise GpuUnknown(f"{what} can't be read: {str(value)[:80]!r}") from e


# --- Quantities: "10k", "5Gi", "500m". What was sent as 10000 may come back as "10k". ---
# Source: Kubernetes, "Quantity" in the reference of common definitions.

MIB = 2**20
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?:[eE](?P<power>[+-]?\d{1,2})|(?P<suffix>[A-Za-z]{0,2}))", re.ASCII
)
_SUFFIXES = {
    **{name: Decimal(10) ** power for name, power in zip(("n", "u", "m", ""), (-9, -6, -3, 0), strict=True)},
    **{name: Decimal(1000) ** power for power, name in enumerate("kMGTPE", 1)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", 1)},
}


def quantity(text: object) -> Decimal:
    """Return a quantity's exact value in its base unit (bytes, cores, pieces); raises ValueError for anything else."""
    match = _QUANTITY.fullmatch(str(text))
    factor = _SUFFIXES.get(match["suffix"] or "") if match else None
    if match is None or factor is None:
        raise ValueError(f"{str(text)[:40]!r} is no quantity such as 500m, 10k or 5Gi")
    return Decimal(match["number"]) * factor * Decimal(10) ** int(match["power"] or 0)


def count(text: object) -> int:
    """Return a quantity of pieces; raises ValueError if it is negative or not whole."""
    value = quantity(text)
    if value < 0 or value != int(value):
        raise ValueError(f"{str(text)[:40]!r} is no whole number of pieces")
    return int(value)


def mebibytes(text: object) -> int:
    """Return a quantity of bytes in MiB, rounded down; raises ValueError if it is negative."""
    value = quantity(text)
    if value < 0:
        raise ValueError(f"{str(text)[:40]!r} is negative; memory is not")
    return int(value) // MIB


def positive(amount: int) -> int:
    """Return an amount; raises ValueError unless it is above 0."""
    if amount < 1:
        raise ValueError(f"{amount} is not above 0")
    return amount
