"""What a large cluster costs the Hub: its start, a survey of the nodes, and a look at what runs.

    tests/kube/cluster.sh up --env kube.env; set -a; . ./kube.env
    .venv/bin/python bench/cluster_size.py [--nodes 500 --others 2000 --sessions 500] [--out bench/results/...]

Nodes and pods are objects of a real API server with the size that real ones have; nothing runs on them. The cluster's
controllers are frozen during it: they would declare such nodes dead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import load_kube_config
from machine import load, machine, source
from traitlets.config import Config

from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent, HubSide, Installation
from fgpuspawner.engines.kubernetes import api as cluster_api
from fgpuspawner.engines.kubernetes.api import Api, Refused, run_blocking
from fgpuspawner.engines.kubernetes.dialects.lease import Lease
from fgpuspawner.engines.kubernetes.engine import KubernetesEngine, log
from fgpuspawner.images.model import Catalogue
from fgpuspawner.settings import FGPU

ROOT = Path(__file__).parents[1]
ID = "benchsize"
OURS, OTHERS = "fgpu-bench-ours", "fgpu-bench-others"
LABEL = "fgpu.bench"
AT_A_TIME = 16


# --- What there is ---


def node(number: int) -> dict[str, Any]:
    labels = {LABEL: "size", "fgpu.group": "default", "kubernetes.io/hostname": f"bench-{number}"}
    # What GPU feature discovery writes.
    labels |= {f"nvidia.com/feature-{n}": f"value-{n}" for n in range(30)}
    return {"metadata": {"name": f"bench-{number}", "labels": labels}}


def node_status() -> dict[str, Any]:
    has = {"cpu": "64", "memory": "512Gi", "pods": "250", "nvidia.com/gpu": "8", "ephemeral-storage": "1Ti"}
    now = "2026-11-23T00:00:00Z"
    kinds = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable", "Ready")
    conditions = [
        {
            "type": kind,
            "status": "True" if kind == "Ready" else "False",
            "reason": "KubeletHasSufficient" + kind,
            "message": "kubelet has sufficient " + kind,
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        for kind in kinds
    ]
    # A kubelet tells of its fifty largest images.
    images = [
        {
            "names": [
                f"registry.example.org/lab/image-{n}@sha256:{n:064d}",
                f"registry.example.org/lab/image-{n}:1",
            ],
            "sizeBytes": 10**9 + n,
        }
        for n in range(50)
    ]
    return {"capacity": has, "allocatable": has, "conditions": conditions, "images": images}


def pod(name: str, where: str, *, labels: dict[str, str], amounts: dict[str, str]) -> dict[str, Any]:
    environment = [
        {"name": f"SETTING_{n}", "value": f"a value of some length, number {n}"} for n in range(25)
    ]
    container = {
        "name": "notebook",
        "image": "registry.example.org/lab/image:1",
        "env": environment,
        "resources": {"requests": amounts, "limits": amounts},
        "volumeMounts": [{"name": "data", "mountPath": f"/data/{n}", "subPath": str(n)} for n in range(8)],
    }
    annotations = {"fgpu.node": where, "lab.example.org/notes": "x" * 400}
    return {
        "metadata": {"name": name, "labels": {LABEL: "size", **labels}, "annotations": annotations},
        "spec": {
            "nodeName": where,
            "containers": [container],
            "volumes": [{"name": "data", "emptyDir": {}}],
            "terminationGracePeriodSeconds": 1,
        },
    }


def pod_status() -> dict[str, Any]:
    now = "2026-11-23T00:00:00Z"
    running = {
        "name": "notebook",
        "state": {"running": {"startedAt": now}},
        "ready": True,
        "restartCount": 0,
        "image": "registry.example.org/lab/image:1",
        "imageID": "registry.example.org/lab/image@sha256:" + 64 * "0",
        "containerID": "containerd://" + 64 * "0",
    }
    kinds = ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
    return {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "hostIP": "10.0.0.1",
        "startTime": now,
        "conditions": conditions,
        "containerStatuses": [running],
    }


async def each(steps: Sequence[Callable[[], Any]]) -> None:
    at_a_time = asyncio.Semaphore(AT_A_TIME)

    async def one(step: Callable[[], Any]) -> None:
        async with at_a_time:
            await step()

    await asyncio.gather(*(one(step) for step in steps))


async def make(api: Api, nodes: int, others: int, sessions: int) -> None:
    for namespace in (OURS, OTHERS):
        await api.ask("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
        account = {"metadata": {"name": "default"}}
        await api.ask("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", body=account)

    async def made(path: str, body: dict[str, Any], status: dict[str, Any]) -> None:
        there = await api.ask("POST", path, body=body)
        at = f"{path}/{body['metadata']['name']}/status"
        await api.ask("PUT", at, body={**there, "status": status})

    def step(path: str, body: dict[str, Any], status: dict[str, Any]) -> Callable[[], Any]:
        return lambda: made(path, body, status)

    await each([step("/api/v1/nodes", node(n), node_status()) for n in range(nodes)])
    steps = []
    for n in range(others):
        body = pod(f"theirs-{n}", f"bench-{n % nodes}", labels={}, amounts={"cpu": "1", "memory": "4Gi"})
        body["spec"]["automountServiceAccountToken"] = False
        steps.append(step(f"/api/v1/namespaces/{OTHERS}/pods", body, pod_status()))
    for n in range(1, sessions + 1):
        labels = {"fgpu.installation": ID, "fgpu.session": str(n), "fgpu.attempt": "1"}
        amounts = {"cpu": "2", "memory": "8Gi"}
        body = pod(f"fgpu-{ID}-{n}-1", f"bench-{n % nodes}", labels=labels, amounts=amounts)
        body["spec"]["automountServiceAccountToken"] = False
        steps.append(step(f"/api/v1/namespaces/{OURS}/pods", body, pod_status()))
    await each(steps)


async def remove(api: Api) -> None:
    """Delete all of it. That many at once take the API longer than the engine waits for an answer."""
    mine = [("labelSelector", f"{LABEL}=size")]
    for path in (*(f"/api/v1/namespaces/{n}/pods" for n in (OURS, OTHERS)), "/api/v1/nodes"):
        while await api.names(path, mine):
            with contextlib.suppress(EngineSilent):
                await api.ask("DELETE", path, query=mine, body={"gracePeriodSeconds": 0})
    for namespace in (OURS, OTHERS):
        try:
            await api.ask("DELETE", f"/api/v1/namespaces/{namespace}")
        except Refused as e:
            if e.status not in (404, 409):
                raise


# --- What it costs ---


class Counting:
    """Replaces `json` for reading answers, and counts what was read. ``longest_s`` is the CPU time of the longest read:
    no other Python thread runs during it.
    """

    dumps = staticmethod(json.dumps)

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self.longest_s = 0.0

    def loads(self, text: bytes | str) -> Any:
        began_s = time.thread_time()
        found = json.loads(text)
        self.longest_s = max(self.longest_s, time.thread_time() - began_s)
        self.calls += 1
        self.bytes += len(text)
        return found


@contextlib.contextmanager
def watched(counting: Counting) -> Iterator[dict[str, float]]:
    """Measure what happens during the block."""
    found: dict[str, float] = {}
    calls, read, counting.longest_s = counting.calls, counting.bytes, 0.0
    began_s, cpu_s = time.monotonic(), time.process_time()
    yield found
    found |= {
        "answers": counting.calls - calls,
        "read_mb": round((counting.bytes - read) / 1e6, 2),
        "wall_ms": round(1000 * (time.monotonic() - began_s)),
        "cpu_ms": round(1000 * (time.process_time() - cpu_s)),
        "longest_read_ms": round(1000 * counting.longest_s),
    }


async def measure(kubeconfig: str, sessions: int, nodes: int, idle_s: float) -> dict[str, Any]:
    counting = Counting()
    cluster_api.json = counting  # type: ignore[attr-defined]
    configuration = Configuration()
    await load_kube_config(kubeconfig, client_configuration=configuration)
    process = psutil.Process()
    anything: Any = None
    with tempfile.TemporaryDirectory() as folder:
        installation = Installation(ID, FGPU(data_dir=folder), Config(), lambda: Catalogue(()))
        before_mb = process.memory_info().rss / 1e6
        engine = KubernetesEngine(
            installation, configuration, namespace=OURS, stop_timeout_s=1, dialect=Lease(ID)
        )
        found: dict[str, Any] = {}
        with watched(counting) as found["first survey"]:
            assert len(await asyncio.to_thread(engine.survey)) >= nodes
        background = Background(log)
        side = HubSide(anything, anything, background, (), lambda: None, lambda limit: (), set)
        with watched(counting) as found["following begins"]:
            engine.open(side)
            while True:
                seen = await engine.observe()
                mirrors = [m for m in vars(engine).values() if type(m).__name__ == "Mirror"]
                if len(seen.things) == sessions and all(mirror.listed for mirror in mirrors):
                    break
                await asyncio.sleep(0.2)
        with watched(counting) as found["survey"]:
            assert len(await asyncio.to_thread(engine.survey)) >= nodes
        with watched(counting) as found["look"]:
            assert len((await engine.observe()).things) == sessions
        with watched(counting) as found["idle"]:
            await asyncio.sleep(idle_s)
        found["memory_mb"] = {
            "more than before": round(process.memory_info().rss / 1e6 - before_mb),
            "at most": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before_mb),
        }
        await background.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--others", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--idle-s", type=float, default=60)
    parser.add_argument(
        "--keep", action="store_true", help="leave the objects there, and take those that are there"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kubeconfig, number = os.environ["FGPU_TEST_KUBECONFIG"], os.environ["FGPU_TEST_KUBE"]
    configuration = Configuration()
    run_blocking(lambda: load_kube_config(kubeconfig, client_configuration=configuration))

    async def asked(do: Callable[[Api], Any]) -> None:
        api = Api(configuration)
        try:
            await do(api)
        finally:
            await api.close()

    def controllers(verb: str) -> None:
        subprocess.run(
            [ROOT / "tests/kube/cluster.sh", f"{verb}-controllers", number], check=True, timeout=200
        )

    def there() -> bool:
        answers: list[Any] = []

        async def look(api: Api) -> None:
            answers.append(await api.ask("GET", "/api/v1/nodes", query=[("labelSelector", f"{LABEL}=size")]))

        run_blocking(lambda: asked(look))
        return bool(answers[0]["items"])

    controllers("freeze")
    before = load()
    try:
        if not (args.keep and there()):
            run_blocking(lambda: asked(lambda api: make(api, args.nodes, args.others, args.sessions)))
        found = asyncio.run(measure(kubeconfig, args.sessions, args.nodes, args.idle_s))
    finally:
        if not args.keep:
            run_blocking(lambda: asked(remove))
        controllers("thaw")
    result = {
        "size": {"nodes": args.nodes, "others": args.others, "sessions": args.sessions},
        "found": found,
        "load": {"before": before, "after": load()},
        "machine": machine(),
        "source": source(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
