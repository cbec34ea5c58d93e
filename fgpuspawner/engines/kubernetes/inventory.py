"""What a cluster's nodes have, and what of it pods of others have taken. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines import marks
from fgpuspawner.engines.kubernetes.dialects import Beside, Dialect, Given, NotKnown, Registered
from fgpuspawner.engines.kubernetes.dialects.base import Manifest, label
from fgpuspawner.engines.kubernetes.dialects.lease import LEASE_LABEL, NotAsked
from fgpuspawner.engines.kubernetes.kept import OTHERS_POD, kept
from fgpuspawner.engines.kubernetes.quantity import MIB, quantity
from fgpuspawner.settings.nodes import Machine

GROUP = "fgpu.group"
"""The label of nodes that sessions may use; its value is their resource group."""
OVER = ("Succeeded", "Failed")
CLOSING = ("NoSchedule", "NoExecute")


def is_ready(node: Manifest) -> bool:
    """Return whether a node is ready by its kubelet's last report to the cluster."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def is_closed(node: Manifest, session: Manifest) -> bool:
    """Return whether a node takes no pod with the spec ``session``, by the rules of Kubernetes' scheduler.

    It is cordoned, has a taint that the pod does not tolerate, or does not meet its node selector or required affinity.
    """
    spec = node.get("spec") or {}
    tolerations = session.get("tolerations") or ()
    return (
        bool(spec.get("unschedulable"))
        or not all(
            any(_tolerates(one, taint) for one in tolerations)
            for taint in spec.get("taints") or ()
            if taint.get("effect") in CLOSING
        )
        or not _is_chosen(node, session)
    )


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
            try:
                return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
            except ValueError:
                return False
    return False


def is_ours(node: Manifest, named: Collection[str]) -> bool:
    """Return whether sessions may use a node: by its label, or because the settings name it."""
    return label(node, GROUP) is not None or node["metadata"]["name"] in named


def digest(node: Manifest) -> str:
    """Return a text that is another one where a node changes for sessions."""
    has = (node.get("status") or {}).get("allocatable")
    annotations = (node["metadata"].get("annotations") or {}).items()
    said = {k: v for k, v in annotations if "gpu" in k.lower() or "register" in k}
    spec, labels = node.get("spec") or {}, node["metadata"].get("labels")
    closes = [spec.get("unschedulable"), spec.get("taints")]
    return json.dumps([is_ready(node), closes, has, labels, said], sort_keys=True)


def taken_by(pod: Manifest) -> Mapping[str, Decimal]:
    """Return what a pod asks of its node, as Kubernetes' scheduler counts it.

    That is the sum of its containers and sidecars, or what an init container needs beside the sidecars that run before
    it, if that is more. What the pod asks for as a whole takes precedence; overhead comes on top.

    Raises:
        ValueError: an amount cannot be read.
    Source: Kubernetes, component-helpers/resource, PodRequests.
    """
    spec = pod.get("spec") or {}
    most: dict[str, Decimal] = {}
    running: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        needed = _sum(running, _requests(container))
        most |= {name: max(most.get(name, amount), amount) for name, amount in needed.items()}
        if container.get("restartPolicy") == "Always":
            running = needed
    for container in spec.get("containers") or ():
        running = _sum(running, _requests(container))
    own = {name: max(most.get(name, amount), amount) for name, amount in running.items()}
    found = {**most, **own, **_amounts((spec.get("resources") or {}).get("requests") or {})}
    return _sum(found, _amounts(spec.get("overhead") or {}))


def _sum(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: one.get(name, Decimal(0)) + other.get(name, Decimal(0)) for name in (*one, *other)}


def _amounts(asked: Mapping[str, Any]) -> dict[str, Decimal]:
    return {name: quantity(amount) for name, amount in asked.items()}


def _requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


@dataclass(frozen=True, slots=True)
class Owner:
    """Tells our pods: those with the installation's label in its namespace. In others anybody may write the label."""

    installation: str
    namespace: str

    def has(self, pod: Manifest, mark: str) -> bool:
        """Return whether a pod is ours by this label."""
        return label(pod, mark) == self.installation and pod["metadata"].get("namespace") == self.namespace


@dataclass(frozen=True, slots=True)
class Taken:
    """What one pod that is no session of ours takes of its node: all that is kept of the thousands that a cluster has.

    ``trouble`` says why that cannot be read. ``pod`` is there of a ``lease`` of ours, and of one that may have part of
    a GPU.
    """

    node: str
    cpu: Decimal = Decimal(0)
    memory: Decimal = Decimal(0)
    trouble: str = ""
    lease: bool = False
    pod: Manifest | None = None


