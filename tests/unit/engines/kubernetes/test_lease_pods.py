"""Which leases are made, which count, and when one is deleted."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import pytest

from fgpu_scheduler import Device, Node, NodeState, Placement, Request, Session, SessionState, Share, Snapshot
from fgpuspawner.engines.kubernetes import leases as module
from fgpuspawner.engines.kubernetes.api import Refused
from fgpuspawner.engines.kubernetes.dialects.lease import Lease
from fgpuspawner.engines.kubernetes.leases import Leases
from fgpuspawner.isolation.report import Answer

PODS = "/api/v1/namespaces/lab/pods"
A, B = "GPU-aaaa", "GPU-bbbb"
GROUP = "default"


class Cluster:
    """A stand-in for a cluster with GPUs and its mirror of lease pods."""

    def __init__(self, **gpus: int) -> None:
        self.gpus = gpus
        self.ready = True
        self.smi: dict[str, str] = {}
        """What is answered by which pod; any other has no GPU that works."""
        self.refused: set[str] = set()
        self.leases = Leases(self, PODS, Lease("lab"), installation="lab", image="i")  # type: ignore[arg-type]
        self.leases.mirror.listed = True
        self.pods: dict[str, Any] = self.leases.mirror.found  # type: ignore[assignment]
        self.snapshot = Snapshot(0, 0, ())
        self.told = 0

    async def make(self, path: str, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        if name in self.refused:
            raise Refused(403, "exceeded quota")
        (on,) = body["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        node = on["matchFields"][0]["values"][0]
        body["metadata"]["uid"] = f"uid-{name}-{time.monotonic_ns()}"
        self.pods[name] = {
            **body,
            "spec": {**body["spec"], "nodeName": node},
            "status": {"phase": "Running"},
        }

    async def delete(self, path: str, *, uid: str) -> None:
        name = path.rpartition("/")[2]
        assert uid == self.pods[name]["metadata"]["uid"]
        del self.pods[name]

    async def run(self, pod: str, container: str, command: Collection[str], *, most_bytes: int) -> Answer:
        """Answer as nvidia-smi does."""
        uuid = self.smi.get(pod.rpartition("-")[2])
        return Answer(f"0, {uuid}, T4, 15360\n".encode(), 0) if uuid else Answer(b"No devices were found", 6)

    async def reconcile(self) -> list[str]:
        """Tend once, and return the numbers of the leases that there are then."""

        def tell() -> None:
            self.told += 1

        async def queue() -> Snapshot:
            return self.snapshot

        nodes = [
            {
                "metadata": {"name": name},
                "status": {
                    "allocatable": {"nvidia.com/gpu": str(gpus)},
                    "conditions": [{"type": "Ready", "status": str(self.ready)}],
                },
            }
            for name, gpus in self.gpus.items()
        ]
        await self.leases.reconcile(nodes, queue, tell)
        return sorted(name.rpartition("-")[2] for name in self.pods)

    def offered(self) -> set[str]:
        """Return what the next survey would find."""
        return {text.split(", ")[1] for text in self.leases.counting(self.pods.values()).values() if text}

    def queue(self, offers: Collection[str], holds: Collection[str] = ()) -> None:
        """Let the queue offer these GPUs, and have a session on each of those."""
        found = tuple(Device(u, "n1", n, "T4", 15360, 2000) for n, u in enumerate(offers))
        sessions = tuple(
            Session(
                n,
                Request("ann", f"s{n}", "python", GROUP, 500, 1000, 512),
                SessionState.RUNNING,
                0,
                attempt=1,
                placement=Placement("n1", (Share(uuid, 500, 1024, 25),)),
            )
            for n, uuid in enumerate(holds, 1)
        )
        self.snapshot = Snapshot(
            0, 0, (Node("n1", GROUP, 8000, 8192, state=NodeState.READY, devices=found),), sessions
        )


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER_S", 0)


@pytest.fixture
async def two() -> Cluster:
    """Two cards, leased and offered."""
    cluster = Cluster(n1=2)
    cluster.smi = {"0": A, "1": B}
    await cluster.reconcile()
    await cluster.reconcile()
    assert cluster.offered() == {A, B}
    cluster.queue([A, B])
    return cluster


async def test_changed_is_called_once_per_change() -> None:
    cluster = Cluster(n1=1)
    cluster.smi = {"0": A}
    for _ in range(3):
        await cluster.reconcile()
    assert (cluster.told, cluster.offered()) == (1, {A})
    cluster.gpus["n1"] = 2
    cluster.smi = {"0": A, "1": B}
    for _ in range(3):
        await cluster.reconcile()
    assert (cluster.told, cluster.offered()) == (2, {A, B})


async def test_nothing_is_done_before_leases_are_listed(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    two.leases.mirror.listed = False
    two.gpus.clear()
    two.queue([])
    assert await two.reconcile() == ["0", "1"]


async def test_leases_of_an_unready_node_stay(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOO_MANY_FOR_S", 0)
    two.ready, two.gpus = False, {"n1": 0}
    two.queue([])
    for _ in range(3):
        assert await two.reconcile() == ["0", "1"]
    assert two.offered() == {A, B}


async def test_refused_lease_does_not_stop_others() -> None:
    cluster = Cluster(n1=1, n2=1)
    cluster.smi = {"0": A}
    await cluster.reconcile()
    refused = next(iter(cluster.pods))
    cluster.pods.clear()
    cluster.refused = {refused}
    for _ in range(2):
        assert await cluster.reconcile() == ["0"]
    assert cluster.offered() == {A}


async def test_broken_gpu_is_not_offered_and_its_lease_stays() -> None:
    cluster = Cluster(n1=2)
    cluster.smi = {"0": A}
    for _ in range(3):
        assert await cluster.reconcile() == ["0", "1"]
    assert cluster.offered() == {A}


async def test_surplus_idle_leases_go_after_a_while(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    two.gpus["n1"] = 1
    assert await two.reconcile() == ["0", "1"]
    assert two.offered() == {A, B}, "a device plugin that is updated has no GPU for a moment"
    monkeypatch.setattr(module, "TOO_MANY_FOR_S", 0)
    two.queue([A, B], holds=[A])
    assert await two.reconcile() == ["0", "1"]
    assert two.offered() == {A}
    two.queue([A], holds=[A])
    assert await two.reconcile() == ["0"]


async def test_gpu_leased_twice_counts_once() -> None:
    cluster = Cluster(n1=2)
    cluster.smi = {"0": A, "1": A}
    await cluster.reconcile()
    await cluster.reconcile()
    assert len(cluster.leases.counting(cluster.pods.values())) == 1
    cluster.gpus.clear()
    cluster.queue([], holds=[A])
    await cluster.reconcile()
    assert len(await cluster.reconcile()) == 1, "one holds it"


async def test_failed_lease_is_made_again(two: Cluster) -> None:
    name = min(two.pods)
    evicted = two.pods[name] = {**two.pods[name], "status": {"phase": "Failed", "reason": "Evicted"}}
    assert await two.reconcile() == ["1", "2"]
    assert evicted not in two.pods.values()
