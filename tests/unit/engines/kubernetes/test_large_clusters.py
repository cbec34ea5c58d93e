"""The calls of a large cluster's API: pages, names only, and none for what the watches know."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from apiserver import answering, followed, until
from kubernetes_asyncio.client import Configuration
from traitlets.config import Config

from dialectworlds import slice_of
from fgpu_scheduler import Device, EndCause
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent, HubSide, Installation
from fgpuspawner.engines.kubernetes import api as cluster_api
from fgpuspawner.engines.kubernetes import engine as kubernetes_engine
from fgpuspawner.engines.kubernetes.api import Api
from fgpuspawner.engines.kubernetes.dialects.base import Dialect
from fgpuspawner.engines.kubernetes.dialects.dra import Dra
from fgpuspawner.engines.kubernetes.dialects.lease import Lease
from fgpuspawner.engines.kubernetes.engine import KubernetesEngine
from fgpuspawner.engines.kubernetes.mirror import Mirror
from fgpuspawner.images.model import Catalogue
from fgpuspawner.settings import FGPU

ID = "lab"
OWN = "/api/v1/namespaces/jhub/pods"
ALL = "/api/v1/pods"
NODES = "/api/v1/nodes"


def pod(name: str, *, namespace: str = "others", ours: bool = False) -> dict[str, Any]:
    session = name.split("-")[2] if ours else "0"
    labels = {"fgpu.installation": ID, "fgpu.session": session, "fgpu.attempt": "1"} if ours else {}
    metadata = {"name": name, "namespace": namespace, "labels": labels, "annotations": {"fgpu.node": "gpu1"}}
    asks = {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}
    running = [{"name": "notebook", "state": {"running": {}}}]
    return {
        "metadata": metadata,
        "spec": {"nodeName": "gpu1", "containers": [asks]},
        "status": {"phase": "Running", "containerStatuses": running},
    }


def node(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"fgpu.group": "default"}},
        "status": {
            "allocatable": {"cpu": "64", "memory": "64Gi"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@dataclass
class Cluster:
    """An API with these objects, which pages, and counts calls except watches."""

    has: dict[str, list[dict[str, Any]]]
    forgets: int = 0
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, query = request.path, request.query
        kind = "watch" if "watch" in query else "table" if "includeObject" in query else "list"
        if kind != "watch":
            self.asked[path, kind] += 1
        else:
            stream = web.StreamResponse()
            await stream.prepare(request)
            await self.gone.wait()
            return stream
        if path not in self.has:
            found = {p["metadata"]["name"]: p for p in self.has[OWN]}.get(path.rpartition("/")[2])
            if found is None:
                said = {"kind": "Status", "reason": "NotFound", "message": "not found"}
                return web.json_response(said, status=404)
            return web.json_response({"kind": "Pod", **found})
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 10**6)
        if start and self.forgets:
            self.forgets -= 1
            said = {"kind": "Status", "reason": "Expired", "message": "the continue token is too old"}
            return web.json_response(said, status=410)
        items = self.has[path][start : start + limit]
        more = start + limit < len(self.has[path])
        metadata = {"resourceVersion": "7", "continue": str(start + limit) if more else ""}
        if kind == "table":
            columns = [{"name": "Status"}, {"name": "Name"}]
            rows = [{"cells": ["Running", item["metadata"]["name"]]} for item in items]
            return web.json_response(
                {"kind": "Table", "metadata": metadata, "columnDefinitions": columns, "rows": rows}
            )
        return web.json_response({"kind": "List", "metadata": metadata, "items": items})


def many(count: int) -> list[dict[str, Any]]:
    return [pod(f"theirs-{n}") for n in range(count)]


async def test_list_is_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_api, "PAGE", 100)
    cluster = Cluster({ALL: many(250)})
    async with answering(cluster.answer) as api:
        mirror = Mirror(api, ALL, what="pods", keep=dict, everywhere=True)
        async with followed(mirror):
            await until(lambda: mirror.listed)
            cluster.gone.set()
    assert len(mirror.found) == 250
    assert "others/theirs-249" in mirror.found
    assert cluster.asked[ALL, "list"] == 3


async def test_list_that_expires_while_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_api, "PAGE", 100)
    cluster = Cluster({ALL: many(150)}, forgets=1)
    async with answering(cluster.answer) as api:
        with pytest.raises(EngineSilent, match="too slow"):
            await api.listed(ALL, keep=dict)
        assert len(await api.listed(ALL, keep=dict)) == 150


async def test_names_are_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_api, "NAMES_PAGE", 100)
    cluster = Cluster({OWN: many(250)})
    async with answering(cluster.answer) as api:
        assert await api.names(OWN, ()) == {f"theirs-{n}" for n in range(250)}
    assert cluster.asked[OWN, "table"] == 3


async def test_table_without_names_is_not_an_empty_cluster() -> None:
    async def other(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Table", "metadata": {}, "columnDefinitions": [], "rows": []})

    async with answering(other) as api:
        with pytest.raises(EngineSilent):
            await api.names(OWN, ())


# --- The engine ---


@asynccontextmanager
async def opened(
    cluster: Cluster, folder: Path, dialect: Dialect | None = None
) -> AsyncIterator[tuple[KubernetesEngine, Api]]:
    """An engine that follows the cluster."""
    async with answering(cluster.answer) as api:
        settings = FGPU(data_dir=str(folder))
        configuration = Configuration(host=api._configuration.host)
        installation = Installation(ID, settings, Config(), lambda: Catalogue(()))
        engine = KubernetesEngine(
            installation, configuration, namespace="jhub", stop_timeout_s=1, dialect=dialect or Lease(ID)
        )
        background = Background(kubernetes_engine.log)
        anything: Any = None
        engine.open(
            HubSide(
                isolation=anything,
                queue=anything,
                background=background,
                urls=(),
                nodes_changed=lambda: None,
                ended=lambda limit: (),
                kept_images=set,
            )
        )
        try:
            mirrors: list[Any] = [engine._pods, engine._nodes, engine._others]
            await until(lambda: all(mirror.listed for mirror in mirrors))
            yield engine, api
        finally:
            cluster.gone.set()
            await background.close()


def full() -> Cluster:
    sessions = [pod(f"fgpu-{ID}-{n}-1", namespace="jhub", ours=True) for n in (1, 2)]
    return Cluster({NODES: [node("gpu1"), node("gpu2")], ALL: many(3) + sessions, OWN: sessions})


async def test_survey_costs_no_call_while_the_watches_run(tmp_path: Path) -> None:
    cluster = full()
    async with opened(cluster, tmp_path) as (engine, _):
        cluster.asked.clear()
        for _ in range(3):
            found = await asyncio.to_thread(engine.survey)
        assert not cluster.asked
    machine = found["gpu1"]
    assert machine is not None
    assert (machine.cpu_milli, machine.memory_mib) == (61_000, 61 * 1024)


async def test_survey_fails_while_a_watch_is_in_trouble(tmp_path: Path) -> None:
    async with opened(full(), tmp_path) as (engine, _):
        assert engine._others is not None
        engine._others.trouble = "pods is forbidden"
        with pytest.raises(EngineSilent, match="pods is forbidden"):
            await asyncio.to_thread(engine.survey)


async def test_observation_asks_for_names_and_for_pods_if_one_is_new(tmp_path: Path) -> None:
    cluster = full()
    async with opened(cluster, tmp_path) as (engine, _):
        new = pod(f"fgpu-{ID}-3-1", namespace="jhub", ours=True)
        cluster.has[OWN] = [*cluster.has[OWN][1:], new]
        cluster.asked.clear()
        seen = await engine.observe()
    assert sorted(thing.session_id for thing in seen.things) == [2, 3], "the first is gone, the third is new"
    assert cluster.asked == {(OWN, "table"): 1, (OWN, "list"): 1}


async def test_all_pods_are_listed_while_their_watch_is_in_trouble(tmp_path: Path) -> None:
    cluster = full()
    async with opened(cluster, tmp_path) as (engine, _):
        assert engine._pods is not None
        engine._pods.trouble = "watch is forbidden"
        cluster.has[OWN][0]["status"] = {"phase": "Succeeded"}
        seen = await engine.observe()
    assert {thing.session_id: thing.alive for thing in seen.things} == {1: False, 2: True}


async def test_pod_deleted_while_its_node_is_away_counts_as_running(
    tmp_path: Path,
) -> None:
    cluster = full()
    for n, one in enumerate(cluster.has[OWN]):
        one["metadata"] |= {"deletionTimestamp": "now", "annotations": {"fgpu.node": f"gpu{n + 1}"}}
    cluster.has[NODES][0]["status"]["conditions"][0]["status"] = "Unknown"
    async with opened(cluster, tmp_path) as (engine, _):
        seen = await engine.observe()
    assert {thing.session_id: thing.alive for thing in seen.things} == {1: True, 2: False}
    assert list(seen.nodes) == ["gpu2"]


async def test_pod_of_a_removed_node_ends_by_node_loss(tmp_path: Path) -> None:
    cluster = full()
    async with opened(cluster, tmp_path) as (engine, _):
        causes = []
        for name in ("gpu1", "gpu9"):
            gone: Any = SimpleNamespace(id=9, attempt=1, placement=SimpleNamespace(node_id=name))
            ended = await engine.ended(gone)
            causes.append(ended and ended.cause)
    assert causes == [EndCause.EXITED, EndCause.NODE_LOST]


async def test_claim_of_another_pod_hides_only_its_gpu(tmp_path: Path) -> None:
    devices = [Device(f"GPU-{n}", "gpu1", n, "A100", 40960, 1000) for n in range(2)]
    found = slice_of(devices)
    found["spec"]["nodeName"] = "gpu1"
    theirs = pod("theirs-0")
    theirs["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "training"}]
    result = {"driver": "gpu.nvidia.com", "pool": found["spec"]["pool"]["name"], "device": "gpu-0"}
    claim = {
        "metadata": {"name": "training", "namespace": "others"},
        "status": {"allocation": {"devices": {"results": [{**result, "request": "gpu"}]}}},
    }
    dra = "/apis/resource.k8s.io/v1"
    has = {f"{dra}/resourceslices": [found], f"{dra}/resourceclaims": [claim]}
    cluster = Cluster({NODES: [node("gpu1")], ALL: [theirs], OWN: [], **has})
    async with opened(cluster, tmp_path, Dra()) as (engine, _):
        machine = (await asyncio.to_thread(engine.survey))["gpu1"]
    assert machine is not None
    assert [d.uuid for d in machine.devices or ()] == ["GPU-1"], machine.trouble


async def test_share_of_a_pod_without_its_image_is_free_soon_after_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_engine, "KILLED_WITHIN_S", 0)
    monkeypatch.setattr(kubernetes_engine, "GONE_WITHIN_S", 1)
    cluster = full()
    began, waits = cluster.has[OWN]
    for one in (began, waits):
        one["metadata"]["deletionTimestamp"] = "now"
    waiting = {"waiting": {"reason": "ImagePullBackOff"}}
    waits["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "notebook", "state": waiting}],
    }
    async with opened(cluster, tmp_path) as (engine, _):
        sessions: Any = [SimpleNamespace(id=n, attempt=1) for n in (1, 2)]
        assert [await engine.stop(one, now=True) for one in sessions] == [False, True]
