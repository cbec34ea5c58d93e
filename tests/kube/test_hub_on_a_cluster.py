"""A whole Hub whose sessions are pods: the queue, the pages, the ends, and a Hub that is killed."""

from __future__ import annotations

from pathlib import Path

from hubs import SMALL, Cluster, on

WHOLE = {"fgpu": "2", **SMALL}


def test_two_sessions_run_as_pods_the_third_waits_and_starts_when_one_ends(
    cluster: Cluster, tmp_path: Path
) -> None:
    with on(cluster, tmp_path) as hub:
        for user in ("ann", "ben", "cat"):
            hub.add_user(user)
            assert hub.spawn(user, options={"fgpu": "1", **SMALL}).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "RUNNING", "cat/": "PENDING"})
        assert len(cluster.pods(hub)) == 2
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({"ben/": "RUNNING", "cat/": "RUNNING"})
