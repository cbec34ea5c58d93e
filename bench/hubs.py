"""The Hubs that `spawn.py` measures, and what it asks of them through their API."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import docker
import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "hub"))

from hubprocess import WITHOUT_SERVICE, HubProcess  # noqa: E402

LIMIT_S = 180
"""No single thing that is waited for takes longer, or the run has failed."""

QUIET = 'c.JupyterHub.log_level = "INFO"\n'


# `configure` is put out of force: what is left is the Hub's own defaults, and DockerSpawner as its
# documentation sets it up for a Hub on the engine's machine. Both sides are on one network.
PLAIN = """
c.JupyterHub.spawner_class = "docker"
c.JupyterHub.hub_ip = {gateway!r}
c.JupyterHub.custom_scopes = {{
    f"custom:fgpu:{{s}}": {{"description": "named by the harness's role"}} for s in ("admin", "queue:read")
}}
c.DockerSpawner.image = {image!r}
c.DockerSpawner.network_name = {network!r}
c.DockerSpawner.use_internal_ip = True
c.DockerSpawner.remove = True
configure = lambda *args, **settings: None
"""


class BenchFailed(Exception):
    """Something did not run, so that there is no figure to report."""


def docker_hub(folder: Path, *, with_service: bool, warm: int = 0) -> HubProcess:
    """Return a Hub with FGPUSpawner as `configure` wires it, and simulated GPUs for far more than a burst.

    ``warm`` is the size of its default image's pool.
    """
    roomy = {"name": "local", "cpu": 128, "memory_mib": 128 * 1024, "gpus": {"simulated": 16}}
    after = QUIET + ("" if with_service else WITHOUT_SERVICE)
    pool = {"python": warm} if warm else {}
    return HubProcess(folder, after=after, runtime="docker", nodes=[roomy], warm_pool=pool)


def ordinary(client: docker.APIClient, image: str, tag: str) -> str:
    """Return an image like ``image``, with a server that imports an ordinary environment's modules, without the
    hand-over.
    """
    dockerfile = (
        f"FROM {image}\nUSER root\nRUN rm /opt/fgpu/lib/python3*/site-packages/fgpu_lazy_imports.*\n"
        "USER 1000:1000\nLABEL fgpu.handover=\n"
    )
    lines = list(client.build(fileobj=io.BytesIO(dockerfile.encode()), tag=tag, rm=True, decode=True))
    if any("error" in line for line in lines):
        raise BenchFailed(f"the ordinary image could not be made: {lines[-1]}")
    return tag


def waiting(client: docker.APIClient, installation: str) -> int:
    """Return how many warm containers are ready: they have no network until a session takes them."""
    found = client.containers(filters={"label": f"fgpu.warm={installation}"})
    return sum("-warm-" in e["Names"][0] and not e["NetworkSettings"]["Networks"] for e in found)


def end(hub: HubProcess, client: docker.APIClient) -> None:
    """End a Hub, and what its sessions and its pool are on the engine."""
    installation = hub.store.installation_id if (hub.data / "fgpu.sqlite").exists() else None
    if hub.process is not None and hub.process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            hub.terminate()
    hub.close()
    if installation is None:
        return
    label = {"label": f"fgpu.installation={installation}"}
    for container in client.containers(all=True, filters=label):
        with contextlib.suppress(docker.errors.APIError):
            client.remove_container(container["Id"], force=True)
    for network in client.networks(filters=label):
        with contextlib.suppress(docker.errors.APIError):
            client.remove_network(network["Id"])


def plain_hub(folder: Path, *, image: str, network: str, gateway: str) -> HubProcess:
    """Return a Hub with DockerSpawner, on the same image and network."""
    before = PLAIN.format(image=image, network=network, gateway=gateway)
    return HubProcess(folder, before=before, after=QUIET)


def queue_hub(folder: Path, *, with_service: bool) -> HubProcess:
    """Return a Hub with one simulated GPU and small local processes as sessions."""
    mini = ROOT / "tests" / "hub" / "miniserver.py"
    after = QUIET + f"c.Spawner.cmd = ['python', {str(mini)!r}]\n" + ("" if with_service else WITHOUT_SERVICE)
    node = {"name": "local", "cpu": 4, "memory_mib": 8192, "gpus": {"simulated": 1}}
    return HubProcess(folder, after=after, nodes=[node])


def remove_containers(client: docker.APIClient, run: str) -> int:
    """Remove every container of this run's users; return how many there were."""
    own = [
        entry["Id"]
        for entry in client.containers(all=True)
        if any(run in name for name in entry["Names"])
        or (entry["Labels"] or {}).get("fgpu.user", "").startswith(run)
    ]
    for container in own:
        # Its Hub may have begun to remove it.
        with contextlib.suppress(docker.errors.NotFound, docker.errors.APIError):
            client.remove_container(container, force=True)
    return len(own)


