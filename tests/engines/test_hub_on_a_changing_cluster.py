"""A whole Hub on a cluster with nodes that are added, shrunk, closed and removed, and that refuse placements."""

from __future__ import annotations

import time
from pathlib import Path

import changing_engine
from test_hub_with_another_engine import ON_THE_PATH, WHOLE

from fgpu_scheduler import Node, NodeState
from hubprocess import HubProcess, running, until

CHANGING = {"runtime": "changing_engine:ChangingSpawner", "isolation": "none"}
LONG = "gpu-1." + "a" * 60 + "." + "b" * 63 + "." + "c" * 63 + ".lab"


def nodes(hub: HubProcess) -> dict[str, Node]:
    return {node.id: node for node in hub.store.snapshot(int(time.time())).nodes}


def states(hub: HubProcess) -> dict[str, NodeState]:
    return {node_id: node.state for node_id, node in nodes(hub).items()}


def test_session_refused_by_the_cluster_waits_with_the_reason_and_runs_elsewhere(
    tmp_path: Path,
) -> None:
    words = "1 node(s) had untolerated taint {lab: closed}"
    changing_engine.write(tmp_path / "data", {"n1": {}, "n2": {}}, refuses={"n1": words})
    with running(tmp_path, before=ON_THE_PATH, **CHANGING) as hub:
        for user in ("ann", "ben"):
            hub.add_user(user)
        assert hub.spawn("ann", options=WHOLE).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING"})
        ann = hub.sessions()["ann/"]
        assert ann.placement is not None
        assert (ann.placement.node_id, ann.attempt) == ("n2", 2)
        assert hub.spawn("ben", options=WHOLE).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})
        with hub.browser("ben", leads_to="/hub/home") as ben:
            page = ben.get(f"{hub.url}/services/fgpu/", timeout=60).text
            assert "had untolerated taint {lab: closed}" in page
            (told,) = ben.get(f"{hub.url}/services/fgpu/api/v1/sessions", timeout=60).json()["sessions"]
            assert told["wait_reason"] == "CLUSTER"
            assert "no place on n1" in told["wait_text"]
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({"ben/": "RUNNING"})


def test_nodes_are_added_shrunk_closed_and_removed_without_a_restart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    changing_engine.write(data, {"n1": {}})
    with running(tmp_path, before=ON_THE_PATH, **CHANGING) as hub:
        for user in ("ann", "ben"):
            hub.add_user(user)
            assert hub.spawn(user, options=WHOLE).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})

        # A new node takes the pending session, even with a very long name.
        changing_engine.write(data, {"n1": {}, LONG: {}})
        hub.reach({"ann/": "RUNNING", "ben/": "RUNNING"}, within_s=15)
        ben = hub.sessions()["ben/"]
        assert ben.placement is not None
        assert ben.placement.node_id == LONG
        with hub.browser("admin", leads_to="/hub/home") as browser:
            for address in ("", "map", "admin/nodes", "admin/overview"):
                shown = browser.get(f"{hub.url}/services/fgpu/{address}", timeout=60)
                assert shown.status_code == 200, address

        # A node that shrank keeps its sessions and takes no new ones; a closed node takes none either.
        changing_engine.write(data, {"n1": {"gpus": 0, "cpu": 1}, LONG: {"closed": True}})
        until(lambda: states(hub).get(LONG) is NodeState.CORDONED, within_s=15)
        assert (nodes(hub)["n1"].devices, nodes(hub)["n1"].cpu_milli) == ((), 1000)
        assert hub.states() == {"ann/": "RUNNING", "ben/": "RUNNING"}
        assert hub.stop("ben").status_code in (202, 204)
        hub.add_user("cat")
        assert hub.spawn("cat", options=WHOLE).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "cat/": "PENDING"})
        changing_engine.write(data, {"n1": {}, LONG: {}})
        hub.reach({"ann/": "RUNNING", "cat/": "RUNNING"}, within_s=15)

        # A removed node is lost while a session runs there.
        changing_engine.write(data, {LONG: {}})
        until(lambda: states(hub).get("n1") is NodeState.LOST, within_s=15)
        assert hub.states() == {"ann/": "RUNNING", "cat/": "RUNNING"}
        changing_engine.write(data, {})
        until(lambda: states(hub) == {"n1": NodeState.LOST, LONG: NodeState.LOST}, within_s=15)
        changing_engine.write(data, {"n1": {}})
        until(lambda: states(hub).get("n1") is NodeState.READY, within_s=15)


def test_hub_started_with_a_silent_or_empty_cluster_takes_nodes_later(tmp_path: Path) -> None:
    with running(tmp_path, before=ON_THE_PATH, **CHANGING) as hub:
        hub.add_user("ann")
        with hub.browser("ann", leads_to="/hub/home") as ann:

            def page() -> str:
                answer = ann.get(f"{hub.url}/hub/spawn", timeout=60)
                assert answer.status_code == 200
                return answer.text

            # Unknown GPUs are not shown as none.
            silent = "the cluster doesn&#39;t answer, so it isn&#39;t known which GPUs there are"
            assert silent in page()
            changing_engine.write(hub.data, {})
            until(lambda: silent not in page(), within_s=60)
        changing_engine.write(hub.data, {"n1": {}})
        until(lambda: states(hub) == {"n1": NodeState.READY}, within_s=30)
        assert hub.spawn("ann", options=WHOLE).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING"})
