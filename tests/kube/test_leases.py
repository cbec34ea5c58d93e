"""The dialect `lease` with a device plugin of the tests: the kubelet registers its GPUs and gives them to pods.

libfgpu needs a driver, and is not tested here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from deviceplugin import MEMORY_MIB, RESOURCE, DevicePlugin
from hubs import PODS, SMALL, Cluster, on
from kubeapi import ApiError

from fgpu_scheduler import Device, NodeState
from fgpuspawner.engines.kubernetes.dialects.base import quantity
from fgpuspawner.engines.kubernetes.inventory import pod_requests
from hubprocess import PATIENCE, HubProcess, until

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"
WHOLE = {"fgpu": "2", **SMALL}
HALF = {"fgpu": "1", **SMALL}
IMAGE = "fgpuspawner/base:0.1"
CLASS = "fgpu-test"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
LEASING = f"""
c.KubernetesFGPUSpawner.lease_image = {IMAGE!r}
c.KubernetesFGPUSpawner.runtime_class = {CLASS!r}
"""
SOON_S = 20.0 * PATIENCE
"""The kubelet tells of a card in up to 4 s here (10 s where nothing is set), the rest is ours."""
GIVEN_BACK_S = 60.0
ROUNDS_FOR_S = 270


@pytest.fixture(scope="module")
def plugin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevicePlugin]:
    body = {"metadata": {"name": CLASS}, "handler": "runc"}
    cluster.ask("POST", CLASSES, body=body)
    cluster.change_node({"metadata": {"labels": {"fgpu.group": "default"}}})
    plugin = DevicePlugin(tmp_path_factory.mktemp("plugin"), [A, B]).start()
    try:
        until(lambda: cards(cluster) == 2, what="the node has its cards")
        yield plugin
    finally:
        plugin.stop()
        cluster.change_node({"metadata": {"labels": {"fgpu.group": None}}})
        cluster.ask("DELETE", f"{CLASSES}/{CLASS}")


@pytest.fixture(scope="module")
def hub(
    cluster: Cluster, plugin: DevicePlugin, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("hub")
    with on(cluster, folder, before=LEASING, nodes=[], isolation="none") as hub:
        try:
            for user in ("ann", "ben", "cat"):
                hub.add_user(user)
            yield hub
        finally:
            hub.terminate()
            give_back(cluster, hub)


@pytest.fixture(autouse=True)
def both_cards(hub: HubProcess) -> Iterator[None]:
    """Each test begins with two offered GPUs without sessions."""
    until(lambda: offered(hub) == {A, B}, within_s=60, what="both cards are offered")
    until(lambda: node_state(hub) is NodeState.READY)
    yield
    for name in hub.states():
        hub.stop(name.removesuffix("/"))
    hub.reach({})


def give_back(cluster: Cluster, hub: HubProcess) -> None:
    """Give the GPUs back as docs/kubernetes.md describes: delete the lease pods."""
    for name in leases(cluster, hub):
        remove(cluster, name)


def remove(cluster: Cluster, name: str) -> None:
    try:
        cluster.ask("DELETE", f"{PODS}/{name}", body={"gracePeriodSeconds": 1})
    except ApiError as e:
        if e.status != 404:
            raise


def cards(cluster: Cluster) -> int:
    """Return how many GPUs the cluster counts on the node."""
    node = cluster.ask("GET", f"/api/v1/nodes/{cluster.name}")
    return int(node["status"]["allocatable"].get(RESOURCE, 0))


def leases(cluster: Cluster, hub: HubProcess) -> dict[str, dict[str, Any]]:
    """Return the lease pods that are not being deleted, by name."""
    query = [("labelSelector", f"fgpu.lease={hub.store.installation_id}")]
    found = cluster.ask("GET", PODS, query=query)["items"]
    return {p["metadata"]["name"]: p for p in found if "deletionTimestamp" not in p["metadata"]}


def devices(hub: HubProcess) -> list[Device]:
    return [d for n in hub.store.snapshot(int(time.time())).nodes for d in n.devices]


def offered(hub: HubProcess) -> set[str]:
    return {device.uuid for device in devices(hub)}


def node_state(hub: HubProcess) -> NodeState:
    (node,) = hub.store.snapshot(int(time.time())).nodes
    return node.state


def of_session(cluster: Cluster, hub: HubProcess, user: str) -> str:
    """Return the GPU that a session's pod names for the NVIDIA runtime."""
    session = hub.sessions()[f"{user}/"]
    assert session.placement is not None
    pod = cluster.pods(hub)[f"fgpu-{hub.store.installation_id}-{session.id}-{session.attempt}"]
    assert pod["spec"]["runtimeClassName"] == CLASS
    variables = {v["name"]: v.get("value") for v in pod["spec"]["containers"][0]["env"]}
    (share,) = session.placement.shares
    assert variables["NVIDIA_VISIBLE_DEVICES"] == share.device_uuid
    assert RESOURCE not in pod["spec"]["containers"][0]["resources"]["limits"]
    return share.device_uuid


