"""The API client and the mirrors, also with a silent API or something else in its place."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from apiserver import answering, followed, until
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import ConfigException, kube_config
from kubespawner.clients import load_config

from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes import api as cluster_api
from fgpuspawner.engines.kubernetes.api import Api, Refused, configuration
from fgpuspawner.engines.kubernetes.dialects.base import Manifest
from fgpuspawner.engines.kubernetes.mirror import Mirror

PODS = "/api/v1/namespaces/lab/pods"


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def listed(*pods: Manifest) -> web.Response:
    return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "100"}, "items": list(pods)})


@pytest.mark.parametrize("body", ["default backend - 404", '{"message": "no such cluster"}', "[]"])
async def test_foreign_404_does_not_mean_the_pod_is_gone(body: str) -> None:
    async def proxy(request: web.Request) -> web.Response:
        return web.Response(status=404, text=body)

    async with answering(proxy) as api:
        with pytest.raises(EngineSilent, match="HTTP 404"):
            await api.ask("GET", f"{PODS}/one")


async def test_refusal_is_one_short_line() -> None:
    said = {"kind": "Status", "reason": "Invalid", "message": "spec:\n" + "is wrong " * 1000}

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response(said, status=422)

    async with answering(refuse) as api:
        with pytest.raises(Refused) as refused:
            await api.ask("POST", PODS, body={})
    assert refused.value.status == 422
    assert str(refused.value).startswith("spec: is wrong")
    assert len(str(refused.value)) <= 300


async def test_unreadable_token_counts_as_silence() -> None:
    async def none(_: Configuration) -> None:
        raise ConfigException("Service token file does not exist.")

    reached = Configuration(host="http://127.0.0.1:9")
    reached.api_key["BearerToken"] = "Bearer old"
    reached.refresh_api_key_hook = none
    api = Api(reached)
    try:
        with pytest.raises(EngineSilent, match="token file"):
            await api.ask("GET", PODS)
        with pytest.raises(EngineSilent, match="token file"):
            await api.run(f"{PODS}/one", "notebook", ["true"], most_bytes=1)
    finally:
        await api.close()


async def test_mirror_survives_a_failing_listener() -> None:
    lists = 0

    async def cluster(request: web.Request) -> web.StreamResponse:
        nonlocal lists
        lists += 1
        return listed(pod("first", lists))

    def changed(found: Manifest, there: bool) -> None:
        raise TypeError("an exit code that is none")

    async with answering(cluster) as api:
        mirror = Mirror(api, PODS, what="pods", keep=dict, changed=changed)
        async with followed(mirror):
            await until(lambda: lists > 1)
            assert mirror.found.keys() == {"first"}


@pytest.mark.parametrize("code", [410, None])
async def test_watches_that_end_at_once_are_reopened_once_a_second(code: int | None) -> None:
    watches = 0

    async def cluster(request: web.Request) -> web.StreamResponse:
        nonlocal watches
        if "watch" not in request.query:
            return listed()
        watches += 1
        expired = {"kind": "Status", "code": code, "reason": "Expired", "message": "too old"}
        return web.Response(text=json.dumps({"type": "ERROR", "object": expired}) + "\n" if code else "")

    async with answering(cluster) as api, followed(Mirror(api, PODS, what="pods", keep=dict)):
        began = time.monotonic()
        await until(lambda: watches >= 3)
        assert time.monotonic() - began > 1.5


async def test_waiting_for_one_object_ignores_others() -> None:
    more = asyncio.Event()
    last = asyncio.Event()

    async def cluster(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return listed(pod("mine", 1))
        answer = web.StreamResponse()
        await answer.prepare(request)
        await more.wait()
        for n in range(5):
            await answer.write(
                json.dumps({"type": "ADDED", "object": pod(f"other{n}", 101 + n)}).encode() + b"\n"
            )
        await last.wait()
        await answer.write(json.dumps({"type": "MODIFIED", "object": pod("mine", 200)}).encode() + b"\n")
        await asyncio.sleep(30)
        return answer

    async with answering(cluster) as api:
        mirror = Mirror(api, PODS, what="pods", keep=dict)
        async with followed(mirror):
            await until(lambda: "mine" in mirror.found)
            waiting = asyncio.create_task(mirror.until_changed(8, "mine"))
            more.set()
            await until(lambda: len(mirror.found) == 6)
            await asyncio.sleep(0.1)
            assert not waiting.done()
            last.set()
            await until(waiting.done)
            assert mirror.found["mine"]["metadata"]["resourceVersion"] == "200"


# --- A token that ends ---


@pytest.fixture
def log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Configuration]]:
    """How an API is reached by a kubeconfig that runs a program, which says what is in ``token``."""
    program = tmp_path / "log-in"
    said = '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "%s"}}'
    program.write_text(f"#!/bin/sh\nprintf '{said}' \"$(cat {tmp_path}/token)\"\n")
    program.chmod(0o755)
    (tmp_path / "token").write_text("first")

    def reached(host: str) -> Configuration:
        runs = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {"server": host}}],
            "users": [{"name": "hub", "user": {"exec": {**runs, "interactiveMode": "Never"}}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "hub"}}],
            "current-context": "lab",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        # What it loads is every later test's default otherwise.
        monkeypatch.setattr(Configuration, "_default", None)
        return configuration()

    # It is read once in a process.
    load_config.cache_clear()
    yield reached
    load_config.cache_clear()


async def test_token_is_renewed_by_the_login_program(
    log_in: Callable[[str], Configuration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[str] = []

    async def cluster(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization", ""))
        return listed(pod("first", 1))

    async with answering(cluster) as anonymous:
        reached = await asyncio.to_thread(log_in, anonymous._configuration.host)
        async with Api(reached) as api:
            await api.listed(PODS, keep=dict)
        (tmp_path / "token").write_text("second")
        monkeypatch.setattr(cluster_api, "RENEWED_EVERY_S", 0.0)
        reached.refresh_api_key_hook = cluster_api.renewing()
        async with Api(reached) as api:
            await api.listed(PODS, keep=dict)
    assert tokens == ["Bearer first", "Bearer second"]
