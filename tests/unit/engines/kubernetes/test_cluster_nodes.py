"""What nodes offer to sessions, read from the API's objects."""

from __future__ import annotations

from typing import Any

import pytest

from fgpuspawner.engines.kubernetes.dialects.base import GpuRecords
from fgpuspawner.engines.kubernetes.dialects.lease import Lease
from fgpuspawner.engines.kubernetes.inventory import (
    GROUP,
    PodOwner,
    PodUsage,
    digest,
    is_closed,
    is_ours,
    is_ready,
    machine_of,
    pod_requests,
    pruned,
    told_node,
    untold,
    usage_of,
)
from fgpuspawner.engines.kubernetes.leases import gpus_of
from fgpuspawner.settings.nodes import MachineFacts

LEASE = Lease("lab")
OURS = PodOwner("lab", "jhub")
ANSWER: dict[str, str | None] = {"lease-0": "0, GPU-1f, NVIDIA A100, 40960\n"}


def node(ready: str = "True", **allocatable: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpu1"},
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]},
    }


def machine(
    found: dict[str, Any] | None = None, *others: dict[str, Any], answers: dict[str, str | None] | None = None
) -> MachineFacts:
    """Return what a node (8 CPU, 16 GiB) offers beside these pods, all bound to it."""
    made = offer(found or node(cpu="8", memory="16Gi"), *others, answers=answers)
    assert made is not None
    return made


def offer(
    found: dict[str, Any], *others: dict[str, Any], answers: dict[str, str | None] | None = None
) -> MachineFacts | None:
    usage = [one for pod in others if (one := usage_of(bound(pod), LEASE, OURS)) is not None]
    return machine_of(found, usage, LEASE, GpuRecords(leases=answers or {}), {})


def bound(pod: dict[str, Any]) -> dict[str, Any]:
    return {**pod, "spec": {"nodeName": "gpu1", **pod["spec"]}}


def container(more: dict[str, Any] | None = None, **requests: str) -> dict[str, Any]:
    return {"resources": {"requests": requests}, **(more or {})}


def theirs(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "theirs"}, "spec": {"containers": list(containers), **spec}}


def lease(name: str, installation: str = "lab") -> dict[str, Any]:
    pod = LEASE.lease_pod(name=name, node="gpu1", image="i")
    pod["metadata"] |= {"labels": {"fgpu.lease": installation}, "namespace": "jhub"}
    return {**bound(pod), "status": {"phase": "Running"}}


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("spec", "requests"),
    [
        (
            theirs(container(cpu="1500m"), container(cpu="500m", memory="1Gi")),
            {"cpu": 2000, "memory": 1000 * 2**30},
        ),
        (
            theirs(container(cpu="1", memory="1Gi"), initContainers=[container(cpu="100m", memory="2Gi")]),
            {"cpu": 1000, "memory": 2000 * 2**30},
        ),
        (
            theirs(container(cpu="2"), initContainers=[container(SIDECAR, cpu="1"), container(cpu="1500m")]),
            {"cpu": 3000},
        ),
        (
            theirs(
                container(cpu="2"),
                initContainers=[container(cpu="1500m"), container(SIDECAR, cpu="1"), container(cpu="5")],
            ),
            {"cpu": 6000},
        ),
        (
            theirs(
                container(cpu="1", memory="1Gi"),
                resources={"requests": {"cpu": "4"}},
                overhead={"cpu": "500m"},
            ),
            {"cpu": 4500, "memory": 1000 * 2**30},
        ),
        (theirs({"resources": {"limits": {"cpu": "2"}}}), {"cpu": 2000}),
    ],
    ids=["sum", "init container", "sidecar", "late sidecar", "whole pod and overhead", "limits only"],
)
def test_pod_requests_are_counted_as_the_scheduler_counts_them(
    spec: dict[str, Any], requests: dict[str, object]
) -> None:
    assert pod_requests(spec) == requests


