"""What a dialect is: a share of ours in the words of one cluster, and what that cluster says of shares. Pure.

Manifests are plain mappings in the API's JSON form (camelCase). Nothing here talks to a cluster.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from fgpu_scheduler import Device, FGPUError, FoundDevice, Share, ShareMode

Manifest = Mapping[str, Any]
T = TypeVar("T")

CONTAINER = "notebook"
"""A session's container: KubeSpawner's name for it, which administrators' tools know."""

LIBFGPU = "libfgpu"
"""Holds memory or compute where the cluster only counts it: the session needs our files."""

TOLERATIONS: tuple[Manifest, ...] = (
    # GPU nodes often carry this taint, and a pod that asks for no GPU by that name may not run there.
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    # The cluster would end pods of a node that is away for five minutes; they keep what they have until it is back.
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


class NotSayable(FGPUError):
    """A share that a dialect has no words for. The message names the dialect's rule, and what would do."""

    code = "not_sayable"


class NotKnown(FGPUError):
    """What a node registers, or what a pod was given, is not said yet or cannot be read: nothing follows from it."""

    code = "not_known"


@dataclass(frozen=True, slots=True)
class PodPatch:
    """What a dialect adds to a session's pod.

    ``limits`` are the extended resources of the session's container, and its requests as well; ``environment`` are
    variables of that container, None for one that it must not have. ``claims`` are objects to be made before the pod, in
    its namespace, and to be removed after it.
    """

    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str | None] = field(default_factory=dict)
    scheduler_name: str | None = None
    runtime_class: str | None = None
    claims: tuple[Manifest, ...] = ()

    def applied(self, pod: Manifest) -> dict[str, Any]:
        """Return a pod with this added; the session's container is its first. What is said here takes precedence."""
        made: dict[str, Any] = copy.deepcopy(dict(pod))
        metadata, spec = made.setdefault("metadata", {}), made["spec"]
        container = spec["containers"][0]
        for key, added in (("annotations", self.annotations), ("labels", self.labels)):
            if added:
                metadata.setdefault(key, {}).update(added)
        if self.limits:
            for key in ("limits", "requests"):
                container.setdefault("resources", {}).setdefault(key, {}).update(self.limits)
        if self.environment:
            kept = [v for v in container.get("env", ()) if v["name"] not in self.environment]
            variables = ({"name": n, "value": v} for n, v in self.environment.items() if v is not None)
            container["env"] = [*kept, *variables]
        for key, value in (("schedulerName", self.scheduler_name), ("runtimeClassName", self.runtime_class)):
            if value is not None:
                spec[key] = value
        for index, claim in enumerate(self.claims):
            name = f"gpu-{index}"
            spec.setdefault("resourceClaims", []).append(
                {"name": name, "resourceClaimName": claim["metadata"]["name"]}
            )
            container.setdefault("resources", {}).setdefault("claims", []).append({"name": name})
        return made


@dataclass(frozen=True, slots=True)
class Registered:
    """A GPU as a cluster registers it: its memory in MiB is what may be given away, oversubscription included.

    ``max_shares`` is how many pods the cluster lets share it, None where it does not say. ``named`` is False where the
    cluster names no GPUs: its ``uuid`` is then a name of ours, NODE/gpu-INDEX. ``resource`` is what a pod asks for that
    is to have all of it, where that is not the same for all GPUs of a node.
    """

    found: FoundDevice
    max_shares: int | None = None
    healthy: bool = True
    named: bool = True
    resource: str | None = None

    def __post_init__(self) -> None:
        if self.found.memory_mib < 1:
            raise NotKnown(
                f"the GPU {self.found.uuid} is registered without memory; look at the node's device plugin"
            )


@dataclass(frozen=True, slots=True)
class Given:
    """What a cluster gave a pod of one GPU; None where the cluster does not say it.

    ``whole`` is the resource if the pod has a whole unit of it: "nvidia.com/gpu", "nvidia.com/mig-1g.10gb".
    """

    uuid: str | None = None
    memory_mib: int | None = None
    compute_percent: int | None = None
    whole: str | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """What a dialect may have to look at beside one node or pod. Each says what it needs of it.

    Pods, ResourceClaims and ResourceSlices are as the API lists them. ``told`` is what lease pods answered, by name.
    """

    pods: Sequence[Manifest] = ()
    claims: Sequence[Manifest] = ()
    slices: Sequence[Manifest] = ()
    told: Mapping[str, str] = field(default_factory=dict)


