"""An autoscaler sees requests that wait, as placeholders; the nodes that it would add are played by node objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deviceplugin import RESOURCE, DevicePlugin
from hubs import MERGE, PODS, SMALL, Cluster, on
from kubeapi import ApiError

from hubprocess import HubProcess, until

A = "GPU-aaaa"
WHOLE = {"fgpu": "2", **SMALL}
HALF = {"fgpu": "1", **SMALL}
CLASS = "fgpu-test-scaling"
LOW = "fgpu-placeholder"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
FAKE = "autoscaled"
SETTINGS = f"""
c.KubernetesFGPUSpawner.lease_image = "fgpuspawner/base:0.1"
c.KubernetesFGPUSpawner.runtime_class = {CLASS!r}
c.KubernetesFGPUSpawner.placeholder_priority_class = {LOW!r}
c.KubernetesFGPUSpawner.most_placeholders = 2
"""


@pytest.fixture
def plugin(cluster: Cluster, tmp_path: Path) -> Iterator[DevicePlugin]:
    cluster.ask("POST", CLASSES, body={"metadata": {"name": CLASS}, "handler": "runc"})
    cluster.ask("POST", PRIORITIES, body={"metadata": {"name": LOW}, "value": -5})
    cluster.change_node({"metadata": {"labels": {"fgpu.group": "default"}}})
    plugin = DevicePlugin(tmp_path / "plugin", [A]).start()
    path = f"/api/v1/nodes/{cluster.name}"
    try:
        until(lambda: cluster.ask("GET", path)["status"]["allocatable"].get(RESOURCE) == "1")
        yield plugin
    finally:
        plugin.stop()
        cluster.change_node({"metadata": {"labels": {"fgpu.group": None}}})
        for label in ("fgpu.lease", "fgpu.placeholder"):
            cluster.ask("DELETE", PODS, query=[("labelSelector", label)], body={"gracePeriodSeconds": 1})
        cluster.ask("DELETE", f"{PRIORITIES}/{LOW}")
        cluster.ask("DELETE", f"{CLASSES}/{CLASS}")


def of(cluster: Cluster, hub: HubProcess, label: str) -> dict[str, dict[str, Any]]:
    """Return the pods of a kind that are not being deleted, by name; placeholders by their session's id."""
    query = [("labelSelector", f"{label}={hub.store.installation_id}")]
    found = cluster.ask("GET", PODS, query=query)["items"]
    there = [p for p in found if "deletionTimestamp" not in p["metadata"]]
    before = f"fgpu-{hub.store.installation_id}-placeholder-"
    return {p["metadata"]["name"].removeprefix(before): p for p in there}


def is_unschedulable(pod: dict[str, Any]) -> bool:
    return any(c.get("reason") == "Unschedulable" for c in pod["status"].get("conditions") or ())


@contextmanager
def added_node(cluster: Cluster) -> Iterator[None]:
    """A node object with one GPU, as an autoscaler would add; no kubelet is behind it."""
    path = f"/api/v1/nodes/{FAKE}"
    cluster.ask(
        "POST", "/api/v1/nodes", body={"metadata": {"name": FAKE, "labels": {"fgpu.group": "default"}}}
    )
    has = {"cpu": "4", "memory": "8Gi", "pods": "20", RESOURCE: "1"}
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"status": {"capacity": has, "allocatable": has, "conditions": conditions}}
    try:
        cluster.ask("PATCH", f"{path}/status", body=status, content=MERGE)
        cluster.ask("PATCH", path, body={"spec": {"taints": None}}, content=MERGE)
        yield
    finally:
        cluster.ask("DELETE", path)
        for pod in cluster.ask("GET", PODS, query=[("fieldSelector", f"spec.nodeName={FAKE}")])["items"]:
            try:
                cluster.ask("DELETE", f"{PODS}/{pod['metadata']['name']}", body={"gracePeriodSeconds": 0})
            except ApiError as e:
                if e.status != 404:
                    raise


@pytest.mark.usefixtures("plugin")
def test_autoscaler_sees_what_waits_until_it_starts_or_ends(cluster: Cluster, tmp_path: Path) -> None:
    with on(cluster, tmp_path / "hub", before=SETTINGS, nodes=[], isolation="none") as hub:
        until(lambda: any(n.devices for n in hub.store.snapshot(0).nodes), within_s=60)
        for user, options in (("ann", WHOLE), ("ben", HALF), ("cat", HALF), ("dan", WHOLE)):
            hub.add_user(user)
            assert hub.spawn(user, options=options).status_code in (201, 202)
            until(lambda user=user: f"{user}/" in hub.states())
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING", "cat/": "PENDING", "dan/": "PENDING"})
        (pod,) = cluster.pods(hub).values()
        assert pod["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        (lease,) = of(cluster, hub, "fgpu.lease").values()
        assert lease["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "true"

        ids = {user: str(hub.sessions()[f"{user}/"].id) for user in ("ben", "dan")}
        until(
            lambda: set(of(cluster, hub, "fgpu.placeholder")) == set(ids.values()),
            within_s=60,
            what="two halves share one placeholder",
        )
        until(lambda: all(map(is_unschedulable, of(cluster, hub, "fgpu.placeholder").values())))
        (container,) = of(cluster, hub, "fgpu.placeholder")[ids["ben"]]["spec"]["containers"]
        assert container["resources"]["requests"] == {"cpu": "100m", "memory": "128Mi", RESOURCE: "1"}

        with added_node(cluster):
            until(
                lambda: any(
                    p["spec"].get("nodeName") == FAKE for p in of(cluster, hub, "fgpu.lease").values()
                ),
                within_s=60,
                what="the new node's GPU is leased, and no placeholder keeps it",
            )
            taken = of(cluster, hub, "fgpu.placeholder").values()
            assert not any(p["spec"].get("nodeName") == FAKE for p in taken)

        assert hub.stop("dan").status_code in (202, 204)
        until(lambda: ids["dan"] not in of(cluster, hub, "fgpu.placeholder"), within_s=60)
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({"ben/": "RUNNING", "cat/": "RUNNING"})
        until(lambda: not of(cluster, hub, "fgpu.placeholder"), within_s=60)
        assert "cannot be told of waiting requests" not in hub.log_text()
        for user in ("ben", "cat"):
            hub.stop(user)
        hub.reach({})
