"""Sessions as pods beside plain KubeSpawner on one cluster: POST to ready, DELETE to gone, where a start's time goes.

    tests/kube/cluster.sh up --env kube.env; set -a; . ./kube.env
    .venv/bin/python bench/pods.py [--rounds 7] [--out bench/results/pods-DATE.json]

Needs the cluster of tests/kube with the default image, and the Docker engine that it is from. The Hubs take turns:
ours, KubeSpawner with an ordinary server environment, and KubeSpawner on our image.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from hubs import ROOT, Asking, HubProcess, ordinary
from machine import load, machine, quiet, source

from fgpuspawner.engines.docker.daemon import connect_here
from fgpuspawner.engines.kubernetes.api import Api

# Of the same name as our own; what it imports lies beside it.
sys.path.append(str(ROOT / "tests/kube"))
FOUND = importlib.util.spec_from_file_location("hubs_of_tests", ROOT / "tests/kube/hubs.py")
assert FOUND is not None
assert FOUND.loader is not None
hubs_of_tests = importlib.util.module_from_spec(FOUND)
FOUND.loader.exec_module(hubs_of_tests)

OURS, PLAIN, SAME = "KubernetesFGPUSpawner", "KubeSpawner", "on our image"
SLICE: dict[str, dict[str, Any]] = {
    OURS: {"fgpu": "0.5", "cpu": "1", "memory_mib": 1024},
    PLAIN: {},
    SAME: {},
}
RATIOS = {"": PLAIN, "same_image_": SAME}
IMAGE, ORDINARY = "fgpuspawner/base:0.1", "fgpubench/ordinary:1"
PLAIN_CONFIG = """
c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
c.JupyterHub.hub_ip = {address!r}
c.JupyterHub.custom_scopes = {{
    f"custom:fgpu:{{s}}": {{"description": "named by the harness's role"}} for s in ("admin", "queue:read")
}}
c.KubeSpawner.image = {image!r}
c.KubeSpawner.image_pull_policy = "Never"
c.KubeSpawner.namespace = {namespace!r}
c.KubeSpawner.cmd = ["jupyterhub-singleuser"]
c.KubeSpawner.cpu_limit = 1
c.KubeSpawner.mem_limit = "1G"
configure = lambda *args, **settings: None
"""


# --- Where the time goes ------------------------------------------------------------------------------


class Timeline:
    """When each thing of one start happened, in seconds since it was asked for.

    What the API tells is timed as it comes here; what the node's containerd and the Hub do is as they log it.
    """

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._began_s = time.time()

    def began(self) -> None:
        """Count from now on."""
        self._began_s = time.time()

    def mark(self, what: str, at_s: float | None = None) -> None:
        """Note the first time of something."""
        self.found.setdefault(what, round((at_s or time.time()) - self._began_s, 3))

    def told(self, pod: dict[str, Any]) -> None:
        """Note what is new in what the API tells of a pod."""
        status = pod.get("status") or {}
        self.mark("told: made")
        if pod["spec"].get("nodeName"):
            self.mark("told: scheduled")
        if status.get("podIP"):
            self.mark("told: address")
        for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
            for state in ("running", "terminated"):
                if one["state"].get(state):
                    self.mark(f"told: {one['name']} {state}")

    def logged(self, containerd: str, hub: str) -> None:
        """Note what the logs say of this time."""
        started = 0
        for line in containerd.splitlines():
            at = re.search(r'time="([^"]+)".*(RunPodSandbox|StartContainer) for .* return', line)
            if at is None or (at_s := instant_s(at[1])) < self._began_s:
                continue
            if at[2] == "RunPodSandbox":
                self.mark("node: sandbox", at_s)
            else:
                started += 1
                self.mark(f"node: container {started} started", at_s)
        for at in re.finditer(r"^\[I (\S+ \S+) .*Session \d+ is verified", hub, re.MULTILINE):
            at_s = datetime.strptime(at[1], "%Y-%m-%d %H:%M:%S.%f").timestamp()
            if at_s >= self._began_s:
                self.mark("Hub: verified", at_s)


def instant_s(text: str) -> float:
    """Return an instant as Go's logs have it, with nine digits."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", text)).timestamp()


