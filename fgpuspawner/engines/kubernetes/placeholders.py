"""Placeholders: pods by which a cluster's autoscaler learns of requests that wait in our queue, outside the cluster.

1. A request that waits for resources gets a placeholder: whole GPUs, CPU and memory as its session's, no node, and a low
   priority. Fractions share a GPU. An autoscaler adds a node for a pod that the cluster cannot place.
2. The pods that lease the new node's GPUs have a higher priority and take the place of placeholders.
3. A placeholder is deleted when its request does not wait any longer, and is not made again soon: a node takes minutes.
4. Where the Hub runs in a pod of the sessions' namespace, its pod owns the placeholders: they go with it.
   A Hub that is started again makes new ones.
5. Lease pods hold all GPUs of a node, so an autoscaler would never remove it. An idle node's leases are given back,
   except those of one node in each resource group; they are made again as soon as a request waits there.

Sources: Cluster Autoscaler, FAQ (pods below the priority -10 add no node; which pods keep a node); Karpenter, Disruption
(``karpenter.sh/do-not-disrupt``); KAI Scheduler, node-scale-adjuster (fractions summed up to whole GPUs).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from fgpu_scheduler import HOLDING, Request, Session, SessionState, Snapshot, WaitReason
from fgpuspawner.concurrency.background import Failures
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes.api import NOT_FOUND, Api, Refused
from fgpuspawner.engines.kubernetes.dialects.base import Manifest, label, name_of, sleeping_pod, with_owner
from fgpuspawner.engines.kubernetes.inventory import GROUP, PLACEHOLDER, pruned
from fgpuspawner.engines.kubernetes.mirror import Mirror

log = logging.getLogger("fgpu.kubernetes")

AGAIN_AFTER_S = 900.0
"""A placeholder that is gone, because a lease took its place for example, is not made again before that."""
IDLE_FOR_S = 600.0
KEEPS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""On sessions: no autoscaler ends them to save a node."""
PLACES = ("nodeSelector", "tolerations", "affinity", "schedulerName", "imagePullSecrets")


def placeholder_pod(
    session: Session, gpus: int, *, installation: str, image: str, priority_class: str, session_spec: Manifest
) -> dict[str, Any]:
    """Return the placeholder of a session with so many whole GPUs, where its pod would go by ``session_spec``."""
    request = session.request
    size = {"cpu": f"{request.cpu_milli}m", "memory": f"{request.memory_mib}Mi"}
    amounts = {**size, "nvidia.com/gpu": str(gpus)}
    where = {key: session_spec[key] for key in PLACES if session_spec.get(key)}
    where["nodeSelector"] = {**(where.get("nodeSelector") or {}), GROUP: request.resource_group}
    where["priorityClassName"] = priority_class
    container = {
        "name": "placeholder",
        "image": image,
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
        "resources": {"limits": amounts, "requests": amounts},
    }
    name = f"fgpu-{installation}-placeholder-{session.id}"
    return sleeping_pod(name, {PLACEHOLDER: installation}, container, where)


def is_waiting(session: Session) -> bool:
    """Return whether a session waits for resources that no node has free."""
    pending = session.state is SessionState.PENDING and not session.held
    return pending and session.wait_reason is WaitReason.RESOURCES