def test_other_pods_reduce_the_offer_down_to_zero() -> None:
    found = machine(None, theirs(container(cpu="2", memory="1Gi")))
    assert (found.cpu_milli, found.memory_mib) == (6000, 15 * 1024)
    found = machine(None, theirs(container(cpu="20", memory="20Gi")))
    assert (found.cpu_milli, found.memory_mib) == (0, 0)


@pytest.mark.parametrize("ready", ["False", "Unknown"])
def test_a_node_that_is_not_ready_is_unknown(ready: str) -> None:
    assert offer(node(ready, cpu="8", memory="8Gi")) is None


def test_an_unreadable_amount_makes_the_node_unknown() -> None:
    with pytest.raises(ValueError, match="pod theirs: 'lots'"):
        offer(node(cpu="8", memory="8Gi"), theirs(container(cpu="lots")))


@pytest.mark.parametrize(("answer", "coming"), [(None, True), ("no devices were found", False)])
def test_gpus_without_a_readable_answer_are_unknown_and_not_none(answer: str | None, coming: bool) -> None:
    found = machine(None, lease("lease-0"), answers={"lease-0": answer})
    assert (found.devices, found.coming) == (None, coming)
    assert "lease-0" in found.trouble


def test_a_gpu_that_another_pod_uses_is_not_offered() -> None:
    user = theirs({**container(cpu="1"), "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1f"}]})
    assert machine(None, lease("lease-0"), user, answers=ANSWER).devices == ()


def test_ended_and_unbound_pods_use_nothing() -> None:
    def usage(phase: str) -> PodUsage | None:
        return usage_of({**bound(theirs(container(cpu="1"))), "status": {"phase": phase}}, LEASE, OURS)

    assert [usage(phase) is not None for phase in ("Running", "Succeeded", "Failed")] == [True, False, False]
    assert usage_of(theirs(container(cpu="1")), LEASE, OURS) is None


def test_of_a_pod_without_gpu_only_its_amounts_are_kept() -> None:
    plain = bound(theirs(container(cpu="2", memory="1Gi")))
    assert usage_of(plain, LEASE, OURS) == PodUsage("gpu1", 2000, 1000 * 2**30)


def test_a_pruned_node_reads_the_same() -> None:
    whole = node(cpu="8", memory="8Gi")
    whole["metadata"] |= {"labels": {GROUP: "class", "env": "x"}, "managedFields": [{"manager": "kubelet"}]}
    whole["spec"] = {"taints": [{"key": "team", "effect": "NoSchedule"}]}
    whole["status"]["images"] = [{"names": ["a"], "sizeBytes": 1}]
    own = pruned(whole)
    assert machine(own) == machine(whole)
    assert digest(own) == digest(whole)
    assert "images" not in own["status"]
    assert "managedFields" not in own["metadata"]
    assert own["metadata"]["labels"]["env"] == "x"


@pytest.mark.parametrize(("namespace", "free"), [("jhub", 8000), ("elsewhere", 6000)])
def test_only_pods_of_our_namespace_are_ours(namespace: str, free: int) -> None:
    pod = theirs(container(cpu="2"))
    pod["metadata"] |= {"labels": {"fgpu.installation": "lab"}, "namespace": namespace}
    assert machine(None, pod).cpu_milli == free


def test_only_labelled_or_named_nodes_are_ours() -> None:
    plain = node(cpu="1")
    assert not is_ours(plain, ())
    assert is_ours(plain, ("gpu1",))
    plain["metadata"]["labels"] = {GROUP: "class"}
    assert is_ours(plain, ())
    assert machine(plain).group == "class"