def taken(pod: Manifest, dialect: Dialect, owner: Owner) -> Taken | None:
    """Return what a pod takes of its node; None of a session of ours, and of one that has none or has ended."""
    node = (pod.get("spec") or {}).get("nodeName")
    over = (pod.get("status") or {}).get("phase") in OVER
    if not node or over or owner.has(pod, marks.INSTALLATION):
        return None
    node, lease = sys.intern(str(node)), owner.has(pod, LEASE_LABEL)
    own = kept(pod, OTHERS_POD) if lease or _may_have_gpu(pod, dialect) else None
    try:
        amounts = taken_by(pod)
    except ValueError as e:
        return Taken(node, trouble=f"pod {pod['metadata']['name']}: {e}", lease=lease, pod=own)
    nothing = Decimal(0)
    return Taken(node, amounts.get("cpu", nothing), amounts.get("memory", nothing), lease=lease, pod=own)


def _may_have_gpu(pod: Manifest, dialect: Dialect) -> bool:
    try:
        return bool(dialect.given(pod, Beside()))
    except NotKnown:
        # It asked for one; which, is said elsewhere, or later.
        return True


def by_node(found: Iterable[Taken]) -> dict[str, list[Taken]]:
    """Return what is taken of each node."""
    on: dict[str, list[Taken]] = {}
    for one in found:
        on.setdefault(one.node, []).append(one)
    return on


def machine_of(
    node: Manifest,
    others: Sequence[Taken],
    dialect: Dialect,
    beside: Beside,
    session: Manifest,
    held: Collection[str] = (),
) -> Machine | None:
    """Return what a node has for sessions beyond what pods of ``others`` take of it; None for one that is not ready.

    ``session`` is the spec of a session's pod without its node; ``held`` are the devices that sessions hold.

    Raises:
        ValueError: the node, or one of these pods, has an amount that cannot be read.
    """
    if not is_ready(node):
        return None
    for one in others:
        if one.trouble:
            raise ValueError(one.trouble)
    has = (node.get("status") or {}).get("allocatable") or {}
    nothing = Decimal(0)
    cpu = quantity(has.get("cpu", "0")) - sum((one.cpu for one in others), nothing)
    memory = quantity(has.get("memory", "0")) - sum((one.memory for one in others), nothing)
    foreign = [one.pod for one in others if one.pod is not None and not one.lease]
    own = Machine(
        int(1000 * max(nothing, cpu)),
        int(max(nothing, memory)) // MIB,
        group=label(node, GROUP),
        closed=is_closed(node, session),
        found=True,
    )
    try:
        return replace(own, devices=_devices(node, foreign, dialect, beside, held))
    except NotKnown as e:
        return replace(own, trouble=str(e), coming=isinstance(e, NotAsked))


def _devices(
    node: Manifest,
    foreign: Sequence[Manifest],
    dialect: Dialect,
    beside: Beside,
    held: Collection[str],
) -> tuple[FoundDevice, ...]:
    """Return the GPUs that no pod of others has a part of.

    Raises:
        NotKnown: that cannot be told.
    """
    registered = dialect.capacity(node, beside)
    if dialect.pins_card:
        # A GPU that pods of others share is not ours to divide.
        theirs = {given.uuid for pod in foreign for given in dialect.given(pod, beside)}
    else:
        theirs = _as_many(registered, foreign, dialect, held)
    return tuple(one.found for one in registered if one.healthy and one.found.uuid not in theirs)


def _as_many(
    registered: Sequence[Registered],
    foreign: Sequence[Manifest],
    dialect: Dialect,
    held: Collection[str],
) -> set[str | None]:
    """Return as many GPUs as pods of others may have a part of, where it is not told which these are.

    Those that no session holds come first: a session keeps the GPU that it has.
    """
    theirs: set[str | None] = set()
    for pod in foreign:
        try:
            given = dialect.given(pod, Beside())
        except NotKnown:
            given = [Given()]
        for one in given:
            fits = [
                r.found.uuid
                for r in registered
                if r.found.uuid not in theirs and (one.whole is None or r.resource in (None, one.whole))
            ]
            free = [uuid for uuid in fits if uuid not in held]
            theirs |= set((free or fits)[-1:])
    return theirs
