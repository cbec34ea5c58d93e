"""Dialects where the cluster chooses the GPU, on a real cluster. A stand-in for Volcano binds the pods.

The pods run, without GPUs; the API server and, with `mig`, the scheduler count what they ask for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hubs import MERGE, PODS, SMALL, Cluster, on
from kubeapi import ApiError, KubeApi

from hubprocess import HubProcess, until

PROFILE = "nvidia.com/mig-1g.10gb"
HALF = {"fgpu": "1", **SMALL}


class Scheduler:
    """Another scheduler, that binds each pod of these users to the node."""

    def __init__(self, cluster: Cluster, name: str, users: Collection[str]) -> None:
        self._api = KubeApi.of(Path(cluster.kubeconfig))
        self._node = cluster.name
        self._name = name
        self._users = users
        self._over = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._bind_all, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(10)

    def _bind_all(self) -> None:
        while not self._over.wait(0.1):
            for pod in self._api.call("GET", PODS)["items"]:
                if pod["spec"].get("schedulerName") == self._name and not pod["spec"].get("nodeName"):
                    with contextlib.suppress(ApiError):
                        self._bind(pod)

    def _bind(self, pod: dict[str, Any]) -> None:
        name, user = pod["metadata"]["name"], pod["metadata"]["annotations"]["fgpu.user"]
        if user not in self._users:
            return
        target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
        self._api.call("POST", f"{PODS}/{name}/binding", body={"metadata": {"name": name}, "target": target})


@contextlib.contextmanager
def node_with(
    cluster: Cluster, *, labels: dict[str, str], resources: dict[str, str] | None = None
) -> Iterator[None]:
    """Have the node be one of sessions, with these labels and resources."""
    cluster.change_node({"metadata": {"labels": {"fgpu.group": "default", **labels}}})
    status = f"/api/v1/nodes/{cluster.name}/status"
    if resources:
        cluster.ask("PATCH", status, body={"status": {"capacity": resources}}, content=MERGE)

        def registered() -> bool:
            has = cluster.ask("GET", f"/api/v1/nodes/{cluster.name}")["status"]["allocatable"]
            return all(has.get(name) == amount for name, amount in resources.items())

        until(registered, what="the node has these resources")
    try:
        yield
    finally:
        cluster.change_node({"metadata": {"labels": dict.fromkeys(["fgpu.group", *labels])}})
        if resources:
            none = dict.fromkeys(resources)
            body = {"status": {"capacity": none, "allocatable": none}}
            cluster.ask("PATCH", status, body=body, content=MERGE)


def offered(hub: HubProcess) -> set[str]:
    return {d.uuid for n in hub.store.snapshot(int(time.time())).nodes for d in n.devices}


def pod_of(cluster: Cluster, hub: HubProcess, user: str) -> dict[str, Any]:
    session = hub.sessions()[f"{user}/"]
    return cluster.pods(hub)[f"fgpu-{hub.store.installation_id}-{session.id}-{session.attempt}"]


def variables(pod: dict[str, Any]) -> set[str]:
    return {v["name"] for v in pod["spec"]["containers"][0]["env"]}


def start(hub: HubProcess, *users: str, options: dict[str, Any]) -> None:
    for user in users:
        hub.add_user(user)
        assert hub.spawn(user, options=options).status_code in (201, 202)


def run(hub: HubProcess, *users: str, options: dict[str, Any]) -> None:
    start(hub, *users, options=options)
    until(lambda: all(hub.states().get(f"{user}/") == "RUNNING" for user in users), what=f"{users} run")


def test_mig_gives_each_session_an_instance_that_the_scheduler_counts(
    cluster: Cluster, tmp_path: Path
) -> None:
    before = 'c.KubernetesFGPUSpawner.dialect = "mig"'
    with (
        node_with(cluster, labels={f"{PROFILE}.memory": "9856"}, resources={PROFILE: "2"}),
        on(
            cluster,
            tmp_path,
            before=before,
            nodes=[],
            isolation="none",
            fgpu_per_gpu=1,
            fgpu_step="1",
        ) as hub,
    ):
        until(lambda: len(offered(hub)) == 2, what="both instances are offered")
        run(hub, "ann", "ben", options=HALF)
        start(hub, "cat", options=HALF)
        until(lambda: hub.states()["cat/"] == "PENDING", what="there is no third")
        pod = pod_of(cluster, hub, "ann")
        assert pod["spec"]["containers"][0]["resources"]["limits"][PROFILE] == "1"
        assert "CUDA_VISIBLE_DEVICES" not in variables(pod)
        assert hub.stop("ann").status_code in (202, 204)
        until(lambda: hub.states().get("cat/") == "RUNNING", what="cat has the one that is free")


def test_cce_gives_a_session_its_units(cluster: Cluster, tmp_path: Path) -> None:
    resources = {"volcano.sh/gpu-mem.128Mi": "126", "volcano.sh/gpu-core.percentage": "100"}
    volcano = Scheduler(cluster, "volcano", ["ann", "ben"])
    with (
        node_with(cluster, labels={}, resources=resources),
        volcano.running(),
        on(
            cluster,
            tmp_path,
            before='c.KubernetesFGPUSpawner.dialect = "cce"',
            nodes=[],
            isolation="none",
            fgpu_per_gpu=2,
        ) as hub,
    ):
        until(lambda: len(offered(hub)) == 1, what="the GPU is offered")
        run(hub, "ann", "ben", options=HALF)
        pod = pod_of(cluster, hub, "ann")
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert (limits["volcano.sh/gpu-mem.128Mi"], limits["volcano.sh/gpu-core.percentage"]) == ("63", "50")
        start(hub, "cat", options=HALF)
        until(lambda: hub.states()["cat/"] == "PENDING", what="there is no third")
