"""Sessions as pods beside plain KubeSpawner, on one cluster: POST to ready, and DELETE to gone.

    tests/kube/cluster.sh up --env kube.env; set -a; . ./kube.env
    .venv/bin/python bench/pods.py [--rounds 7] [--out bench/results/pods-DATE.json]

Needs the cluster of tests/kube with the default image. Both Hubs run on it, on the same image, and take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from hubs import ROOT, Asking, HubProcess
from machine import load, machine, quiet, source

# Of the same name as our own; what it imports lies beside it.
sys.path.append(str(ROOT / "tests/kube"))
FOUND = importlib.util.spec_from_file_location("hubs_of_tests", ROOT / "tests/kube/hubs.py")
assert FOUND is not None
assert FOUND.loader is not None
hubs_of_tests = importlib.util.module_from_spec(FOUND)
FOUND.loader.exec_module(hubs_of_tests)

OURS, PLAIN = "KubernetesFGPUSpawner", "KubeSpawner"
SLICE: dict[str, dict[str, Any]] = {OURS: {"fgpu": "0.5", "cpu": "1", "memory_mib": 1024}, PLAIN: {}}
PLAIN_CONFIG = """
c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
c.JupyterHub.hub_ip = {address!r}
c.JupyterHub.custom_scopes = {{
    f"custom:fgpu:{{s}}": {{"description": "named by the harness's role"}} for s in ("admin", "queue:read")
}}
c.KubeSpawner.image = "fgpuspawner/base:0.1"
c.KubeSpawner.image_pull_policy = "Never"
c.KubeSpawner.namespace = {namespace!r}
c.KubeSpawner.cmd = ["jupyterhub-singleuser"]
c.KubeSpawner.cpu_limit = 1
c.KubeSpawner.mem_limit = "1G"
configure = lambda *args, **settings: None
"""


async def measured(sides: dict[str, HubProcess], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each spawn and stop, by side. A first round is dropped: it fills caches."""
    found: dict[str, dict[str, list[float]]] = {side: {"spawn_s": [], "stop_s": []} for side in sides}
    async with AsyncExitStack() as stack:
        asking = {side: await stack.enter_async_context(Asking.of(hub)) for side, hub in sides.items()}
        for one in asking.values():
            await one.add_users(["ann"])
        for number in range(rounds + 1):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for side in order:
                await quiet()
                spawn_s = await asking[side].spawn("ann", SLICE[side])
                await asyncio.sleep(0.5)
                stop_s = await asking[side].stop("ann")
                print(
                    f"round {number or 'warm-up'}: {side:<22} ready {spawn_s:.2f} s, stopped {stop_s:.2f} s"
                )
                if number:
                    found[side]["spawn_s"].append(spawn_s)
                    found[side]["stop_s"].append(stop_s)
    return found


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
        plain = HubProcess(
            folder / "plain",
            before=PLAIN_CONFIG.format(address=cluster.address, namespace=hubs_of_tests.NAMESPACE),
            env={"KUBECONFIG": cluster.kubeconfig},
        )
        stack.callback(plain.close)
        plain.start()
        found = asyncio.run(measured({OURS: ours, PLAIN: plain}, given.rounds))
    ratios = {
        figure.replace("_s", "_ratio"): round(median(found[OURS][figure]) / median(found[PLAIN][figure]), 3)
        for figure in ("spawn_s", "stop_s")
    }
    medians = {side: {f: round(median(v), 2) for f, v in own.items()} for side, own in found.items()}
    print(json.dumps({"medians": medians, **ratios}, indent=1))
    if given.out:
        said = {
            "machine": machine(),
            "source": source(),
            "load": {"before": before, "after": load()},
            **ratios,
            "medians": medians,
            "values": found,
        }
        given.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