def start(hub: HubProcess, user: str, options: dict[str, Any] = WHOLE) -> None:
    assert hub.spawn(user, options=options).status_code in (201, 202)


def took(what: str, began: float) -> None:
    print(f"\n{what}: {time.monotonic() - began:.1f} s")


def foreign(cluster: Cluster, name: str, *, cpu: str = "10m", card: bool = True, **spec: Any) -> None:
    """Make another application's pod, by default with a GPU."""
    container = {
        "name": "theirs",
        "image": IMAGE,
        "command": ["sleep", "600"],
        "resources": {
            "requests": {"cpu": cpu, "memory": "16Mi"},
            "limits": {RESOURCE: "1"} if card else {},
        },
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1, **spec}
    cluster.ask("POST", PODS, body={"metadata": {"name": name}, "spec": spec})


def phase(cluster: Cluster, name: str) -> str:
    return str(cluster.ask("GET", f"{PODS}/{name}")["status"]["phase"])


def test_each_gpu_is_leased_and_a_waiting_session_gets_an_added_gpu(
    cluster: Cluster, hub: HubProcess, plugin: DevicePlugin
) -> None:
    assert sorted((d.index, d.memory_mib, d.simulated) for d in devices(hub)) == [
        (0, MEMORY_MIB, False),
        (1, MEMORY_MIB, False),
    ]
    assert {p["status"]["phase"] for p in leases(cluster, hub).values()} == {"Running"}
    for user in ("ann", "ben", "cat"):
        start(hub, user)
    hub.reach({"ann/": "RUNNING", "ben/": "RUNNING", "cat/": "PENDING"})
    assert {of_session(cluster, hub, user) for user in ("ann", "ben")} == {A, B}

    began = time.monotonic()
    plugin.add(C)
    until(lambda: cards(cluster) == 3)
    took("a card is added: the kubelet tells it after", began)
    until(lambda: C in offered(hub))
    took("a card is added: offered after", began)
    assert time.monotonic() - began < SOON_S
    hub.reach({"ann/": "RUNNING", "ben/": "RUNNING", "cat/": "RUNNING"})
    took("a card is added: the session that waited runs after", began)
    assert of_session(cluster, hub, "cat") == C

    # A lost GPU keeps its lease while a session is on it, and takes no new session.
    began = time.monotonic()
    plugin.lose(C)
    until(lambda: offered(hub) == {A, B})
    took("a card is lost: not offered after", began)
    assert time.monotonic() - began < SOON_S
    assert len(leases(cluster, hub)) == 3
    assert hub.stop("cat").status_code in (202, 204)
    until(lambda: len(leases(cluster, hub)) == 2, within_s=GIVEN_BACK_S, what="its lease is given back")


def test_unhealthy_gpu_is_given_back_once_it_has_no_session(
    cluster: Cluster, hub: HubProcess, plugin: DevicePlugin
) -> None:
    start(hub, "ann", HALF)
    hub.reach({"ann/": "RUNNING"})
    card = of_session(cluster, hub, "ann")
    idle = B if card == A else A
    began = time.monotonic()
    plugin.call_unhealthy(idle)
    until(lambda: offered(hub) == {card}, within_s=60)
    took("a card is called unhealthy: not offered after", began)
    until(lambda: len(leases(cluster, hub)) == 1, within_s=GIVEN_BACK_S)
    assert hub.states() == {"ann/": "RUNNING"}
    plugin.add(idle)


