"""Tests' Hubs with sessions as pods of a real cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubeapi import ApiError, KubeApi, disconnected
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import load_kube_config

from fgpuspawner.engines import marks
from fgpuspawner.engines.kubernetes.api import Api, run_blocking
from hubprocess import HubProcess, until

MERGE = "application/merge-patch+json"
NAMESPACE = "default"
MINI = (Path(__file__).parents[1] / "hub/miniserver.py").read_text()
CLUSTER = Path(__file__).parent / "cluster.sh"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SMALL = {"cpu": "0.1", "memory_mib": 128}


class Cluster:
    """The tests' cluster, used as its administrator."""

    def __init__(self) -> None:
        self.kubeconfig = os.environ["FGPU_TEST_KUBECONFIG"]
        self.api = KubeApi.of(Path(self.kubeconfig))
        self.configuration = Configuration()
        run_blocking(lambda: load_kube_config(self.kubeconfig, client_configuration=self.configuration))
        # A test may have made a node object without a machine.
        nodes = self.ask("GET", "/api/v1/nodes")["items"]
        (self.node,) = [node for node in nodes if node["status"].get("addresses")]
        self.name: str = self.node["metadata"]["name"]
        addresses = self.node["status"]["addresses"]
        self.address: str = next(a["address"] for a in addresses if a["type"] == "InternalIP")

    def ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Return the answer to one request."""
        found: dict[str, Any] = self.api.call(method, path, **more)
        return found

    def change_node(self, change: dict[str, Any]) -> None:
        """Change the cluster's node; None removes a field."""
        self.ask("PATCH", f"/api/v1/nodes/{self.name}", body=change, content=MERGE)

    @contextmanager
    def frozen(self, part: str) -> Iterator[None]:
        """Stop a part of the cluster from answering."""
        with _without("freeze", "thaw", part):
            yield

    @contextmanager
    def stopped(self, part: str) -> Iterator[None]:
        """Kill a part of the cluster, and start it again afterwards."""
        with _without("stop", "start", part):
            yield

    def run(self, pod: str, program: str) -> bytes:
        """Run a Python program in a session's pod and return what it prints."""
        return self.run_in(pod, "notebook", ["python", "-c", program])

    def run_in(self, pod: str, container: str, command: list[str]) -> bytes:
        """Run a command in a pod's container and return what it prints."""

        async def asked() -> bytes:
            api = Api(self.configuration)
            try:
                answer = await api.run(f"{PODS}/{pod}", container, command, most_bytes=4096)
                return answer.output
            finally:
                await api.close()
                await disconnected()

        return run_blocking(asked)

    def leaving(self) -> list[str]:
        """Return the pods that are being removed."""
        found = self.ask("GET", "/api/v1/pods")["items"]
        return [p["metadata"]["name"] for p in found if "deletionTimestamp" in p["metadata"]]

    def pods(self, hub: HubProcess, namespace: str = NAMESPACE) -> dict[str, dict[str, Any]]:
        """Return the pods of a Hub's sessions that are not being deleted, by name."""
        mine = ("labelSelector", f"{marks.INSTALLATION}={hub.store.installation_id}")
        found = self.ask("GET", f"/api/v1/namespaces/{namespace}/pods", query=[mine])["items"]
        return {p["metadata"]["name"]: p for p in found if "deletionTimestamp" not in p["metadata"]}

    def end(self, hub: HubProcess, namespace: str = NAMESPACE) -> None:
        """Delete what a Hub has left."""
        for name in self.pods(hub, namespace):
            try:
                self.ask(
                    "DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", body={"gracePeriodSeconds": 1}
                )
            except ApiError as e:
                if e.status != 404:
                    raise


@contextmanager
def _without(first: str, last: str, part: str) -> Iterator[None]:
    def do(verb: str) -> None:
        words = [CLUSTER, f"{verb}-{part}", os.environ["FGPU_TEST_KUBE"]]
        subprocess.run(words, check=True, capture_output=True, timeout=200)

    do(first)
    try:
        yield
    finally:
        do(last)


@contextmanager
def on(
    cluster: Cluster,
    folder: Path,
    *,
    gpus: int = 1,
    before: str = "",
    after: str = "",
    mini: bool = True,
    namespace: str = NAMESPACE,
    kubeconfig: str = "",
    **settings: Any,
) -> Iterator[HubProcess]:
    """Run a Hub with sessions as pods of a namespace, as the cluster's administrator or with ``kubeconfig``."""
    # Pods that end still hold CPU: on a busy machine the Hub would find no place.
    until(lambda: not cluster.leaving(), within_s=120, what="the pods of earlier tests are gone")
    lines = [
        f"c.JupyterHub.hub_ip = {cluster.address!r}",
        f"c.KubernetesFGPUSpawner.namespace = {namespace!r}",
        "c.KubernetesFGPUSpawner.stop_timeout_s = 2",
        *([f"c.Spawner.cmd = ['python', '-c', {MINI!r}]"] if mini else []),
        before,
    ]
    node = {"name": cluster.name, "gpus": {"simulated": gpus}}
    given = {
        "runtime": "kubernetes",
        "nodes": [node],
        "hub_address": cluster.address,
        "service_ip": cluster.address,
        "firewall": "managed-elsewhere",
        **settings,
    }
    hub = HubProcess(
        folder,
        before="\n".join(lines) + "\n",
        after=after,
        env={"KUBECONFIG": kubeconfig or cluster.kubeconfig},
        **given,
    )
    try:
        yield hub.start()
    finally:
        if hub.has_store():
            cluster.end(hub, namespace)
        hub.close()