@asynccontextmanager
async def watched(cluster: Any, hub: HubProcess) -> AsyncIterator[Timeline]:
    """Record the cluster's events during the block."""
    api, line = Api(cluster.configuration), Timeline()
    pods = f"/api/v1/namespaces/{hubs_of_tests.NAMESPACE}/pods"
    version = (await api.ask("GET", pods, query=[("limit", "1")]))["metadata"]["resourceVersion"]

    async def follow() -> None:
        async for event in api.watch(pods, (), version):
            if event["type"] in ("ADDED", "MODIFIED"):
                line.told(event["object"])

    following = asyncio.create_task(follow())
    await asyncio.sleep(0.1)
    line.began()
    try:
        yield line
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await api.close()
        containerd = Path(cluster.kubeconfig).parent / "logs/containerd"
        line.logged(containerd.read_text(errors="replace"), hub.log_text())


# --- Measuring ----------------------------------------------------------------------------------------


async def measured(
    cluster: Any, sides: dict[str, HubProcess], rounds: int
) -> dict[str, dict[str, list[Any]]]:
    """Return the seconds of each spawn and stop, by side. A first round is dropped: it fills caches."""
    found: dict[str, dict[str, list[Any]]] = {
        side: {"spawn_s": [], "stop_s": [], "timeline_s": []} for side in sides
    }
    async with AsyncExitStack() as stack:
        asking = {side: await stack.enter_async_context(Asking.of(hub)) for side, hub in sides.items()}
        for one in asking.values():
            await one.add_users(["ann"])
        for number in range(rounds + 1):
            turned = [*list(sides)[number % len(sides) :], *list(sides)[: number % len(sides)]]
            for side in turned:
                await quiet()
                async with watched(cluster, sides[side]) as line:
                    spawn_s = await asking[side].spawn("ann", SLICE[side])
                    line.mark("ready")
                await asyncio.sleep(0.5)
                stop_s = await asking[side].stop("ann")
                print(
                    f"round {number or 'warm-up'}: {side:<22} ready {spawn_s:.2f} s, stopped {stop_s:.2f} s"
                )
                if number:
                    found[side]["spawn_s"].append(spawn_s)
                    found[side]["stop_s"].append(stop_s)
                    found[side]["timeline_s"].append(line.found)
    return found


def timelines(found: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, float]]:
    """Return the median of each instant of a start, by side, in their order."""
    medians = {}
    for side, own in found.items():
        lines = own["timeline_s"]
        names = [name for name in lines[0] if all(name in line for line in lines)]
        middle = {name: round(median(line[name] for line in lines), 2) for name in names}
        medians[side] = dict(sorted(middle.items(), key=lambda one: one[1]))
    return medians


def bring_ordinary(stack: ExitStack) -> None:
    """Put into the cluster the image with a server that imports an ordinary environment's modules."""
    client = connect_here({})
    stack.callback(client.close)
    ordinary(client, IMAGE, ORDINARY)
    stack.callback(client.remove_image, ORDINARY, force=True)
    script = str(ROOT / "tests/kube/cluster.sh")
    with subprocess.Popen(["docker", "save", ORDINARY], stdout=subprocess.PIPE) as saved:
        words = [script, "import", os.environ["FGPU_TEST_KUBE"], "-"]
        subprocess.run(words, stdin=saved.stdout, check=True)


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cluster = hubs_of_tests.Cluster()
    before = load()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = stack.enter_context(hubs_of_tests.on(cluster, folder / "ours", gpus=4, mini=False))
        bring_ordinary(stack)
        sides = {OURS: ours}
        for side, image in ((PLAIN, ORDINARY), (SAME, IMAGE)):
            config = PLAIN_CONFIG.format(
                address=cluster.address, namespace=hubs_of_tests.NAMESPACE, image=image
            )
            env = {"KUBECONFIG": cluster.kubeconfig}
            sides[side] = HubProcess(folder / side.replace(" ", "-"), before=config, env=env)
            stack.callback(sides[side].close)
            sides[side].start()
        found = asyncio.run(measured(cluster, sides, given.rounds))
    figures = ("spawn_s", "stop_s")
    medians = {side: {f: round(median(own[f]), 2) for f in figures} for side, own in found.items()}
    ratios = {
        f"{prefix}{figure.removesuffix('_s')}_ratio": round(
            median(found[OURS][figure]) / median(found[other][figure]), 3
        )
        for prefix, other in RATIOS.items()
        for figure in figures
    }
    lines = timelines(found)
    print(json.dumps({"medians": medians, **ratios, "timelines_s": lines}, indent=1))
    if given.out:
        said = {
            "machine": machine(),
            "source": source(),
            "load": {"before": before, "after": load()},
            **ratios,
            "medians": medians,
            "timelines_s": lines,
            "values": found,
        }
        given.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
