"""Faults of pods, nodes and the API: causes and messages of ends, and what the Hub survives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hubs import MERGE, MINI, PODS, SMALL, Cluster, on

from fgpu_scheduler import EndCause, Session
from hubprocess import PATIENCE, HubProcess, until

CATALOGUE = """
[[image]]
slug = "good"
name = "Good"
framework = "python"
version = "3.11"
python = "3.11"
reference = "fgpuspawner/base:0.1"
default = true

[[image]]
slug = "nowhere"
name = "Nowhere"
framework = "python"
version = "3.11"
python = "3.11"
reference = "127.0.0.1:9/nowhere:1"
"""
WHOLE = {"fgpu": "2", **SMALL, "image": "good"}
TOLD_WITHIN_S = 5.0 * PATIENCE
AWAY_S = 60
ZONE = "test.zone"
TAINT = {"key": "test", "value": "lab", "effect": "NoSchedule"}
ALONE = {"test": "alone"}
OPEN = {"spec": {"taints": None, "unschedulable": None}, "metadata": {"labels": {ZONE: "here"}}}
KUBESPAWNER = f"""
c.KubernetesFGPUSpawner.node_selector = {{{ZONE!r}: "here"}}
c.KubernetesFGPUSpawner.tolerations = [{{**{TAINT!r}, "operator": "Equal"}}]
c.KubernetesFGPUSpawner.pod_anti_affinity_required = [
    {{"labelSelector": {{"matchLabels": {ALONE!r}}}, "topologyKey": "kubernetes.io/hostname"}}
]
"""


@pytest.fixture(scope="module")
def hub(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("hub")
    (folder / "catalogue.toml").write_text(CATALOGUE)
    cluster.change_node({"metadata": {"labels": {ZONE: "here"}}})
    with on(cluster, folder, gpus=2, before=KUBESPAWNER, catalogue=str(folder / "catalogue.toml")) as found:
        yield found


@pytest.fixture
def ann(hub: HubProcess) -> Iterator[str]:
    hub.add_user("ann")
    yield "ann"
    if "ann/" in hub.states():
        hub.stop("ann")
    hub.reach({})


def started(hub: HubProcess, user: str, **options: Any) -> str:
    """Start a session and return the name of its pod."""
    assert hub.spawn(user, options={**WHOLE, **options}).status_code in (201, 202)
    hub.reach({f"{user}/": "RUNNING"})
    session = hub.sessions()[f"{user}/"]
    return f"fgpu-{hub.store.installation_id}-{session.id}-{session.attempt}"


@contextmanager
def another_node(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Add a node object without a machine, and yield a function that reports it as ready.

    While all its nodes are away a cluster evicts nothing.
    """
    nodes = "/api/v1/nodes"
    cluster.ask("POST", nodes, body={"metadata": {"name": "another"}})

    def beat() -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now}
        body = {"status": {"conditions": [ready]}}
        cluster.ask("PATCH", f"{nodes}/another/status", body=body, content=MERGE)

    try:
        yield beat
    finally:
        cluster.ask("DELETE", f"{nodes}/another")


def last(hub: HubProcess) -> Session:
    return hub.store.ended(user=None, limit=1)[0]


def test_deleting_a_pod_ends_its_session_at_once_with_the_reason(
    cluster: Cluster, hub: HubProcess, ann: str
) -> None:
    name = started(hub, ann)
    began = time.monotonic()
    cluster.ask("DELETE", f"{PODS}/{name}", body={"gracePeriodSeconds": 30})
    until(lambda: hub.states().get("ann/") != "RUNNING")
    assert time.monotonic() - began < TOLD_WITHIN_S
    hub.reach({})
    assert last(hub).end_cause is EndCause.EXITED
    assert "removed outside JupyterHub" in str(last(hub).message)