def wanted(snapshot: Snapshot, most: int) -> list[tuple[Session, int]]:
    """Return the waiting sessions that get a placeholder, oldest first, with its number of GPUs.

    Fractions use what earlier ones leave of a GPU.
    """
    found: list[tuple[Session, int]] = []
    left: dict[str, int] = {}
    for session in sorted(filter(is_waiting, snapshot.sessions), key=lambda s: s.id):
        group = session.request.resource_group
        needed = _thousandths_of_gpu(session.request, snapshot)
        if needed <= left.get(group, 0):
            left[group] -= needed
            continue
        gpus = -(-needed // 1000)
        left[group] = max(left.get(group, 0), gpus * 1000 - needed)
        found.append((session, gpus))
    return found[:most]


def _thousandths_of_gpu(request: Request, snapshot: Snapshot) -> int:
    devices = [
        device
        for node in snapshot.nodes
        if node.resource_group == request.resource_group
        for device in node.devices
        if not request.gpu_models or device.model in request.gpu_models
    ]
    if request.gpu_memory_mib is not None:
        whole, asked = max((d.memory_mib for d in devices), default=1), request.gpu_memory_mib
    else:
        whole, asked = max((d.capacity_milli for d in devices), default=1000), request.fgpu_milli
    return max(1, -(-1000 * asked // whole))


class Placeholders:
    """Keeps one installation's placeholders, ``most`` at once, and gives idle nodes back.

    ``pod_of`` returns the placeholder of a session and a number of GPUs. ``hub_pod`` is the name of the Hub's own pod,
    empty if the Hub does not run in the sessions' namespace.
    """

    def __init__(
        self,
        api: Api,
        pods: str,
        pod_of: Callable[[Session, int], Manifest],
        *,
        installation: str,
        most: int,
        hub_pod: str = "",
    ) -> None:
        self._api = api
        self._pods = pods
        self._most = most
        self._hub_pod = hub_pod
        self._pod_of = pod_of
        #: When each was made, by name.
        self._made: dict[str, float] = {}
        #: Since when nothing used a node.
        self._idle_since: dict[str, float] = {}
        self._released: set[str] = set()
        self._failures = Failures(log, "The cluster's autoscaler cannot be told of waiting requests")
        self.mirror: Mirror[Manifest] = Mirror(
            api, pods, (("labelSelector", f"{PLACEHOLDER}={installation}"),), what="placeholders", keep=pruned
        )

    def kept(self, nodes: Sequence[Manifest], snapshot: Snapshot) -> list[Manifest]:
        """Return the nodes to lease: all but those that were idle for a while in a group where nothing waits."""
        now = time.monotonic()
        busy = {s.placement.node_id for s in snapshot.sessions if s.placement and s.state in HOLDING}
        waiting = {s.request.resource_group for s in snapshot.sessions if is_waiting(s)}
        self._idle_since = {
            name_of(node): self._idle_since.get(name_of(node), now)
            for node in nodes
            if name_of(node) not in busy and label(node, GROUP) not in waiting
        }
        idle = {name for name, since in self._idle_since.items() if now - since >= IDLE_FOR_S}
        for group in {label(node, GROUP) for node in nodes}:
            own = sorted(name_of(node) for node in nodes if label(node, GROUP) == group)
            # Without a GPU in the group a request would be refused.
            if idle.issuperset(own):
                idle.discard(own[0])
        for name in sorted(idle - self._released):
            log.info("Node %s is idle: its GPUs are given back, so that an autoscaler may remove it", name)
        self._released = idle
        return [node for node in nodes if name_of(node) not in idle]

    async def reconcile(self, snapshot: Snapshot) -> None:
        """Make and delete placeholders so that there are those that are `wanted`."""
        if not self.mirror.listed:
            return
        made = [self._pod_of(session, gpus) for session, gpus in wanted(snapshot, self._most)]
        pods = {name_of(pod): pod for pod in made}
        now = time.monotonic()
        self._made = {name: at for name, at in self._made.items() if name in pods}
        missing = [
            name
            for name in sorted(pods.keys() - self.mirror.found.keys())
            if now - self._made.get(name, -AGAIN_AFTER_S) >= AGAIN_AFTER_S
        ]
        try:
            for name in self.mirror.found.keys() - pods.keys():
                await self._api.delete(f"{self._pods}/{name}")
            owner = await self._owner() if missing and self._hub_pod else None
            for name in missing:
                self._made[name] = now
                await self._api.make(self._pods, with_owner(pods[name], owner) if owner else pods[name])
            self._failures.worked()
        except (Refused, EngineSilent) as e:
            self._failures.failed(e)

    async def _owner(self) -> Manifest | None:
        """Return the Hub's own pod, if it is there."""
        try:
            return await self._api.ask("GET", f"{self._pods}/{self._hub_pod}")
        except Refused as e:
            if e.status == NOT_FOUND:
                return None
            raise
