"""What nodes have, as the API writes it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from fgpuspawner.engines.kubernetes.dialects import Beside, Lease
from fgpuspawner.engines.kubernetes.inventory import (
    GROUP,
    Owner,
    by_node,
    is_closed,
    is_ours,
    machine_of,
    taken_by,
)
from fgpuspawner.settings.nodes import Machine


def node(ready: str = "True", **allocatable: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpu1"},
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]},
    }


LEASE = Lease("lab")
OURS = Owner("lab", "jhub")


def has(ready: dict[str, Any], others: list[dict[str, Any]], **beside: Any) -> Machine | None:
    return machine_of(ready, others, LEASE, Beside(**beside), owner=OURS)


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
    assert taken_by(pod) == {"cpu": Decimal(1), "memory": Decimal(2 * 2**30)}


def test_limits_stand_for_requests_that_are_not_made() -> None:
    assert taken_by({"spec": {"containers": [{"resources": {"limits": {"cpu": "2"}}}]}}) == {
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
    found = has(node(cpu="8", memory="8Gi"), [own], pods=[own, lease("x", "other")], told={"lease-0": answer})
    assert found is not None
    assert [(d.uuid, d.memory_mib) for d in found.devices or ()] == [("GPU-1f", 40960)]


def test_gpus_that_are_not_told_yet_are_not_known_and_not_none() -> None:
    own = lease("lease-0", "lab")
    found = has(node(cpu="8", memory="8Gi"), [own], pods=[own])
    assert found is not None
    assert found.devices is None
    assert "lease-0" in found.trouble


def lease(name: str, installation: str) -> dict[str, Any]:
    pod = LEASE.lease_pod(name=name, node="gpu1", image="i", command=["sleep"])
    pod["metadata"] |= {"labels": {"fgpu.lease": installation}, "namespace": "jhub"}
    return {**pod, "spec": {**pod["spec"], "nodeName": "gpu1"}, "status": {"phase": "Running"}}


def test_what_has_ended_or_is_bound_nowhere_takes_nothing() -> None:
    def pod(name: str, phase: str = "Running") -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"nodeName": "gpu1"}, "status": {"phase": phase}}

    waiting = {"metadata": {"name": "waiting"}, "spec": {}}
    found = by_node([pod("one"), pod("done", "Succeeded"), pod("failed", "Failed"), waiting])
    assert {name: [p["metadata"]["name"] for p in pods] for name, pods in found.items()} == {"gpu1": ["one"]}


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


@pytest.mark.parametrize(
    ("spec", "closed"),
    [
        ({}, False),
        ({"unschedulable": True}, True),
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, False),
        ({"taints": [{"key": "team", "effect": "NoSchedule"}]}, True),
        ({"taints": [{"key": "team", "effect": "PreferNoSchedule"}]}, False),
    ],
)
def test_a_node_is_closed_where_sessions_would_not_be_bound(spec: dict[str, Any], closed: bool) -> None:
    assert is_closed({**node(), "spec": spec}) is closed