def test_missing_image_ends_the_launch_and_is_named(hub: HubProcess, ann: str) -> None:
    began = time.monotonic()
    assert hub.spawn(ann, options={**WHOLE, "image": "nowhere"}).status_code in (201, 202, 500)
    until(lambda: hub.store.ended(user=None, limit=1) and last(hub).request.image == "nowhere")
    assert last(hub).end_cause is EndCause.PULL_FAILED
    assert "127.0.0.1:9/nowhere:1 cannot be had" in str(last(hub).message)
    assert time.monotonic() - began < 4 * TOLD_WITHIN_S, "the node tries once"


def test_session_that_the_cluster_cannot_place_waits_again_with_the_clusters_reason(
    cluster: Cluster, hub: HubProcess, ann: str
) -> None:
    pause = {"name": "c", "image": "fgpuspawner/base:0.1", "command": ["sleep", "600"]}
    other = {"metadata": {"name": "beside", "labels": ALONE}, "spec": {"containers": [pause]}}
    cluster.ask("POST", PODS, body=other)
    # A rule against it counts once it has a node.
    until(lambda: cluster.ask("GET", f"{PODS}/beside")["spec"].get("nodeName"))
    try:
        assert hub.spawn(ann, options=WHOLE).status_code in (201, 202)
        until(lambda: hub.sessions()["ann/"].wait_reason == "CLUSTER", within_s=60)
        (refused,) = hub.sessions()["ann/"].refused
        assert "didn't match" in refused.words
        assert cluster.pods(hub) == {}
    finally:
        cluster.ask("DELETE", f"{PODS}/beside", body={"gracePeriodSeconds": 1})
    hub.reach({"ann/": "RUNNING"}, within_s=120)


@pytest.mark.parametrize(
    "closed",
    [
        {"spec": {"taints": [{**TAINT, "value": "closed"}]}},
        {"spec": {"unschedulable": True}},
        {"metadata": {"labels": {ZONE: "elsewhere"}}},
    ],
    ids=["tainted", "cordoned", "not selected"],
)
def test_closed_node_keeps_its_sessions_and_takes_no_new_ones(
    cluster: Cluster, hub: HubProcess, ann: str, closed: dict[str, Any]
) -> None:
    started(hub, ann, fgpu="1")
    cluster.change_node(closed)
    try:
        until(lambda: hub.store.snapshot(0).nodes[0].closed, within_s=TOLD_WITHIN_S)
        hub.add_user("ben")
        assert hub.spawn("ben", options={**WHOLE, "fgpu": "1"}).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})
        time.sleep(1)
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})
    finally:
        cluster.change_node(OPEN)
    hub.reach({"ann/": "RUNNING", "ben/": "RUNNING"})
    assert hub.stop("ben").status_code in (202, 204)


def test_tolerated_taint_does_not_close_a_node(cluster: Cluster, hub: HubProcess, ann: str) -> None:
    cluster.change_node({"spec": {"taints": [TAINT]}})
    try:
        started(hub, ann)
        assert not hub.store.snapshot(0).nodes[0].closed
    finally:
        cluster.change_node(OPEN)


def test_no_session_ends_and_no_share_is_freed_while_the_api_is_silent(
    cluster: Cluster, hub: HubProcess, ann: str
) -> None:
    name = started(hub, ann)
    hub.add_user("ben")
    assert hub.spawn("ben", options={**WHOLE, "fgpu": "4"}).status_code in (201, 202)
    hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})
    uid = cluster.pods(hub)[name]["metadata"]["uid"]
    with cluster.frozen("api"):
        until_s = time.monotonic() + AWAY_S
        while time.monotonic() < until_s:
            assert hub.states() == {"ann/": "RUNNING", "ben/": "PENDING"}
            time.sleep(1)
    assert hub.stop("ben").status_code in (202, 204)
    hub.reach({"ann/": "RUNNING"})
    assert cluster.pods(hub)[name]["metadata"]["uid"] == uid
    assert hub.stop("ann").status_code in (202, 204)
    hub.reach({})


