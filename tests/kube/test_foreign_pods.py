"""Pods of others that take CPU and memory while sessions are placed, on a node that is only an object of the API.

The API server and the scheduler are real: who gets what is decided as in any cluster. The test answers for the node's
kubelet: what is bound runs at once, what is deleted is gone at once. So this proves what becomes of places and amounts,
and nothing of processes; tests/kube/test_leases.py does the same with pods that run.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hubs import MERGE, Cluster
from labs import NAMESPACE, KubeLab

from fgpu_scheduler import EndCause, Queue, Request, Requeued, Scheduler, Session, SessionState, Store
from fgpuspawner.engines.base import Launched, NotBound
from fgpuspawner.engines.kubernetes import endings
from fgpuspawner.engines.kubernetes.api import Api, Refused
from fgpuspawner.engines.kubernetes.dialects.base import quantity
from fgpuspawner.engines.kubernetes.inventory import pod_requests
from fgpuspawner.hub.inventory import Inventory

NODE = "fgpu-fake"
ROUNDS = 200
CPU_MILLI, MEMORY_MIB = 4000, 8192
HAS = {"cpu": "4", "memory": "8Gi", "pods": "200"}
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
AT = f"/api/v1/nodes/{NODE}"
FASTER = 60
"""So much faster the queue's clock goes: a node that was refused is tried again after half a second."""
SETTLED_WITHIN_S = 30