class Asking:
    """One client of one Hub's API. Every answer that is not expected is a `BenchFailed`."""

    def __init__(self, hub: HubProcess, http: aiohttp.ClientSession) -> None:
        self.hub = hub
        self._http = http

    @classmethod
    @asynccontextmanager
    async def of(cls, hub: HubProcess) -> AsyncIterator[Asking]:
        """Yield a client that closes its connections afterwards."""
        headers = {"Authorization": f"token {hub.token}"}
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
            yield cls(hub, http)

    def cpu_s(self) -> float:
        """Return the CPU time that the Hub's process has used. Others' load changes it little."""
        assert self.hub.process is not None
        used = psutil.Process(self.hub.process.pid).cpu_times()
        return float(used.user + used.system)

    async def ask(self, method: str, path: str, *expected: int, **kwargs: Any) -> tuple[int, Any]:
        """Return status and body (None where it is not JSON)."""
        async with self._http.request(method, f"{self.hub.url}/hub/api/{path}", **kwargs) as answer:
            text = await answer.text()
        if answer.status not in (expected or (200,)):
            raise BenchFailed(f"{method} {path}: {answer.status} {text[:300]}")
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, None

    async def add_users(self, names: list[str]) -> None:
        """Make these users."""
        await self.ask("POST", "users", 201, json={"usernames": names})

    async def request_spawn(self, user: str, options: dict[str, Any]) -> None:
        """Ask for the user's server; return when the Hub answers, which may be before it is there."""
        await self.ask("POST", f"users/{user}/server", 201, 202, json=options)

    async def spawn(self, user: str, options: dict[str, Any]) -> float:
        """Return the seconds from asking for the server until the Hub's model of it says ready."""
        began = time.perf_counter()
        asked = asyncio.create_task(self.request_spawn(user, options))
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._ready_event(user, asked)
                while True:
                    _, model = await self.ask("GET", f"users/{user}")
                    if model["servers"].get("", {}).get("ready"):
                        break
                    await asyncio.sleep(0.02)
            took_s = time.perf_counter() - began
            await asked
        finally:
            asked.cancel()
        return took_s

    async def _ready_event(self, user: str, asked: asyncio.Task[None]) -> None:
        """Wait for the event by which the Hub says that the server is ready, as the waiting page does."""
        while True:
            if asked.done():
                await asked
            async for event in self.events(user):
                if event.get("failed"):
                    raise BenchFailed(f"the server of {user} did not start: {event.get('message')}")
                if event.get("ready"):
                    return
            # The Hub has not got the request yet, and says that the server is not starting.
            await asyncio.sleep(0.01)

    async def events(self, user: str) -> AsyncIterator[dict[str, Any]]:
        """Yield what the Hub tells of the user's pending server; nothing where none is pending."""
        url = f"{self.hub.url}/hub/api/users/{user}/server/progress"
        async with self._http.get(url) as answer:
            if answer.status in (400, 404):
                return
            if answer.status != 200:
                raise BenchFailed(f"GET {url}: {answer.status}")
            async for line in answer.content:
                if line.startswith(b"data:"):
                    yield json.loads(line.removeprefix(b"data:"))

    async def stop(self, user: str) -> float:
        """Return the seconds from asking for the server's end until the Hub says that it is gone."""
        began = time.perf_counter()
        status, _ = await self.ask("DELETE", f"users/{user}/server", 202, 204)
        async with asyncio.timeout(LIMIT_S):
            while status == 202:
                await asyncio.sleep(0.02)
                _, model = await self.ask("GET", f"users/{user}")
                if "" not in model["servers"]:
                    break
        return time.perf_counter() - began

    async def timed(self, path: str) -> float:
        """Return the milliseconds that one GET takes."""
        began = time.perf_counter()
        await self.ask("GET", path)
        return (time.perf_counter() - began) * 1000
