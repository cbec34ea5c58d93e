"""A session's container runs up to a second before its node reports it: the engine tries a command in it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from test_large_clusters import ID, NODES, OWN, Cluster, node, opened, pod

from fgpuspawner.engines.base import EngineSilent, LaunchFailed

NAME = f"fgpu-{ID}-1-1"


def started(**state: Any) -> dict[str, Any]:
    """Return a session's pod with its files in place, and its container reported in this state."""
    found = pod(NAME, namespace="jhub", ours=True)
    found["status"] = {
        "phase": "Pending",
        "podIP": "10.1.2.3",
        "initContainerStatuses": [{"name": "fgpu-files", "state": {"terminated": {"exitCode": 0}}}],
        "containerStatuses": [{"name": "notebook", "state": state}],
    }
    return found


class Node(Cluster):
    """A cluster in which commands in a pod are refused at first, then cannot be run, and then are."""

    commands = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/exec"):
            return await super().answer(request)
        self.commands += 1
        if self.commands <= 1:
            return web.Response(status=500, text="container not found")
        channel = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await channel.prepare(request)
        said: dict[str, Any] = {"status": "Failure", "message": "container is created"}
        if self.commands > 2:
            said["details"] = {"causes": [{"reason": "ExitCode", "message": "2"}]}
        await channel.send_bytes(b"\x03" + json.dumps(said).encode())
        await channel.close()
        return channel


def cluster(**state: Any) -> Node:
    own = [started(**state)]
    return Node({NODES: [node("gpu1")], "/api/v1/pods": own, OWN: own})


def spec() -> Any:
    session = SimpleNamespace(id=7, placement=SimpleNamespace(node_id="gpu1"))
    return SimpleNamespace(session=session, devices=(), simulated=True, port=8888)


async def test_launch_continues_when_the_container_runs_before_its_node_reports_it(
    tmp_path: Path,
) -> None:
    kube = cluster(waiting={"reason": "PodInitializing"})
    async with opened(kube, tmp_path) as (engine, _):
        endpoint = await engine._up(spec(), NAME)
    assert (endpoint.ip, endpoint.port) == ("10.1.2.3", 8888)
    assert kube.commands == 3


async def test_missing_image_is_reported_after_the_files_are_in_place(tmp_path: Path) -> None:
    kube = cluster(waiting={"reason": "ErrImagePull", "message": "not found"})
    kube.commands = -100
    async with opened(kube, tmp_path) as (engine, _):
        with pytest.raises(LaunchFailed, match="cannot be had: not found"):
            await engine._up(spec(), NAME)


class Printed(Cluster):
    """A cluster that returns a pod's log, or refuses with a status."""

    status = 200
    asked: dict[str, str]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/log"):
            return await super().answer(request)
        self.asked = dict(request.query)
        if self.status != 200:
            refused = {"kind": "Status", "reason": "Refused", "message": "no"}
            return web.json_response(refused, status=self.status)
        return web.Response(text="up\nserving\n")


async def test_log_is_that_of_the_sessions_own_container(tmp_path: Path) -> None:
    own = [started(running={})]
    world = Printed({NODES: [node("gpu1")], "/api/v1/pods": own, OWN: own})
    session: Any = SimpleNamespace(id=1, attempt=1, placement=SimpleNamespace(node_id="gpu1"))
    async with opened(world, tmp_path) as (engine, _):
        assert await engine.log(session, lines=9) == b"up\nserving\n"
        assert (world.asked["container"], world.asked["tailLines"]) == ("notebook", "9")
        for status in (400, 404):
            world.status = status
            assert await engine.log(session, lines=9) is None
        world.status = 403
        with pytest.raises(EngineSilent, match="does not return the log"):
            await engine.log(session, lines=9)
