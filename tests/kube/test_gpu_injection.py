"""A session gets its lease's GPU where CDI is the default, as with NVIDIA's GPU operator since 25.10.

What is played: the device plugin (deviceplugin.py) and NVIDIA's container runtime (nvidia_runtime.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deviceplugin import RESOURCE, DevicePlugin
from hubs import NAMESPACE, PODS, SMALL, Cluster, on

from hubprocess import until

A = "GPU-aaaa"
IMAGE = "fgpuspawner/base:0.1"
CLASS = "fgpu-test-cdi"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
SETTINGS = f"""
c.KubernetesFGPUSpawner.lease_image = {IMAGE!r}
c.KubernetesFGPUSpawner.runtime_class = {CLASS!r}
"""
CONFIG = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.KubernetesFGPUSpawner.namespace = {namespace!r}
{settings}
configure(c, runtime="kubernetes", data_dir={data!r}, catalogue={catalogue!r})
"""
CATALOGUE = f"""
[[image]]
slug = "good"
name = "Good"
framework = "python"
version = "3.11"
python = "3.11"
reference = "{IMAGE}"
default = true
"""


@pytest.fixture(scope="module", autouse=True)
def plugin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevicePlugin]:
    cluster.ask("POST", CLASSES, body={"metadata": {"name": CLASS}, "handler": "nvidia"})
    cluster.change_node({"metadata": {"labels": {"fgpu.group": "default"}}})
    plugin = DevicePlugin(tmp_path_factory.mktemp("plugin"), [A], cdi=True).start()
    path = f"/api/v1/nodes/{cluster.name}"
    try:
        until(
            lambda: cluster.ask("GET", path)["status"]["allocatable"].get(RESOURCE) == "1",
            what="the node has its card",
        )
        yield plugin
    finally:
        plugin.stop()
        cluster.change_node({"metadata": {"labels": {"fgpu.group": None}}})
        cluster.ask("DELETE", f"{CLASSES}/{CLASS}")


def check(cluster: Cluster, folder: Path, more: str) -> tuple[int, list[str]]:
    """Return the status and the last two lines of `fgpu kube check --start`."""
    path, catalogue = folder / "jupyterhub_config.py", folder / "catalogue.toml"
    catalogue.write_text(CATALOGUE)
    text = CONFIG.format(
        namespace=NAMESPACE, settings=SETTINGS + more, data=str(folder / "data"), catalogue=str(catalogue)
    )
    path.write_text(text)
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "fgpu"), "kube", "check", "--start", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
    )
    assert ended.stderr == ""
    left = cluster.ask("GET", "/api/v1/pods", query=[("labelSelector", "fgpu.check")])["items"]
    assert left == []
    return ended.returncode, ended.stdout.splitlines()[-2:]


def test_check_reports_the_leases_gpu_and_that_a_session_sees_it(cluster: Cluster, tmp_path: Path) -> None:
    status, (lease, session) = check(cluster, tmp_path, "")
    assert lease == f"OK: start: the lease on node {cluster.name} holds {A} (NVIDIA_VISIBLE_DEVICES='')"
    assert session == f'OK: start: a session\'s container sees {A} alone with gpu_injection "cdi"'
    assert status == 0


def test_check_names_an_injection_that_fails_and_one_that_works(cluster: Cluster, tmp_path: Path) -> None:
    status, (_, said) = check(cluster, tmp_path, 'c.KubernetesFGPUSpawner.gpu_injection = "variable"')
    assert status == 1
    assert said.startswith("FAIL: start: ")
    assert 'set c.KubernetesFGPUSpawner.gpu_injection = "cdi"' in said
    assert f"unresolvable CDI devices management.nvidia.com/gpu={A}" in said


def test_check_says_that_an_administrators_function_fails(cluster: Cluster, tmp_path: Path) -> None:
    status, (_, said) = check(cluster, tmp_path, "c.KubeSpawner.uid = lambda spawner: spawner.no_such_id")
    assert status == 1
    assert "no_such_id" in said


@contextmanager
def leases_removed(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.ask("DELETE", PODS, query=[("labelSelector", "fgpu.lease")], body={"gracePeriodSeconds": 1})


def test_session_sees_the_gpu_of_its_share(cluster: Cluster, tmp_path: Path) -> None:
    with leases_removed(cluster), on(cluster, tmp_path, before=SETTINGS, nodes=[], isolation="none") as hub:
        hub.add_user("ann")
        until(lambda: any(n.devices for n in hub.store.snapshot(0).nodes), what="the card is offered")
        assert hub.spawn("ann", options={"fgpu": "1", **SMALL}).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING"})
        (name,) = cluster.pods(hub)
        assert A.encode() in cluster.run_in(name, "notebook", ["nvidia-smi"])
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({})
