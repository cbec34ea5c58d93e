"""`fgpu kube check` on a real cluster: what is missing is named, with what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import World
from hubs import Cluster
from traitlets.config import Config

from fgpuspawner.engines import marks
from fgpuspawner.engines.kubernetes.rights import RIGHTS, rights_of
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.settings import FGPU

CONFIG = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.KubernetesFGPUSpawner.namespace = {namespace!r}
{more}
configure(c, runtime="kubernetes", data_dir={data!r}, nodes={nodes!r})
"""
LEASED = 'c.KubernetesFGPUSpawner.lease_image = "registry.example.org/debian:12"'


def check(
    world: World,
    folder: Path,
    *options: str,
    more: str = "",
    gpus: object = None,
    node: str = "",
    sizes: Any = None,
) -> tuple[int, list[str]]:
    """Return the status and the lines, asked with the rights of the service account."""
    named = {"name": node or world.cluster.name, **(sizes or {}), **({} if gpus is None else {"gpus": gpus})}
    path = folder / "jupyterhub_config.py"
    text = CONFIG.format(namespace=world.namespace, more=more, data=str(folder / "data"), nodes=[named])
    path.write_text(text)
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "fgpu"), "kube", "check", "--config", str(path), *options],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "KUBECONFIG": str(world.kubeconfig)},
    )
    assert ended.stderr == ""
    return ended.returncode, ended.stdout.splitlines()


@pytest.fixture
def runtime_class(cluster: Cluster) -> Iterator[None]:
    path = "/apis/node.k8s.io/v1/runtimeclasses"
    cluster.ask("POST", path, body={"metadata": {"name": "nvidia"}, "handler": "runc"})
    yield
    cluster.ask("DELETE", f"{path}/nvidia")


def test_correct_cluster_has_no_failing_line(world: World, tmp_path: Path) -> None:
    status, lines = check(world, tmp_path, gpus={"simulated": 1})
    assert status == 0, lines
    assert sum(line.startswith("OK: right ") for line in lines) == len(rights_of("lease"))
    assert "OK: a session's pod is accepted" in lines
    assert re.fullmatch(r"OK: Kubernetes \d+\.\d+ answers", lines[0])
    (node,) = [line for line in lines if f"node {world.cluster.name}" in line]
    assert node.startswith("OK: ")
    assert [line for line in lines if not line.startswith("OK: ")] == [
        "WARN: homes: none is kept: c.KubeSpawner.storage_pvc_ensure is False, and there are no volumes"
    ]
    assert world.cluster.ask("GET", f"{world.own}/pods")["items"] == [], "nothing was made"


def test_missing_rights_are_named_with_the_command_that_grants_them(world: World, tmp_path: Path) -> None:
    world.give([right for right in RIGHTS if right.resource not in ("secrets", "nodes")])
    try:
        status, lines = check(world, tmp_path, "--start", gpus={"simulated": 1})
    finally:
        world.give(list(RIGHTS))
    assert status == 1
    failed = [line for line in lines if ": the caller may not " in line]
    assert [line.split(" (")[0] for line in failed] == [
        f"FAIL: the caller may not create secrets in namespace {world.namespace}",
        "WARN: the caller may not list, watch nodes in the whole cluster",
    ]
    assert all(f"`fgpu kube manifests --namespace {world.namespace}`" in line for line in failed)
    assert any(line.startswith("FAIL: nodes cannot be seen: ") for line in lines)
    assert lines[-1].startswith("FAIL: start: no GPU can be leased: the Hub may not list nodes, and ")


def test_gpu_pods_are_checked_by_a_dry_run(
    world: World, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    status, lines = check(world, tmp_path, more=LEASED)
    assert status == 1
    assert any(line.startswith("FAIL: a session's pod is refused: ") and "nvidia" in line for line in lines)
    (lease,) = [line for line in lines if line.startswith("FAIL: a pod that leases a GPU is refused: ")]
    assert lease.endswith("if the operator runs its NRI plugin")
    request.getfixturevalue("runtime_class")
    status, lines = check(world, tmp_path, more=LEASED)
    assert status == 0, lines
    assert "OK: a pod that leases a GPU is accepted" in lines


def test_missing_node_is_named(world: World, tmp_path: Path) -> None:
    status, lines = check(world, tmp_path, gpus={"simulated": 1}, node="gpu9")
    assert status == 1
    assert f"FAIL: node gpu9 of c.FGPU.nodes is not in the cluster; it has: {world.cluster.name}" in lines


def test_sessions_of_another_installation_are_reported_for_our_namespace_only(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = {marks.INSTALLATION: "0123456789ab", marks.SESSION: "7"}
    names = {"fgpu-0123456789ab-7-1": marked, "forged": marked, "fgpu-fedcba987654-1-1": {}}
    paths = [f"{world.own}/pods", "/api/v1/namespaces/default/pods"]
    for path in paths:
        for name, labels in names.items():
            spec = {"containers": [{"name": "c", "image": "none.example.org/none:1"}], "nodeName": "nowhere"}
            world.cluster.ask("POST", path, body={"metadata": {"name": name, "labels": labels}, "spec": spec})
    reached = world.configuration()
    monkeypatch.setattr(KubernetesFGPUSpawner, "reached", lambda config: reached)
    config = Config({"KubernetesFGPUSpawner": {"namespace": world.namespace}})
    try:
        lines = KubernetesFGPUSpawner.wrong_elsewhere(config, FGPU(), "aaaaaaaaaaaa")
        assert KubernetesFGPUSpawner.wrong_elsewhere(config, FGPU(), "0123456789ab") == []
    finally:
        for path in paths:
            for name in names:
                world.cluster.ask("DELETE", f"{path}/{name}?gracePeriodSeconds=0")
    assert [line.split(":")[0] for line in lines] == [
        f"Sessions of another installation, 0123456789ab, run in namespace {world.namespace} (1)"
    ]
