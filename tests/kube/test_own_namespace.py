"""A Hub whose account has a Role in its own namespace, and no right beyond it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import World
from deviceplugin import RESOURCE, DevicePlugin
from hubs import SMALL, on
from test_kube_check import LEASED, check

from fgpu_scheduler import NodeState
from fgpuspawner.engines.kubernetes.rights import RIGHTS, rights_of
from hubprocess import HubProcess, until

A, B = "GPU-aaaa", "GPU-bbbb"
WHOLE = {"fgpu": "2", **SMALL}
CLASS = "fgpu-test-own"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
LEASING = f"""
c.KubernetesFGPUSpawner.lease_image = "fgpuspawner/base:0.1"
c.KubernetesFGPUSpawner.runtime_class = {CLASS!r}
"""


@pytest.fixture
def only_a_role(world: World) -> Iterator[None]:
    world.give(list(rights_of("lease", "namespace")))
    nodes = next(right for right in RIGHTS if right.resource == "nodes")
    until(lambda: not world.may(nodes, "list"), what="the right is gone")
    yield
    world.give(list(RIGHTS))


@pytest.fixture
def plugin(world: World, tmp_path: Path) -> Iterator[DevicePlugin]:
    world.cluster.ask("POST", CLASSES, body={"metadata": {"name": CLASS}, "handler": "runc"})
    plugin = DevicePlugin(tmp_path / "plugin", [A, B]).start()
    path = f"/api/v1/nodes/{world.cluster.name}"
    try:
        until(lambda: world.cluster.ask("GET", path)["status"]["allocatable"].get(RESOURCE) == "2")
        yield plugin
    finally:
        plugin.stop()
        world.cluster.ask("DELETE", f"{CLASSES}/{CLASS}")


def state(hub: HubProcess) -> NodeState:
    (node,) = hub.store.snapshot(int(time.time())).nodes
    return node.state


@pytest.mark.usefixtures("only_a_role", "plugin")
@pytest.mark.timeout(400)
def test_sessions_run_on_leased_gpus_and_a_node_away_is_seen_by_its_pods(
    world: World, tmp_path: Path
) -> None:
    node = {"name": world.cluster.name, "cpu": 2, "memory_mib": 2048}
    own = {"namespace": world.namespace, "kubeconfig": str(world.kubeconfig)}
    with on(world.cluster, tmp_path / "hub", before=LEASING, nodes=[node], isolation="none", **own) as hub:
        until(lambda: {d.uuid for n in hub.store.snapshot(0).nodes for d in n.devices} == {A, B}, within_s=60)
        for user in ("ann", "ben", "cat"):
            hub.add_user(user)
            assert hub.spawn(user, options=WHOLE).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "RUNNING", "cat/": "PENDING"})
        hub.kill()
        hub.start()
        hub.reach({"ann/": "RUNNING", "ben/": "RUNNING", "cat/": "PENDING"})
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({"ben/": "RUNNING", "cat/": "RUNNING"})

        until(lambda: state(hub) is NodeState.READY, within_s=60)
        with world.cluster.frozen("kubelet"):
            until(lambda: state(hub) is NodeState.LOST, within_s=120)
            assert hub.states() == {"ben/": "RUNNING", "cat/": "RUNNING"}
        until(lambda: state(hub) is NodeState.READY, within_s=60)
        assert "The Hub may not list and watch nodes in the whole cluster: nodes, with" in hub.log_text()
        assert "forbidden" not in hub.log_text().lower()
        for user in ("ben", "cat"):
            assert hub.stop(user).status_code in (202, 204)
        hub.reach({})


@pytest.mark.usefixtures("only_a_role")
def test_check_names_what_is_not_known_with_only_a_role(world: World, tmp_path: Path) -> None:
    status, lines = check(world, tmp_path, gpus={"simulated": 1})
    assert status == 1
    node = world.cluster.name
    assert any(f"c.FGPU.nodes has no cpu and memory_mib for {node}" in line for line in lines)
    more = LEASED + '\nc.KubernetesFGPUSpawner.runtime_class = ""'
    status, lines = check(world, tmp_path, more=more, sizes={"cpu": 2, "memory_mib": 2048})
    assert status == 0, lines
    warned = [line.split(" (")[0] for line in lines if line.startswith("WARN: the caller")]
    assert warned == [
        "WARN: the caller may not list, watch nodes in the whole cluster",
        "WARN: the caller may not list, watch pods in the whole cluster",
    ]
    assert f"OK: node {node}: as c.FGPU.nodes describes it; whether it is there is not seen" in lines