def test_updated_device_plugin_changes_no_lease(
    cluster: Cluster, hub: HubProcess, plugin: DevicePlugin
) -> None:
    uids = {p["metadata"]["uid"] for p in leases(cluster, hub).values()}
    start(hub, "ann")
    hub.reach({"ann/": "RUNNING"})
    plugin.stop()
    until(lambda: cards(cluster) == 0, within_s=30)
    plugin.start()
    until(lambda: cards(cluster) == 2, within_s=30)
    time.sleep(3)
    assert {p["metadata"]["uid"] for p in leases(cluster, hub).values()} == uids
    assert offered(hub) == {A, B}


def test_gpu_taken_by_a_pod_of_higher_priority_is_not_offered_until_it_is_free(
    cluster: Cluster, hub: HubProcess
) -> None:
    cluster.ask("POST", PRIORITIES, body={"metadata": {"name": "important"}, "value": 1000})
    try:
        began = time.monotonic()
        foreign(cluster, "important", priorityClassName="important")
        until(lambda: phase(cluster, "important") == "Running", within_s=30)
        until(lambda: len(offered(hub)) == 1, within_s=SOON_S)
        took("a pod takes a card: not offered after", began)
        for user in ("ann", "ben"):
            start(hub, user)
        until(lambda: "RUNNING" in hub.states().values())
        time.sleep(3)
        assert sorted(hub.states().values()) == ["PENDING", "RUNNING"]
        held = [pod for pod in leases(cluster, hub).values() if pod["status"]["phase"] == "Running"]
        assert len(held) == 1
        assert len(leases(cluster, hub)) == 2, "the other one waits"
        began = time.monotonic()
        remove(cluster, "important")
        hub.reach({"ann/": "RUNNING", "ben/": "RUNNING"})
        took("a card is free again: the session that waited runs after", began)
    finally:
        remove(cluster, "important")
        cluster.ask("DELETE", f"{PRIORITIES}/important")


def test_killed_hub_keeps_its_leases_and_offers_no_other_gpu(cluster: Cluster, hub: HubProcess) -> None:
    start(hub, "ann")
    hub.reach({"ann/": "RUNNING"})
    card = of_session(cluster, hub, "ann")
    uids = {name: p["metadata"]["uid"] for name, p in leases(cluster, hub).items()}
    hub.kill()
    began = time.monotonic()
    hub.start()
    took("a Hub starts again: it answers after", began)
    until(lambda: node_state(hub) is NodeState.READY, within_s=SOON_S)
    took("a Hub starts again: its node takes sessions after", began)
    assert hub.states() == {"ann/": "RUNNING"}
    assert {name: p["metadata"]["uid"] for name, p in leases(cluster, hub).items()} == uids
    assert offered(hub) == {A, B}

    # While the Hub is down another pod takes the free GPU.
    hub.kill()
    (free,) = [
        name
        for name in uids
        if card.encode() not in cluster.run_in(name, "lease", ["printenv", "NVIDIA_VISIBLE_DEVICES"])
    ]
    remove(cluster, free)
    foreign(cluster, "theirs")
    try:
        until(lambda: phase(cluster, "theirs") == "Running", within_s=30)
        hub.start()
        start(hub, "ben")
        until(lambda: node_state(hub) is NodeState.READY, within_s=SOON_S)
        assert offered(hub) == {card}
        time.sleep(3)
        assert hub.states() == {"ann/": "RUNNING", "ben/": "PENDING"}
    finally:
        remove(cluster, "theirs")
    hub.reach({"ann/": "RUNNING", "ben/": "RUNNING"})


