"""What nodes have, as the API writes it."""

from __future__ import annotations

from decimal import Decimal
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
    machine_of,
    pod_requests,
    pruned,
    usage_of,
)
from fgpuspawner.settings.nodes import Machine


def node(ready: str = "True", **allocatable: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpu1"},
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]},
    }


LEASE = Lease("lab")
OURS = PodOwner("lab", "jhub")


def has(ready: dict[str, Any], others: list[dict[str, Any]], **beside: Any) -> Machine | None:
    found = [one for pod in others if (one := usage_of(on(pod), LEASE, OURS)) is not None]
    return machine_of(ready, found, LEASE, GpuRecords(**beside), {})


def on(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod, bound to the node."""
    return {**pod, "spec": {"nodeName": "gpu1", **pod["spec"]}}


def asks(*containers: dict[str, str], init: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "metadata": {"name": "theirs"},
        "spec": {
            "containers": [{"resources": {"requests": c}} for c in containers],
            "initContainers": [{"resources": {"requests": init}}] if init else [],
        },
    }


def test_what_pods_of_others_take_is_not_ours() -> None:
    found = has(node(cpu="8", memory="16Gi"), [asks({"cpu": "1500m"}, {"cpu": "500m", "memory": "1Gi"})])
    assert found is not None
    assert (found.cpu_milli, found.memory_mib) == (6000, 15 * 1024)


def test_a_container_that_runs_before_counts_where_it_asks_for_more() -> None:
    pod = asks({"cpu": "1", "memory": "1Gi"}, init={"cpu": "100m", "memory": "2Gi"})
    assert pod_requests(pod) == {"cpu": Decimal(1), "memory": Decimal(2 * 2**30)}


def test_a_sidecar_counts_beside_the_containers_and_beside_those_that_run_after_it() -> None:
    def container(cpu: str, **more: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    sidecar = container("1", restartPolicy="Always")
    spec = {"containers": [container("2")], "initContainers": [sidecar, container("1500m")]}
    assert pod_requests({"spec": spec}) == {"cpu": Decimal(3)}
    spec["initContainers"] = [container("1500m"), sidecar, container("5")]
    assert pod_requests({"spec": spec}) == {"cpu": Decimal(6)}


def test_what_a_pod_asks_for_as_a_whole_counts_in_place_of_what_its_containers_ask_for() -> None:
    pod = asks({"cpu": "1", "memory": "1Gi"})
    pod["spec"] |= {"resources": {"requests": {"cpu": "4"}}, "overhead": {"cpu": "500m"}}
    assert pod_requests(pod) == {"cpu": Decimal("4.5"), "memory": Decimal(2**30)}


def test_limits_stand_for_requests_that_are_not_made() -> None:
    assert pod_requests({"spec": {"containers": [{"resources": {"limits": {"cpu": "2"}}}]}}) == {
        "cpu": Decimal(2)
    }


def test_a_node_that_is_full_has_nothing_and_not_less() -> None:
    found = has(node(cpu="1", memory="1Gi"), [asks({"cpu": "2", "memory": "2Gi"})])
    assert found is not None
    assert (found.cpu_milli, found.memory_mib) == (0, 0)


@pytest.mark.parametrize("ready", ["False", "Unknown"])
def test_what_a_node_has_that_is_not_ready_is_not_known(ready: str) -> None:
    assert has(node(ready, cpu="8", memory="8Gi"), []) is None


def test_a_lease_pod_of_ours_gives_its_gpu_and_somebody_elses_does_not() -> None:
    own = lease("lease-0", "lab")
    answer = "0, GPU-1f, NVIDIA A100, 40960\n"
    found = has(
        node(cpu="8", memory="8Gi"), [own], pods=[own, lease("x", "other")], lease_answers={"lease-0": answer}
    )
    assert found is not None
    assert [(d.uuid, d.memory_mib) for d in found.devices or ()] == [("GPU-1f", 40960)]


def test_gpus_that_are_not_told_yet_are_not_known_and_not_none() -> None:
    own = lease("lease-0", "lab")
    found = has(node(cpu="8", memory="8Gi"), [own], pods=[own])
    assert found is not None
    assert found.devices is None
    assert "lease-0" in found.trouble
    assert found.coming, "the Hub asks by itself"


def test_gpus_that_a_lease_pod_has_named_badly_need_somebody_to_look() -> None:
    own = lease("lease-0", "lab")
    found = has(
        node(cpu="8", memory="8Gi"), [own], pods=[own], lease_answers={"lease-0": "no devices were found"}
    )
    assert found is not None
    assert (found.devices, found.coming) == (None, False)


def lease(name: str, installation: str) -> dict[str, Any]:
    pod = LEASE.lease_pod(name=name, node="gpu1", image="i", command=["sleep"])
    pod["metadata"] |= {"labels": {"fgpu.lease": installation}, "namespace": "jhub"}
    return {**pod, "spec": {**pod["spec"], "nodeName": "gpu1"}, "status": {"phase": "Running"}}


def test_what_has_ended_or_is_bound_nowhere_takes_nothing() -> None:
    def pod(name: str, phase: str = "Running") -> dict[str, Any]:
        return {**on(asks({"cpu": "1"})), "metadata": {"name": name}, "status": {"phase": phase}}

    waiting = {**asks({"cpu": "1"}), "metadata": {"name": "waiting"}}
    pods = [pod("one"), pod("done", "Succeeded"), pod("failed", "Failed"), waiting]
    assert [usage_of(p, LEASE, OURS) is not None for p in pods] == [True, False, False, False]


def test_of_a_pod_that_has_no_gpu_nothing_is_kept_but_what_it_takes() -> None:
    plain = on(asks({"cpu": "2", "memory": "1Gi"}))
    assert usage_of(plain, LEASE, OURS) == PodUsage("gpu1", Decimal(2), Decimal(2**30))
    plain["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1f"}]
    found = usage_of(plain, LEASE, OURS)
    assert found is not None
    assert found.pod is not None


def test_a_gpu_of_which_a_pod_of_others_has_part_is_not_offered() -> None:
    own = lease("lease-0", "lab")
    answer = {"lease-0": "0, GPU-1f, NVIDIA A100, 40960\n"}
    theirs = asks({"cpu": "1"})
    theirs["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1f"}]
    found = has(node(cpu="8", memory="8Gi"), [own, theirs], pods=[own], lease_answers=answer)
    assert found is not None
    assert found.devices == ()


def test_a_node_with_a_pod_whose_amounts_nobody_can_read_is_not_read_either() -> None:
    with pytest.raises(ValueError, match="pod theirs: 'lots'"):
        has(node(cpu="8", memory="8Gi"), [asks({"cpu": "lots"})])


def test_what_is_kept_of_a_node_is_all_that_is_looked_at() -> None:
    whole = node(cpu="8", memory="8Gi")
    whole["metadata"] |= {"labels": {GROUP: "class"}, "managedFields": [{"manager": "kubelet"}]}
    whole["spec"] = {"taints": [{"key": "team", "effect": "NoSchedule"}], "podCIDR": "10.0.0.0/24"}
    whole["status"]["images"] = [{"names": ["a"], "sizeBytes": 1}]
    own = pruned(whole)
    assert has(own, []) == has(whole, [])
    assert digest(own) == digest(whole)
    assert "images" not in own["status"]
    assert "managedFields" not in own["metadata"]


@pytest.mark.parametrize(("namespace", "free"), [("jhub", 8000), ("elsewhere", 6000)])
def test_only_pods_of_our_namespace_are_ours_whatever_their_labels_say(namespace: str, free: int) -> None:
    pod = asks({"cpu": "2"})
    pod["metadata"] |= {"labels": {"fgpu.installation": "lab"}, "namespace": namespace}
    found = has(node(cpu="8", memory="1Gi"), [pod])
    assert found is not None
    assert found.cpu_milli == free


def test_only_nodes_with_the_label_are_used_or_those_that_are_named() -> None:
    plain = node(cpu="1")
    assert not is_ours(plain, ())
    assert is_ours(plain, ("gpu1",))
    plain["metadata"]["labels"] = {GROUP: "class"}
    assert is_ours(plain, ())
    found = has(plain, [])
    assert found is not None
    assert found.group == "class"


TEAM = {"key": "team", "value": "vision", "effect": "NoSchedule"}
ZONE = {"key": "zone", "operator": "In", "values": ["a", "b"]}


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    """A pod's spec with these terms of node affinity, of which a node has to meet one."""
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
def test_a_node_is_closed_where_the_cluster_would_not_bind_a_session(
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