class Fast:
    """A clock that goes faster."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._from_s = int(time.time())

    def now_s(self) -> int:
        """Return the instant."""
        return self._from_s + int(FASTER * (time.monotonic() - self._began))


class FakeLab(KubeLab):
    """Sessions on the fake node alone."""

    def nodes(self) -> list[dict[str, Any]]:
        return [{"name": NODE, "gpus": {"simulated": 2}}]

    def of(self, session: Session) -> Any:
        # What is not among those up to this one is removed.
        self._sessions = max(self._sessions, session.id)
        return self.spec(self.engines[-1], session)


class Kubelet:
    """What the node's kubelet would say."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def beat(self) -> None:
        """Say that the node is there."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now}
        status = {"capacity": HAS, "allocatable": HAS, "conditions": [{**ready, "lastTransitionTime": now}]}
        await self._api.ask("PATCH", f"{AT}/status", body={"status": status}, content=MERGE)

    async def live(self) -> None:
        """Go on until it is cancelled."""
        beaten = 0.0
        while True:
            if time.monotonic() - beaten > 4:
                await self.beat()
                beaten = time.monotonic()
            await asyncio.gather(*(self._tend(pod) for pod in await self.pods()))
            await asyncio.sleep(0.03)

    async def pods(self) -> list[dict[str, Any]]:
        """Return what is bound to the node."""
        on_node = [("fieldSelector", f"spec.nodeName={NODE}")]
        return list((await self._api.ask("GET", PODS, query=on_node))["items"])

    async def _tend(self, pod: dict[str, Any]) -> None:
        path = f"{PODS}/{pod['metadata']['name']}"
        try:
            if pod["metadata"].get("deletionTimestamp"):
                # First that it has ended: of one that is only forgotten the Hub believes that it runs on for a while.
                await self._say(pod, "Succeeded", {"terminated": {"exitCode": 0}})
                uid = {"preconditions": {"uid": pod["metadata"]["uid"]}}
                await self._api.ask("DELETE", path, body={"gracePeriodSeconds": 0, **uid})
            elif pod["status"]["phase"] == "Pending":
                await self._say(pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})
        except Refused as e:
            if e.status not in (404, 409):
                raise

    async def _say(self, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        of_each = {"state": state, "ready": "running" in state, "image": "", "imageID": "", "restartCount": 0}
        told = [{"name": c["name"], **of_each} for c in pod["spec"]["containers"]]
        status = {"phase": phase, "podIP": "10.0.0.1", "containerStatuses": told}
        path = f"{PODS}/{pod['metadata']['name']}/status"
        await self._api.ask("PATCH", path, body={"status": status}, content=MERGE)


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[Api]:
    api = Api(cluster.configuration)
    yield api
    await api.close()


@pytest.fixture
async def kubelet(api: Api) -> AsyncIterator[Kubelet]:
    kubelet = Kubelet(api)
    labels = {"kubernetes.io/hostname": NODE}
    await api.ask("POST", "/api/v1/nodes", body={"metadata": {"name": NODE, "labels": labels}})
    living = asyncio.create_task(kubelet.live())
    try:
        # The cluster closes a node until it has seen it ready.
        for _ in range(300):
            if not (await api.ask("GET", AT))["spec"].get("taints"):
                break
            await asyncio.sleep(0.2)
        yield kubelet
    finally:
        for pod in await kubelet.pods():
            await api.ask("DELETE", f"{PODS}/{pod['metadata']['name']}", body={"gracePeriodSeconds": 0})
        assert not living.done(), living.exception()
        living.cancel()
        await asyncio.wait([living])
        await api.ask("DELETE", AT)


@pytest.fixture
def lab(tmp_path: Path, cluster: Cluster, kubelet: Kubelet) -> Iterator[FakeLab]:
    lab = FakeLab(tmp_path)
    yield lab
    lab.close()


class World:
    """A queue whose sessions are pods of the fake node."""

    def __init__(self, lab: FakeLab, queue: Queue, inventory: Inventory, api: Api, seed: int) -> None:
        self.lab, self.queue, self.inventory, self.api = lab, queue, inventory, api
        self.random = random.Random(seed)
        self.given_back = 0
        self.tasks: list[asyncio.Task[Session]] = []
        self.foreign: list[str] = []

    async def session(self, name: str) -> None:
        """Ask for a session, and launch it as the Hub does."""
        await asyncio.sleep(self.random.uniform(0, 0.2))
        cpu, memory = self.random.choice([200, 500, 1000]), self.random.choice([128, 1024, 2048])
        request = Request("ann", name, "python", "default", 200, cpu, memory)
        (session,) = await self.queue.submit([request])
        self.tasks.append(asyncio.create_task(self._launched(session.id)))

    async def _launched(self, session_id: int) -> Session:
        engine = self.lab.engines[-1]
        while True:
            await self.queue.placed(session_id)
            with self.queue.launching(session_id):
                try:
                    session = await self.queue.prepare(session_id)
                except Requeued:
                    continue
                assert session.attempt == 1 or await engine.stop(session, now=True)
                try:
                    endpoint = await engine.start(self.lab.of(session))
                except NotBound as e:
                    self.given_back += 1
                    await self.queue.give_back(session_id, session.attempt, str(e))
                    continue
                launched = Launched(endpoint.ip, endpoint.port, "none").to_json()
                return await self.queue.running(session_id, session.attempt, launched)

    async def others(self, name: str) -> None:
        """Let somebody else take something."""
        await asyncio.sleep(self.random.uniform(0, 0.4))
        cpu, memory = self.random.choice([300, 1000, 2500]), self.random.choice([64, 1024, 4096])
        takes = {"requests": {"cpu": f"{cpu}m", "memory": f"{memory}Mi"}}
        spec = {
            "containers": [{"name": "theirs", "image": "theirs", "resources": takes}],
            "nodeSelector": {"kubernetes.io/hostname": NODE},
        }
        await self.api.ask("POST", PODS, body={"metadata": {"name": name}, "spec": spec})
        self.foreign.append(name)

    async def look(self) -> None:
        """Let the Hub look what its nodes have."""
        await asyncio.sleep(self.random.uniform(0, 0.4))
        await self.inventory.look()

    async def nobody_else(self) -> None:
        """Let the others go."""
        for name in self.foreign:
            await self.api.ask("DELETE", f"{PODS}/{name}", body={"gracePeriodSeconds": 0})
        self.foreign.clear()
        await self.inventory.look()

    async def end_all(self) -> None:
        """End the sessions."""
        for session in await self.queue.live():
            with self.queue.ending(session.id):
                await self.queue.end(session.id, EndCause.USER)
                assert await self.lab.engines[-1].stop(session, now=True)
                await self.queue.gone(session.id)


async def look_again_and_again(inventory: Inventory) -> None:
    """Look what nodes have, as the Hub does once a minute: what was heard of last may be of a moment ago."""
    while True:
        await asyncio.sleep(60 / FASTER)
        await inventory.look()


def check_not_over_committed(pods: list[dict[str, Any]]) -> None:
    """See that nothing is over-committed, by the cluster's own account."""
    taken = [pod_requests(pod) for pod in pods]
    for name in ("cpu", "memory"):
        assert sum(t.get(name, Decimal(0)) for t in taken) <= quantity(HAS[name]), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_pods_of_others_at_any_instant_over_commit_nothing_and_cost_nobody_their_place(
    lab: FakeLab, kubelet: Kubelet, api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endings, "UNBOUND_FOR_S", 0.5)
    engine = lab.engine()
    store = Store(f"sqlite:///{tmp_path / 'queue.sqlite'}")
    store.open()
    settings = lab.settings
    caps = settings.caps()
    queue = Scheduler(store, policy=settings.policy(), caps=caps, launcher=engine, clock=Fast())
    nodes = tuple(node for node in lab.placed if node.id == NODE)
    inventory = Inventory(settings, engine.survey, lab.isolation, queue, nodes)
    given_back = waited = 0
    looking = asyncio.create_task(look_again_and_again(inventory))
    try:
        await queue.start(nodes)
        for seed in range(ROUNDS):
            world = World(lab, queue, inventory, api, seed)
            sessions = [f"r{seed}s{n}" for n in range(world.random.randint(1, 4))]
            others = [f"theirs-{seed}-{n}" for n in range(world.random.randint(1, 4))]
            await asyncio.gather(
                *map(world.session, sessions), *map(world.others, others), world.look(), world.look()
            )
            await asyncio.sleep(world.random.uniform(0.3, 1.0))
            check_not_over_committed(await kubelet.pods())
            live = await queue.live()
            assert sorted(s.request.server_name for s in live) == sessions, seed
            waiting = [s.id for s in live if s.state is SessionState.PENDING]
            waited += len(waiting)
            # Of one user, in the order in which they were asked for: also those that were given back.
            order = [i for i in (await queue.outlook()).forecasts if i in waiting]
            assert order == sorted(order), seed
            await world.nobody_else()
            async with asyncio.timeout(SETTLED_WITHIN_S):
                ran = await asyncio.gather(*world.tasks)
            assert {s.state for s in ran} == {SessionState.RUNNING}, seed
            check_not_over_committed(await kubelet.pods())
            given_back += world.given_back
            await world.end_all()
        print(f"\n{ROUNDS} rounds: {given_back} places given back, {waited} sessions waited")
        assert given_back > ROUNDS / 20, "the rounds show something"
        assert not looking.done(), looking.exception()
    finally:
        looking.cancel()
        await asyncio.wait([looking])
        await queue.stop()
        store.close()
        if lab.background is not None:
            await lab.background.close()