def test_a_node_that_may_not_be_read_is_as_told_and_ready_unless_our_pods_there_are_cut_off() -> None:
    spec = {"name": "gpu1", "cpu": 4, "memory_mib": 8192}
    conditions = {"ContainersReady": "True", "Ready": "True"}

    def ready_with(**changed: str) -> bool:
        pod = lease("lease-0")
        own = [{"type": kind, "status": value} for kind, value in {**conditions, **changed}.items()]
        return is_ready(told_node(spec, [{**pod, "status": {"phase": "Running", "conditions": own}}]))

    assert ready_with()
    assert ready_with(ContainersReady="False", Ready="False"), "its own container is not ready"
    assert not ready_with(Ready="False"), "the cluster has marked the pod, not its kubelet"
    assert is_ready(told_node(spec, []))
    gpus = [gpus_of(told_node({**spec, **more}, [lease("lease-0")])) for more in ({}, {"gpus": ["GPU-1f"]})]
    assert gpus == [2, 1], "one lease more looks for GPUs that are not listed"
    assert untold([spec]) == ""
    assert "has no cpu and memory_mib for gpu1" in untold([{"name": "gpu1", "cpu": 4}])
    assert "is empty" in untold([])


TEAM = {"key": "team", "value": "vision", "effect": "NoSchedule"}
ZONE = {"key": "zone", "operator": "In", "values": ["a", "b"]}


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    """Return a pod's spec with these terms of node affinity; a node has to meet one."""
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"affinity": {"nodeAffinity": rule}}


def expressions(*each: dict[str, Any]) -> dict[str, Any]:
    return required({"matchExpressions": list(each)})


@pytest.mark.parametrize(
    ("node_has", "pod_says", "closed"),
    [
        ({}, {}, False),
        ({"unschedulable": True}, {"tolerations": [{"operator": "Exists"}]}, True),
        ({"taints": [{**TEAM, "effect": "PreferNoSchedule"}]}, {}, False),
        ({"taints": [TEAM]}, {}, True),
        ({"taints": [TEAM]}, {"tolerations": [{"key": "team", "value": "vision"}]}, False),
        ({"taints": [TEAM]}, {"tolerations": [{**TEAM, "operator": "Equal"}]}, False),
        ({"taints": [TEAM]}, {"tolerations": [{"key": "team", "value": "speech"}]}, True),
        ({"taints": [TEAM]}, {"tolerations": [{"key": "team", "operator": "Exists"}]}, False),
        ({"taints": [TEAM]}, {"tolerations": [{**TEAM, "effect": "NoExecute"}]}, True),
        ({"taints": [TEAM, {"key": "x", "effect": "NoExecute"}]}, {"tolerations": [TEAM]}, True),
        ({"taints": [TEAM]}, {"tolerations": [{"operator": "Exists"}]}, False),
        ({}, {"nodeSelector": {"zone": "a"}}, False),
        ({}, {"nodeSelector": {"zone": "b"}}, True),
        ({}, expressions(ZONE), False),
        ({}, expressions({**ZONE, "operator": "NotIn"}), True),
        ({}, expressions({"key": "disk", "operator": "NotIn", "values": ["hdd"]}), False),
        ({}, expressions({"key": "disk", "operator": "Exists"}), True),
        ({}, expressions({"key": "disk", "operator": "DoesNotExist"}), False),
        ({}, expressions({"key": "year", "operator": "Gt", "values": ["2023"]}), False),
        ({}, expressions({"key": "year", "operator": "Lt", "values": ["2023"]}), True),
        ({}, expressions(ZONE, {"key": "disk", "operator": "Exists"}), True),
        (
            {},
            required({"matchExpressions": [{**ZONE, "values": ["c"]}]}, {"matchExpressions": [ZONE]}),
            False,
        ),
        ({}, required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["x"]}]}), True),
    ],
)
def test_a_node_is_closed_if_the_cluster_would_not_bind_a_session(
    node_has: dict[str, Any], pod_says: dict[str, Any], closed: bool
) -> None:
    own = {**node(), "spec": node_has}
    own["metadata"]["labels"] = {"zone": "a", "year": "2024"}
    assert is_closed(own, pod_says) is closed


def test_a_change_of_taints_or_labels_is_a_change_of_the_node() -> None:
    plain = node(cpu="8")
    tainted = {**plain, "spec": {"taints": [TEAM]}}
    labelled = {**plain, "metadata": {**plain["metadata"], "labels": {"zone": "a"}}}
    assert len({digest(plain), digest(tainted), digest(labelled)}) == 3