class Slice(NamedTuple):
    """A share, and the GPU that it is of."""

    share: Share
    device: Device

    @property
    def whole(self) -> bool:
        """Whether it is all of the GPU's memory, which is all of the GPU (product H5)."""
        return self.share.memory_mib == self.device.memory_mib

    @property
    def compute_percent(self) -> int | None:
        """What it has of the GPU's compute, None where that is not limited."""
        return self.share.compute_percent if self.share.mode is ShareMode.MEMORY_COMPUTE else None


class Dialect(ABC):
    """The words of one way to share GPUs on Kubernetes.

    ``pins_card``: a pod is held to the very GPU, otherwise only to its node. ``whole_only``: a session has all of each of
    its devices. ``init_containers``: a session's pod may have them, which is how our files get in. ``memory_held_by`` and
    ``compute_held_by`` say who enforces a share.
    """

    name: ClassVar[str]
    pins_card: ClassVar[bool]
    whole_only: ClassVar[bool] = False
    init_containers: ClassVar[bool] = True
    memory_held_by: ClassVar[str]
    compute_held_by: ClassVar[str]

    def patch(self, shares: Sequence[Share], devices: Sequence[Device], *, name: str) -> PodPatch:
        """Return what a pod called ``name`` needs to hold these shares, one or more, of one node's devices.

        Never more than a share, and never 0, which would be no limit: amounts are rounded down to the cluster's units.

        Raises:
            NotSayable: this cluster has no words for them; with its rule.
        """
        of = {d.uuid: d for d in devices}
        slices = [Slice(share, of[share.device_uuid]) for share in shares]
        if not slices:
            raise ValueError("a pod without a share needs no dialect")
        for one in slices:
            self._check(one)
        said = self._said(slices, name)
        # A device plugin says in this variable which GPU it gave; the pod's own would take precedence over it.
        environment = {VISIBLE: None, **said.environment}
        if not self.pins_card:
            # CUDA would look for a GPU of this name, which is ours, and find none.
            environment = {CUDA_VISIBLE: None, **environment}
        return replace(said, environment=environment)

    @property
    def libfgpu_holds(self) -> bool:
        """Whether sessions need libfgpu. Where something else is loaded to hold them, they must not have it as well."""
        return self.memory_held_by.startswith(LIBFGPU)

    @abstractmethod
    def _said(self, slices: Sequence[Slice], name: str) -> PodPatch: ...

    @abstractmethod
    def capacity(self, node: Manifest, beside: Beside) -> Sequence[Registered]:
        """Return the GPUs that a node registers for this dialect; empty only if it is known to have none.

        Raises:
            NotKnown: it cannot be told now; with the node's name, what is missing, and what to look at.
        """

    @abstractmethod
    def given(self, pod: Manifest, beside: Beside) -> Sequence[Given]:
        """Return what a bound pod, anybody's, was given by the words of this dialect; empty if it asked for nothing.

        Raises:
            NotKnown: it asked, and what it was given is not said (yet).
        """

    def refusal(self, rule: str) -> NotSayable:
        """Return the refusal of a share for a rule of this dialect."""
        return NotSayable(f"{self.name}: {rule}")

    def units(self, amount: int, unit: int, *, of: str, measure: str) -> int:
        """Return how many whole units an amount has: rounded down, so that it is never above the share.

        Raises:
            NotSayable: it has none.
        """
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


def name_of(manifest: Manifest) -> str:
    """Return the name of an object."""
    return str(manifest["metadata"]["name"])


def annotation(manifest: Manifest, key: str) -> str | None:
    """Return an annotation of an object, None if it has none of that name."""
    value = (manifest["metadata"].get("annotations") or {}).get(key)
    return None if value is None else str(value)


def label(manifest: Manifest, key: str) -> str | None:
    """Return a label of an object, None if it has none of that name."""
    value = (manifest["metadata"].get("labels") or {}).get(key)
    return None if value is None else str(value)


def limits_of(pod: Manifest) -> list[dict[str, Any]]:
    """Return the limits of each container of a pod, by resource; init containers are left out, they end first."""
    return [dict((c.get("resources") or {}).get("limits") or {}) for c in pod["spec"]["containers"]]


def positive(amount: int) -> int:
    """Return an amount, which has to be above 0.

    Raises:
        ValueError: it is not.
    """
    if amount < 1:
        raise ValueError(f"{amount} is not above 0")
    return amount


def read(what: str, reader: Callable[[Any], T], value: Any) -> T:
    """Return what ``reader`` makes of what a cluster says.

    Raises:
        NotKnown: nothing, naming ``what``.
    """
    try:
        return reader(value)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
        raise NotKnown(f"{what} can't be read: {str(value)[:80]!r}") from e
