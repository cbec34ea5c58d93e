"""A Hub with sessions as pods: the queue's scenario B3."""

from __future__ import annotations

from pathlib import Path

from hubs import SMALL, Cluster, on

WHOLE = {"fgpu": "2", **SMALL}


def test_third_session_waits_and_starts_when_one_ends(cluster: Cluster, tmp_path: Path) -> None:
    with on(cluster, tmp_path) as hub:
        for user in ("ann", "ben", "cat"):
            hub.add_user(user)
            assert hub.spawn(user, options={"fgpu": "1", **SMALL}).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "RUNNING", "cat/": "PENDING"})
        assert len(cluster.pods(hub)) == 2
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({"ben/": "RUNNING", "cat/": "RUNNING"})