def test_node_without_kubelet_is_lost_and_its_session_keeps_its_share(
    cluster: Cluster, hub: HubProcess, ann: str
) -> None:
    name = started(hub, ann)
    uid = cluster.pods(hub)[name]["metadata"]["uid"]
    pause = {"name": "c", "image": "fgpuspawner/base:0.1", "command": ["sleep", "600"]}
    other = {"metadata": {"name": "not-ours"}, "spec": {"containers": [pause]}}
    cluster.ask("POST", PODS, body=other)
    with another_node(cluster) as beat, cluster.stopped("kubelet"):
        until(lambda: [beat(), hub.store.snapshot(0).nodes[0].state == "LOST"][1], within_s=90)
        until(
            lambda: [beat(), "not-ours" in cluster.leaving()][1],
            within_s=90,
            what="the cluster ends the node's pods",
        )
        hub.reach({"ann/": "RUNNING"})
    until(lambda: hub.store.snapshot(0).nodes[0].state == "READY", within_s=90)
    assert hub.ready("ann")
    assert cluster.pods(hub)[name]["metadata"]["uid"] == uid
    with cluster.stopped("kubelet"):
        until(lambda: hub.store.snapshot(0).nodes[0].state == "LOST", within_s=90)
        assert hub.stop(ann).status_code in (202, 204)
        until(lambda: hub.states() == {"ann/": "TERMINATING"}, within_s=90)
        hub.add_user("ben")
        assert hub.spawn("ben", options={**WHOLE, "fgpu": "4"}).status_code in (201, 202)
        time.sleep(5)
        assert hub.states() == {"ann/": "TERMINATING", "ben/": "PENDING"}
    hub.reach({"ben/": "RUNNING"}, within_s=120)
    assert hub.stop("ben").status_code in (202, 204)


@pytest.mark.parametrize(
    "times", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["few", "many"]
)
def test_killed_hub_finds_the_same_pods_and_queue_positions(
    cluster: Cluster, hub: HubProcess, times: int
) -> None:
    for user in ("ann", "ben", "cat"):
        hub.add_user(user)
        assert hub.spawn(user, options=WHOLE).status_code in (201, 202)
    states = {"ann/": "RUNNING", "ben/": "RUNNING", "cat/": "PENDING"}
    hub.reach(states)
    uids = {name: pod["metadata"]["uid"] for name, pod in cluster.pods(hub).items()}
    place = hub.sessions()["cat/"].id
    for n in range(times):
        hub.kill()
        # Every fourth time the Hub is killed while it starts.
        answers = n % 4 != 0
        hub.start(wait=answers)
        hub.reach(states)
        if answers:
            until(lambda: hub.ready("ann") and hub.ready("ben"), what="the Hub has its servers again")
        assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods(hub).items()} == uids
        assert hub.sessions()["cat/"].id == place
    assert hub.stop("ann").status_code in (202, 204)
    hub.reach({"ben/": "RUNNING", "cat/": "RUNNING"})
    for user in ("ben", "cat"):
        assert hub.stop(user).status_code in (202, 204)
    hub.reach({})
    until(lambda: cluster.pods(hub) == {}, what="no pod is left")


def test_force_deleted_pod_keeps_its_share_until_its_processes_end(cluster: Cluster, tmp_path: Path) -> None:
    mark = f"stubborn-{tmp_path.name}"
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal = print  # {mark}\n"
    command = f"c.Spawner.cmd = ['python', '-c', {deaf + MINI!r}]"
    whole = {"fgpu": "2", **SMALL}
    with on(cluster, tmp_path, mini=False, before=command) as hub:
        for user in ("ann", "ben"):
            hub.add_user(user)
            assert hub.spawn(user, options=whole).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})
        (name,) = cluster.pods(hub)
        processes = [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in read(p)]
        assert processes
        cluster.ask("DELETE", f"{PODS}/{name}", body={"gracePeriodSeconds": 0})
        until(lambda: hub.states().get("ben/") != "PENDING")
        assert not any(p.exists() for p in processes)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
