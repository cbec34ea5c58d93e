"""The cluster that tests run on does what a cluster does, and the files image works in it as its sessions need it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from dockerhub import BASE
from kubeapi import NAMESPACE, ApiError, KubeApi, wait_for

from fgpuspawner.engines.kubernetes.files import REFERENCE, digest_of
from fgpuspawner.isolation import native

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
START_TIMEOUT_S = 120
CLUSTER = Path(__file__).parent / "cluster.sh"
SERVE = ["python", "-m", "http.server", "8000", "--directory", "/etc"]
NOBODY = 65534
"""Who owns the files: but for the mount they could be changed by such a user."""
UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": NOBODY,
}
"""What Pod Security's level "restricted" asks of a container."""
Make = Callable[..., str]


@pytest.fixture(scope="session")
def image(kube: KubeApi) -> str:
    """The session image, as the cluster has it."""
    (node,) = kube.get("/api/v1/nodes")["items"]
    names = {name for one in node["status"]["images"] for name in one["names"]}
    if f"docker.io/{BASE}" not in names:
        reason = f"the cluster has no image {BASE}: start it beside a Docker engine that has it (make image)"
        pytest.skip(reason)
    return BASE


@pytest.fixture
def make(kube: KubeApi) -> Iterator[Make]:
    """Make a pod of one container and return its name; pods go after the test."""
    names: list[str] = []

    def make(command: list[str], image: str, **more: Any) -> str:
        container = {"name": "main", "image": image, "command": command, **more.pop("container", {})}
        spec = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "containers": [container],
            **more,
        }
        made = kube.call("POST", PODS, {"metadata": {"generateName": "test-"}, "spec": spec})
        names.append(made["metadata"]["name"])
        return names[-1]

    yield make
    for name in names:
        with contextlib.suppress(ApiError):
            kube.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 1})


def address(kube: KubeApi, name: str) -> str:
    """Return the address of a pod once it runs."""

    def running() -> str | None:
        status = kube.get(f"{PODS}/{name}")["status"]
        return status["podIP"] if status["phase"] == "Running" else None

    return wait_for(f"{name} does not run", running, timeout_s=START_TIMEOUT_S)


def ended(kube: KubeApi, name: str) -> dict[str, Any]:
    """Return the status of a pod once it has ended."""

    def over() -> dict[str, Any] | None:
        status = kube.get(f"{PODS}/{name}")["status"]
        return status if status["phase"] in ("Succeeded", "Failed") else None

    return wait_for(f"{name} does not end", over, timeout_s=START_TIMEOUT_S)


def answer(ip: str) -> str:
    def fetched() -> str:
        with urlopen(f"http://{ip}:8000/hostname", timeout=5) as found:
            return str(found.read().decode().strip())

    return wait_for(f"{ip} does not answer", fetched, timeout_s=30)


@pytest.fixture
def here(kube: KubeApi) -> Iterator[str]:
    """A server on this machine, as the Hub is for sessions; its URL."""

    class Hello(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"the Hub")

        def log_message(self, *words: object) -> None:
            pass

    (node,) = kube.get("/api/v1/nodes")["items"]
    with HTTPServer((node["status"]["addresses"][0]["address"], 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield "http://{}:{}".format(*server.server_address)
        server.shutdown()
        thread.join()


FETCH = """
import sys, urllib.request
print([urllib.request.urlopen(url, timeout=9).read().decode().strip() for url in sys.argv[1:]])
"""


def test_pods_are_reached_from_this_machine_and_reach_it_and_each_other(
    kube: KubeApi, make: Make, image: str, here: str
) -> None:
    name = make(SERVE, image)
    ip = address(kube, name)
    assert answer(ip) == name
    other = make(["python", "-c", FETCH, f"http://{ip}:8000/hostname", here], image)
    ended(kube, other)
    assert kube.text("GET", f"{PODS}/{other}/log").strip() == str([name, "the Hub"])


def with_files(lines: list[str]) -> dict[str, Any]:
    """What of a pod gives it these files, at /run/fgpu."""
    first = {
        "name": "files",
        "image": REFERENCE,
        "args": ["/target"],
        "env": [{"name": "FGPU_FILES", "value": "\n".join(lines)}],
        "securityContext": {k: v for k, v in UNPRIVILEGED.items() if k != "runAsUser"},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "files", "mountPath": "/target"}],
    }
    return {
        "initContainers": [first],
        "volumes": [{"name": "files", "emptyDir": {}}],
        "container": {
            "securityContext": UNPRIVILEGED,
            "volumeMounts": [
                {"name": "files", "mountPath": "/run/fgpu", "readOnly": True},
                {
                    "name": "files",
                    "subPath": "ld.so.preload",
                    "mountPath": "/etc/ld.so.preload",
                    "readOnly": True,
                },
            ],
        },
    }


LOOK = """
import hashlib, json, os, pathlib
found = {}
for path in map(pathlib.Path, ("/run/fgpu/libfgpu.so", "/run/fgpu/limits", "/etc/ld.so.preload")):
    try:
        path.chmod(0o777)
        changed = "changed"
    except OSError as e:
        changed = e.strerror
    info = path.stat()
    found[str(path)] = [oct(info.st_mode & 0o777), info.st_uid, hashlib.sha256(path.read_bytes()).hexdigest(), changed]
print(json.dumps([os.getuid(), found]))
"""


def test_an_unprivileged_pod_gets_its_files_from_the_files_image_and_cannot_change_them(
    kube: KubeApi, make: Make, image: str
) -> None:
    found = native.find()
    assert found is not None, native.NOT_BUILT
    library, limits = digest_of(found.library), b"fgpu-limits 1\n"
    name = make(
        ["python", "-c", LOOK],
        image,
        **with_files(
            [
                f"755 libfgpu.so sha256:{library}",
                f"444 limits base64:{base64.b64encode(limits).decode()}",
                "444 ld.so.preload base64:",
            ]
        ),
    )
    ended(kube, name)
    read_only = "Read-only file system"
    assert json.loads(kube.text("GET", f"{PODS}/{name}/log")) == [
        NOBODY,
        {
            "/run/fgpu/libfgpu.so": ["0o755", NOBODY, library, read_only],
            "/run/fgpu/limits": ["0o444", NOBODY, hashlib.sha256(limits).hexdigest(), read_only],
            "/etc/ld.so.preload": ["0o444", NOBODY, hashlib.sha256(b"").hexdigest(), read_only],
        },
    ]


def test_a_files_image_of_another_version_is_named_in_the_pods_status(
    kube: KubeApi, make: Make, image: str
) -> None:
    name = make(["true"], image, **with_files([f"755 libfgpu.so sha256:{'0' * 64}"]))
    status = ended(kube, name)
    (first,) = status["initContainerStatuses"]
    over = first["state"]["terminated"]
    assert (status["phase"], over["exitCode"]) == ("Failed", 3)
    assert over["message"].startswith("put-files: this image is of another version than the Hub")
