"""The Hub's image for Zero to JupyterHub, in a pod with our rights and values, until a session is ready."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import yaml
from accounts import ACCOUNT, World
from hubs import CLUSTER
from kubeapi import disconnected
from test_zero_to_jupyterhub import theirs

from fgpuspawner.engines.kubernetes.api import Api, run_blocking
from hubprocess import PROXY, ROOT, free_ports, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

IMAGE = "fgpuspawner/hub:0.1"
HUB_PORT = 8081
FOLDER = "/usr/local/etc/jupyterhub"
CONFIG = f"{FOLDER}/jupyterhub_config.py"
STARTED_WITHIN_S = 120
OPTIONS = {"fgpu": "1", "cpu": "0.5", "memory_mib": 1024}
VALUES = ROOT / "images/hub/values.yaml"
SETTINGS = """
c.KubernetesFGPUSpawner.lease_image = ""
c.KubernetesFGPUSpawner.measure_gpus = False
"""
NODES = 'c.FGPU.nodes = [{{"name": {node!r}, "gpus": {{"simulated": 1}}}}]'
# What the chart's configuration sets besides: where the proxy's pod is, and who may log in.
MORE = """
from socket import gethostbyname, gethostname

HERE = gethostbyname(gethostname())
c.JupyterHub.hub_connect_url = f"http://{{HERE}}:{port}"
c.JupyterHub.db_url = "sqlite:////srv/jupyterhub/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = "/srv/jupyterhub/jupyterhub_cookie_secret"
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = {proxy!r}
c.ConfigurableHTTPProxy.auth_token = {token!r}
# In place of the cluster's names.
c.KubeSpawner.extra_pod_config = {{"hostAliases": [{{"ip": HERE, "hostnames": ["hub"]}}]}}
c.JupyterHub.authenticator_class = "null"
c.Authenticator.any_allow_config = True
c.JupyterHub.services = [{{"name": "test", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [
    {{"name": "test", "services": ["test"], "scopes": ["admin:users", "admin:servers", "access:servers", "tokens"]}}
]
"""


def run(*words: str | Path, **more: Any) -> str:
    """Run a command of this checkout and return what it prints."""
    done = subprocess.run([*words], cwd=ROOT, text=True, capture_output=True, timeout=900, **more)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def image() -> str:
    """The Hub's image, built here and brought to the cluster."""
    if "FGPU_TEST_DOCKER" not in os.environ:
        pytest.skip("no Docker engine to build the Hub's image with")
    run(ROOT / "scripts/image.sh", "hub", "host")
    with subprocess.Popen(["docker", "save", IMAGE], stdout=subprocess.PIPE) as saved:
        run(CLUSTER, "import", os.environ["FGPU_TEST_KUBE"], "-", stdin=saved.stdout)
    assert saved.returncode == 0
    return IMAGE


@dataclass(frozen=True)
class Proxy:
    """The chart's proxy, which is a pod of its own there; here it is beside the cluster."""

    url: str
    api_url: str
    token: str

    def ask(self, method: str, path: str, **more: Any) -> requests.Response:
        """Ask the Hub, or a session, as people's browsers reach them."""
        headers = {"Authorization": f"token {self.token}"}
        return requests.request(method, f"{self.url}{path}", headers=headers, timeout=60, **more)


@pytest.fixture
def proxy(world: World, tmp_path: Path) -> Iterator[Proxy]:
    port, token, ip = free_ports(2), secrets.token_hex(16), world.cluster.address
    words = [
        str(PROXY),
        "--ip",
        "127.0.0.1",
        "--port",
        str(port),
        "--api-ip",
        ip,
        "--api-port",
        str(port + 1),
    ]
    with (tmp_path / "proxy.log").open("wb") as log:
        running = subprocess.Popen(
            words, env={**os.environ, "CONFIGPROXY_AUTH_TOKEN": token}, stdout=log, stderr=log
        )
    yield Proxy(f"http://127.0.0.1:{port}", f"http://{ip}:{port + 1}", token)
    running.kill()
    running.wait(30)


@dataclass(frozen=True)
class Hub:
    """The Hub's pod."""

    world: World
    path: str

    def status(self) -> dict[str, Any]:
        return dict(self.world.cluster.ask("GET", self.path)["status"])

    def log(self) -> str:
        return str(self.world.cluster.api.text("GET", f"{self.path}/log"))

    def run(self, *command: str) -> str:
        async def asked() -> str:
            api = Api(self.world.cluster.configuration)
            try:
                return (await api.run(self.path, "hub", command, most_bytes=65536)).output.decode()
            finally:
                await api.close()
                await disconnected()

        return run_blocking(asked)


@pytest.fixture
def hub(world: World, image: str, proxy: Proxy, tmp_path: Path) -> Iterator[Hub]:
    """A Hub's pod, made as the chart makes it, with the values in images/hub/values.yaml."""
    values = yaml.safe_load(VALUES.read_text())["hub"]
    nodes = NODES.format(node=world.cluster.name)
    more = MORE.format(port=HUB_PORT, proxy=proxy.api_url, token=proxy.token)
    chart = theirs(world.cluster, more=more, namespace=world.namespace)
    program = "\n".join(
        [
            f"c = get_config()\nc.JupyterHub.hub_port = {HUB_PORT}",
            chart,
            nodes,
            *values["extraConfig"].values(),
            SETTINGS,
        ]
    )
    body = {"metadata": {"name": "hub"}, "data": {Path(CONFIG).name: program}}
    world.cluster.ask("POST", f"{world.own}/configmaps", body=body)
    # In place of kube-proxy, as the tests' cluster has none.
    api = urlsplit(world.cluster.configuration.host)
    env = [
        {"name": "KUBERNETES_SERVICE_HOST", "value": api.hostname},
        {"name": "KUBERNETES_SERVICE_PORT", "value": str(api.port)},
    ]
    mounts = [{"name": "pvc", "mountPath": "/srv/jupyterhub"}, {"name": "config", "mountPath": FOLDER}]
    spec = {
        "serviceAccountName": ACCOUNT,
        "securityContext": {"fsGroup": 1000},
        "volumes": [{"name": "pvc", "emptyDir": {}}, {"name": "config", "configMap": {"name": "hub"}}],
        "containers": [
            {
                "name": "hub",
                "image": image,
                "args": ["jupyterhub", "--config", CONFIG, "--upgrade-db"],
                "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "allowPrivilegeEscalation": False},
                "volumeMounts": mounts,
                "env": env,
            }
        ],
    }
    labels = {"app": "jupyterhub", "component": "hub"}
    world.cluster.ask(
        "POST", f"{world.own}/pods", body={"metadata": {"name": "hub", "labels": labels}, "spec": spec}
    )
    found = Hub(world, f"{world.own}/pods/hub")
    try:
        yield found
    finally:
        (tmp_path / "hub.log").write_text(found.log())
        for kind in ("pods", "configmaps"):
            world.cluster.ask("DELETE", f"{world.own}/{kind}", body={"gracePeriodSeconds": 1})


def test_hub_image_starts_a_session_with_only_our_rights_and_values(hub: Hub, proxy: Proxy) -> None:
    def answers() -> bool:
        status = hub.status()
        assert status["phase"] in ("Pending", "Running"), hub.log()[-3000:]
        try:
            return proxy.ask("GET", "/hub/api/").status_code == 200
        except requests.ConnectionError:
            return False

    until(answers, within_s=STARTED_WITHIN_S, what="the Hub answers through the proxy")
    assert proxy.ask("GET", "/hub/api/").json()["version"].startswith("6.")
    lines = hub.run("sh", "-c", f"fgpu kube check --config {CONFIG} 2>&1").splitlines()
    assert any(line.startswith("OK: right pods (get, list, watch, create, delete)") for line in lines), lines
    assert [line for line in lines if line.startswith("FAIL") or "may not" in line] == []
    assert proxy.ask("POST", "/hub/api/users/ann").status_code == 201
    assert proxy.ask("POST", "/hub/api/users/ann/server", json=OPTIONS).status_code in (201, 202)

    def ready() -> bool:
        server = proxy.ask("GET", "/hub/api/users/ann").json()["servers"].get("")
        assert server, hub.log()[-3000:]
        return bool(server["ready"])

    until(ready, within_s=STARTED_WITHIN_S, what="the session is ready")
    assert proxy.ask("GET", "/user/ann/api/status").status_code == 200
    assert "Session 1 is verified" in hub.log()
    assert proxy.ask("DELETE", "/hub/api/users/ann/server").status_code in (202, 204)
    until(
        lambda: proxy.ask("GET", "/hub/api/users/ann").json()["servers"] == {}, what="the session has ended"
    )
