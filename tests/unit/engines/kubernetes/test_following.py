"""What is asked of a cluster's API, and followed there: with whatever else may answer, or not, in its place."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web
from apiserver import answering, followed, until
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import ConfigException

from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes.api import SAME, Api, Manifest, Refused
from fgpuspawner.engines.kubernetes.mirror import Mirror

PODS = "/api/v1/namespaces/lab/pods"


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def listed(*pods: Manifest) -> web.Response:
    return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "100"}, "items": list(pods)})


@pytest.mark.parametrize("body", ["default backend - 404", '{"message": "no such cluster"}', "[]"])
async def test_a_404_that_is_not_the_clusters_own_says_nothing_of_a_pod(body: str) -> None:
    async def proxy(request: web.Request) -> web.Response:
        return web.Response(status=404, text=body)

    async with answering(proxy) as api:
        with pytest.raises(EngineSilent, match="HTTP 404"):
            await api.ask("GET", f"{PODS}/one")


async def test_a_refusal_is_told_in_one_line_of_a_length_that_can_be_read() -> None:
    said = {"kind": "Status", "reason": "Invalid", "message": "spec:\n" + "is wrong " * 1000}

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response(said, status=422)

    async with answering(refuse) as api:
        with pytest.raises(Refused) as refused:
            await api.ask("POST", PODS, body={})
    assert refused.value.reason == "Invalid"
    assert str(refused.value).startswith("spec: is wrong")
    assert len(str(refused.value)) <= 300


async def test_a_token_that_cannot_be_read_now_is_a_cluster_that_does_not_answer() -> None:
    async def none(_: Configuration) -> None:
        raise ConfigException("Service token file does not exist.")

    configuration = Configuration(host="http://127.0.0.1:9")
    configuration.api_key["BearerToken"] = "Bearer old"
    configuration.refresh_api_key_hook = none
    api = Api(configuration)
    try:
        with pytest.raises(EngineSilent, match="token file"):
            await api.ask("GET", PODS)
        with pytest.raises(EngineSilent, match="token file"):
            await api.run(f"{PODS}/one", "notebook", ["true"], most_bytes=1)
    finally:
        await api.close()


def test_a_watch_that_died_without_a_word_is_given_up_within_a_minute() -> None:
    assert SAME.sock_read is not None
    assert SAME.sock_read <= 60


async def test_following_goes_on_after_an_object_that_nobody_can_read() -> None:
    lists = 0

    async def cluster(request: web.Request) -> web.StreamResponse:
        nonlocal lists
        if "watch" not in request.query:
            lists += 1
            return listed(pod("first", lists))
        event = {"type": "ADDED", "object": {"metadata": {"resourceVersion": "101"}}}
        return web.Response(text=json.dumps(event) + "\n")

    async with answering(cluster) as api, followed(Mirror(api, PODS, what="pods", keep=dict)):
        await until(lambda: lists > 1)


async def test_following_goes_on_after_a_listener_that_fails() -> None:
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
async def test_an_api_that_ends_each_watch_at_once_is_asked_about_once_a_second(code: int | None) -> None:
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
        await asyncio.sleep(1.5)
        took_s = time.monotonic() - began
    assert 1 <= watches <= took_s + 1


async def test_who_waits_for_one_object_is_not_woken_by_others() -> None:
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
            waiting = asyncio.create_task(mirror.until_another("mine", 8))
            more.set()
            await until(lambda: len(mirror.found) == 6)
            await asyncio.sleep(0.1)
            assert not waiting.done()
            last.set()
            await until(waiting.done)
            assert mirror.found["mine"]["metadata"]["resourceVersion"] == "200"
