"""Shared folders of a volume claim in pods: the read-only one cannot be written, the other is the claim's own."""

from __future__ import annotations

from pathlib import Path

from hubs import NAMESPACE, SMALL, Cluster, on

from hubprocess import until

NAME = "fgpu-test-folders"
CLAIMS = f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
TRIES = """
at = "/run/fgpu/folders/"
print(open(at + "sets/big").read())
open(at + "vision/made", "w").write("by a pod")
try:
    open(at + "sets/new", "w")
except OSError as error:
    print(error.strerror)
"""


def test_folders_of_a_claim_are_mounted_in_a_sessions_pod(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("claim", "claim/sets", "claim/vision"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    (tmp_path / "claim/sets/big").write_text("data")
    kind = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": "1Mi"}
    volume = {"capacity": size, "hostPath": {"path": str(tmp_path / "claim")}, **kind}
    claim = {"resources": {"requests": size}, "volumeName": NAME, **kind}
    folders = {
        "sets": {"claim": NAME, "subpath": "sets", "always": True},
        "vision": {"claim": NAME, "subpath": "vision", "mode": "read-write"},
    }
    try:
        cluster.ask("POST", VOLUMES, body={"metadata": {"name": NAME}, "spec": volume})
        cluster.ask("POST", CLAIMS, body={"metadata": {"name": NAME}, "spec": claim})
        until(
            lambda: cluster.ask("GET", f"{CLAIMS}/{NAME}")["status"].get("phase") == "Bound",
            what="the claim is bound",
        )
        with on(cluster, tmp_path / "hub", folders=folders) as hub:
            hub.add_user("ann")
            answer = hub.spawn("ann", options={"fgpu": "1", "folders": ["vision"], **SMALL})
            assert answer.status_code in (201, 202), answer.text
            hub.reach({"ann/": "RUNNING"})
            (pod,) = cluster.pods(hub)
            assert cluster.run(pod, TRIES).decode().splitlines() == ["data", "Read-only file system"]
            assert (tmp_path / "claim/vision/made").read_text() == "by a pod"
    finally:
        for path in (f"{CLAIMS}/{NAME}", f"{VOLUMES}/{NAME}"):
            cluster.ask("DELETE", path)