def test_gpus_of_a_removed_node_are_given_back_after_its_sessions_end(
    cluster: Cluster, hub: HubProcess
) -> None:
    start(hub, "ann")
    hub.reach({"ann/": "RUNNING"})
    cluster.change_node({"metadata": {"labels": {"fgpu.group": None}}})
    try:
        until(
            lambda: len(leases(cluster, hub)) == 1, within_s=GIVEN_BACK_S, what="the idle card is given back"
        )
        assert hub.states() == {"ann/": "RUNNING"}
        assert hub.stop("ann").status_code in (202, 204)
        until(lambda: leases(cluster, hub) == {}, within_s=GIVEN_BACK_S, what="the other one as well")
    finally:
        cluster.change_node({"metadata": {"labels": {"fgpu.group": "default"}}})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_pods_at_random_instants_over_commit_nothing(cluster: Cluster, hub: HubProcess) -> None:
    # The test before may have removed the node.
    until(lambda: offered(hub) == {A, B}, within_s=90)
    chance = random.Random(16)
    rounds = waited = 0
    began = time.monotonic()
    while time.monotonic() - began < ROUNDS_FOR_S:
        waited += one_round(cluster, hub, chance, rounds)
        rounds += 1
    print(f"\n{rounds} rounds in {time.monotonic() - began:.0f} s, {waited} sessions waited")
    assert rounds >= 4


def one_round(cluster: Cluster, hub: HubProcess, chance: random.Random, number: int) -> int:
    """Start sessions and other pods at random instants; return how many sessions waited."""
    others = [f"theirs-{number}-{n}" for n in range(chance.randint(1, 2))]
    comers = [*others, "ann", "ben"]
    chance.shuffle(comers)
    try:
        for comer in comers:
            time.sleep(chance.choice([0, 0.2, 1]))
            if comer not in others:
                start(hub, comer, {**chance.choice([HALF, WHOLE]), "cpu": "0.5"})
            elif chance.random() < 0.5:
                lose_a_lease(cluster, hub)
                foreign(cluster, comer)
            else:
                foreign(cluster, comer, cpu=f"{chance.choice([300, 900, 1500])}m", card=False)
        time.sleep(chance.choice([1, 3, 5]))
        check_nothing_is_over_committed(cluster, hub, others)
        states = hub.states()
        assert states.keys() == {"ann/", "ben/"}, "no session is lost"
    finally:
        for name in others:
            remove(cluster, name)
    # A place is given back after 30 s, and the node is tried again after another 30 s.
    hub.reach({"ann/": "RUNNING", "ben/": "RUNNING"}, within_s=180)
    check_nothing_is_over_committed(cluster, hub, others)
    for user in ("ann", "ben"):
        hub.stop(user)
    hub.reach({})
    until(lambda: offered(hub) == {A, B}, within_s=90)
    return sum(state != "RUNNING" for state in states.values())


def lose_a_lease(cluster: Cluster, hub: HubProcess) -> None:
    """Delete a lease without a session on its GPU."""
    placements = [s.placement for s in hub.sessions().values() if s.placement is not None]
    held = {share.device_uuid for p in placements for share in p.shares}
    for name, pod in leases(cluster, hub).items():
        if pod["status"]["phase"] == "Running" and card_of(cluster, name, "lease") not in held:
            remove(cluster, name)
            return


def card_of(cluster: Cluster, pod: str, container: str) -> str:
    return cluster.run_in(pod, container, ["printenv", "NVIDIA_VISIBLE_DEVICES"]).decode().strip()


def check_nothing_is_over_committed(cluster: Cluster, hub: HubProcess, others: list[str]) -> None:
    """Check the sums of requests, and that no session is on another pod's GPU."""
    has = cluster.ask("GET", f"/api/v1/nodes/{cluster.name}")["status"]["allocatable"]
    pods = cluster.ask("GET", "/api/v1/pods")["items"]
    bound = [pod for pod in pods if pod["spec"].get("nodeName") == cluster.name]
    taken = [pod_requests(pod) for pod in bound if pod["status"]["phase"] not in ("Succeeded", "Failed")]
    for name in ("cpu", "memory", RESOURCE):
        assert sum(t[name] for t in taken) <= 1000 * quantity(has[name]), name
    there = {pod["metadata"]["name"]: pod for pod in bound if pod["status"]["phase"] == "Running"}
    with_card = [n for n in others if n in there and RESOURCE in pod_requests(there[n])]
    theirs = {card_of(cluster, name, "theirs") for name in with_card}
    for session in hub.sessions().values():
        if session.state == "RUNNING":
            assert session.placement is not None
            assert theirs.isdisjoint(share.device_uuid for share in session.placement.shares)
