"""`fgpu kube check --network` on a real cluster: whether sessions reach each other, and nothing is left of the trial.

The cluster's network plugin enforces no policies; where one would, a rule of the machine does in its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import World
from hubs import Cluster

from fgpuspawner.engines.kubernetes.network_check import LABEL, METADATA, PORT
from hubprocess import until

CONFIG = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.KubernetesFGPUSpawner.namespace = {namespace!r}
c.KubernetesFGPUSpawner.files_image = "registry.example.org/fgpu/files:1"
c.KubeSpawner.extra_labels = {{"course": "lab"}}
c.KubeSpawner.volumes = [{{"name": "home", "persistentVolumeClaim": {{"claimName": "home-{{username}}"}}}}]
c.KubeSpawner.volume_mounts = [{{"name": "home", "mountPath": "/home/jovyan"}}]
{more}
configure(c, runtime="kubernetes", data_dir={data!r}, nodes=[{{"name": {node!r}, "gpus": {{"simulated": 1}}}}])
"""
BRIDGE = f"kube{os.environ.get('FGPU_TEST_KUBE', '')}"


def command(world: World, folder: Path, more: str = "") -> tuple[list[str], dict[str, str]]:
    path = folder / "jupyterhub_config.py"
    node = world.cluster.name
    text = CONFIG.format(namespace=world.namespace, data=str(folder / "data"), node=node, more=more)
    path.write_text(text)
    fgpu = str(Path(sys.executable).parent / "fgpu")
    environment = {**os.environ, "KUBECONFIG": str(world.kubeconfig)}
    return [fgpu, "kube", "check", "--network", "--config", str(path)], environment


def check(world: World, folder: Path, more: str = "") -> tuple[int, list[str]]:
    """Return the status and the lines on the network, asked with the Hub's own rights and no other."""
    words, environment = command(world, folder, more)
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment)
    assert ended.stderr == ""
    assert pods(world) == []
    return ended.returncode, [line for line in ended.stdout.splitlines() if "network: " in line]


def pods(world: World) -> list[str]:
    found = world.cluster.ask("GET", f"{world.own}/pods", query=[("labelSelector", LABEL)])["items"]
    return [pod["metadata"]["name"] for pod in found]


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Have pods not reach each other's port, as a policy would."""
    rule = ["FORWARD", "-i", BRIDGE, "-o", BRIDGE, "-p", "tcp", "--dport", str(PORT), "-j", "DROP"]
    subprocess.run(["iptables", "-w", "-I", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-w", "-D", *rule], check=True)


@contextlib.contextmanager
def metadata() -> Iterator[None]:
    """Have something answer at the address of the cloud's metadata."""
    address = [f"{METADATA}/32", "dev", BRIDGE]
    subprocess.run(["ip", "address", "add", *address], check=True)
    try:
        # Nobody need accept: the kernel answers.
        with socket.create_server((METADATA, 80)):
            yield
    finally:
        subprocess.run(["ip", "address", "del", *address], check=True)


OPEN = "WARN: network: a session reaches another one's port: "


def test_sessions_that_reach_each_other_are_seen_with_what_may_be_missing(
    world: World, tmp_path: Path
) -> None:
    status, (other, cloud) = check(world, tmp_path)
    assert status == 0
    why = "there is no NetworkPolicy for sessions, or the network plugin does not enforce it"
    assert other == f"{OPEN}{why} (docs/kubernetes.md)"
    assert cloud == f"OK: network: a session does not reach {METADATA}, the cloud's metadata"


def test_sessions_that_are_kept_apart_are_seen_and_so_is_the_metadata_that_they_reach(
    world: World, tmp_path: Path
) -> None:
    with closed(), metadata():
        _, (other, cloud) = check(world, tmp_path)
    assert other == "OK: network: a session does not reach another one's port"
    assert cloud.startswith(f"WARN: network: a session reaches {METADATA}, ")


def test_a_policy_that_nobody_enforces_is_named(world: World, tmp_path: Path) -> None:
    owner = World(world.cluster, world.namespace, Path(world.cluster.kubeconfig))
    assert check(owner, tmp_path)[1][0] == (
        f"{OPEN}there is no NetworkPolicy in namespace {world.namespace} (docs/kubernetes.md)"
    )
    path = f"/apis/networking.k8s.io/v1/namespaces/{world.namespace}/networkpolicies"
    policy = {"metadata": {"name": "singleuser"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}
    world.cluster.ask("POST", path, body=policy)
    try:
        other = check(owner, tmp_path)[1][0]
    finally:
        world.cluster.ask("DELETE", f"{path}/singleuser")
    why = "the network plugin does not enforce NetworkPolicies, or these are not for sessions: singleuser"
    assert other == f"{OPEN}{why} (docs/kubernetes.md)"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_nothing_is_left_of_a_check_that_is_interrupted(world: World, tmp_path: Path, how: int) -> None:
    words, environment = command(world, tmp_path)
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # Tests that run in the background of a script are not ended by Ctrl-C, nor is what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as asking:
        until(lambda: bool(pods(world)), within_s=120, what="a pod of the check is there")
        asking.send_signal(how)
        _, said = asking.communicate(timeout=120)
    assert (asking.returncode, said) == (2, "fgpu: it was ended before it was done\n")
    assert pods(world) == []


def test_a_pod_that_cannot_start_is_no_answer_and_is_removed(world: World, tmp_path: Path) -> None:
    more = 'c.KubeSpawner.extra_pod_config = {"priorityClassName": "none-of-this-name"}'
    status, (line,) = check(world, tmp_path, more)
    assert status == 1
    assert line.startswith("WARN: network: not tried: ")


def test_the_pods_are_what_policies_take_for_a_sessions_and_end_by_themselves(
    cluster: Cluster, world: World, tmp_path: Path
) -> None:
    words, environment = command(world, tmp_path)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment) as asking:
        until(lambda: bool(pods(world)), within_s=120, what="a pod of the check is there")
        pod = cluster.ask("GET", f"{world.own}/pods/{pods(world)[0]}")
        assert asking.wait(240) == 0
    assert pod["metadata"]["labels"]["course"] == "lab"
    assert pod["metadata"]["labels"]["component"] == "singleuser-server"
    assert not any(name.startswith("fgpu.") for name in pod["metadata"]["labels"] if name != LABEL)
    assert pod["spec"]["activeDeadlineSeconds"] <= 160
    assert not any("persistentVolumeClaim" in volume for volume in pod["spec"].get("volumes", ()))
