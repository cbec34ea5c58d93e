"""``fgpu kube check --start``: start one real lease and one real session's pod, and report which GPUs they see.

1. Ask a lease pod that runs on the node, or a new one, which GPU it holds and how it got the GPU.
2. Start a pod with the labels, limits and RuntimeClass of a session, which names this GPU as sessions would.
3. If it sees other GPUs, try the other ways (`INJECTIONS`), to report which setting works.

All pods are removed. If this process is killed, they end after a few minutes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fgpu_scheduler import FGPUError, FoundDevice
from fgpuspawner.concurrency.waiting import to_the_end
from fgpuspawner.engines.kubernetes import endings
from fgpuspawner.engines.kubernetes.api import Api, Refused
from fgpuspawner.engines.kubernetes.dialects.base import CONTAINER, UUID, VISIBLE, Manifest, name_of
from fgpuspawner.engines.kubernetes.dialects.lease import (
    ASK,
    INJECTIONS,
    LEASE_LABEL,
    Lease,
    given_as,
    gpu_of,
)
from fgpuspawner.engines.kubernetes.leases import SLEEP
from fgpuspawner.engines.kubernetes.pods import only_on

LABEL = "fgpu.check"
"""On both pods, in place of the labels by which a Hub recognises its own."""
PATIENCE_S = 120
"""For one pod, including the pull of its image."""
LOOK_EVERY_S = 0.5
LOOK = "nvidia-smi --query-gpu=uuid --format=csv,noheader >/dev/termination-log 2>&1"
MOST_BYTES = 4096


class NotTried(FGPUError):
    """A pod could not show its GPUs; the message says why."""

    code = "not_tried"


@dataclass(frozen=True, slots=True)
class Leased:
    """The GPU that a lease holds, and the value of NVIDIA_VISIBLE_DEVICES in it."""

    found: FoundDevice
    visible: str


class Trial:
    """One trial on a node; ``path`` is that of the namespace in the API."""

    def __init__(self, api: Api, path: str, node: str) -> None:
        self._api = api
        self._pods = f"{path}/pods"
        self._node = node
        self._name = f"fgpu-check-{secrets.token_hex(3)}"

    @asynccontextmanager
    async def leased(self, dialect: Lease, image: str) -> AsyncIterator[Leased]:
        """Yield the GPU of a lease, while that lease pod runs.

        Raises:
            NotTried, GpuUnknown, Refused, EngineSilent: there is none.
        """
        running = (("labelSelector", LEASE_LABEL), ("fieldSelector", f"spec.nodeName={self._node}"))
        there = await self._api.listed(self._pods, running, keep=dict)
        ready = [name_of(pod) for pod in there if _phase(pod) == "Running"]
        if ready:
            yield await self._asked(ready[0])
            return
        pod = dialect.lease_pod(name=f"{self._name}-lease", node=self._node, image=image, command=SLEEP)
        pod["metadata"]["labels"] = {LABEL: "lease"}
        pod["spec"]["activeDeadlineSeconds"] = 2 * len(INJECTIONS) * PATIENCE_S
        async with self._made(pod) as name:
            await self._until(name, lambda found: _phase(found) == "Running")
            yield await self._asked(name)

    async def _asked(self, name: str) -> Leased:
        answer = await self._api.run(f"{self._pods}/{name}", "lease", ASK, most_bytes=MOST_BYTES)
        text = answer.output.decode("utf-8", "replace")
        if answer.status != 0:
            raise NotTried(f"nvidia-smi fails in the lease pod {name}: {' '.join(text.split())[:300]}")
        return Leased(gpu_of(name, text), given_as(text))

    async def seen_by(self, session: Manifest) -> set[str]:
        """Return the UUIDs of the GPUs that a session's container sees.

        Raises:
            NotTried, Refused, EngineSilent: it does not start, or sees none; in its node's words.
        """
        pod = _looks(session, name=f"{self._name}-session", node=self._node)
        async with self._made(pod) as name:
            ended = _terminated(await self._until(name, lambda found: bool(_terminated(found))))
        said = str(ended.get("message") or "")
        # A node's error message may name the GPU, too.
        uuids = set() if ended.get("exitCode") else set(UUID.findall(said))
        if not uuids:
            raise NotTried(" ".join(said.split())[:300] or "nvidia-smi says nothing")
        return uuids

    @asynccontextmanager
    async def _made(self, pod: Mapping[str, Any]) -> AsyncIterator[str]:
        name = name_of(pod)
        path = f"{self._pods}/{name}"
        try:
            await to_the_end(self._api.ask("POST", self._pods, body=dict(pod)))
            yield name
        finally:
            await to_the_end(self._removed(path))

    async def _removed(self, path: str) -> None:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 1}
        until = time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < until:
                await self._api.ask("DELETE", path, body=body)
                await asyncio.sleep(LOOK_EVERY_S)
        except Refused:
            return

    async def _until(self, name: str, is_so: Callable[[Manifest], bool]) -> Manifest:
        trouble = f"it was not ready within {PATIENCE_S} s"
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            pod = await self._api.ask("GET", f"{self._pods}/{name}")
            if is_so(pod):
                return pod
            ended, found = endings.how_it_ended(pod), endings.why_not_up(pod)
            if ended is not None:
                raise NotTried(f"the pod {name}: {ended.message}")
            if found is not None:
                trouble = found.message
                if not found.patience_s:
                    break
            await asyncio.sleep(LOOK_EVERY_S)
        raise NotTried(f"the pod {name}: {trouble}")


def _looks(session: Manifest, *, name: str, node: str) -> dict[str, Any]:
    """Return a session's pod without volumes, files and secret, whose command only lists GPUs."""
    spec, found, server = session["spec"], session["metadata"], session["spec"]["containers"][0]
    container = {key: server[key] for key in ("image", "resources", "securityContext") if key in server}
    variables = [v for v in server["env"] if v["name"] == VISIBLE]
    labels = {key: value for key, value in found["labels"].items() if not key.startswith("fgpu.")}
    keys = ("runtimeClassName", "tolerations", "securityContext", "imagePullSecrets", "schedulerName")
    own = {key: spec[key] for key in keys if key in spec}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**labels, LABEL: "session"},
            "annotations": found["annotations"],
        },
        "spec": {
            **own,
            "containers": [{**container, "name": CONTAINER, "env": variables, "command": ["sh", "-c", LOOK]}],
            "affinity": only_on(node, {}),
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "activeDeadlineSeconds": 2 * PATIENCE_S,
        },
    }


def _terminated(pod: Manifest) -> Mapping[str, Any]:
    """Return how the container of a pod ended; empty while it has not."""
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        return dict((one.get("state") or {}).get("terminated") or {})
    return {}


def _phase(pod: Manifest) -> object:
    return (pod.get("status") or {}).get("phase")


def ways(dialect: Lease, leased: Leased) -> list[str]:
    """Return the ways to name a GPU, ``dialect``'s choice first."""
    dialect.given_as[leased.found.uuid] = leased.visible
    first = dialect.way_of(leased.found.uuid)
    return [first, *(way for way in INJECTIONS[1:] if way != first)]
