"""Lease pods: each holds a whole GPU of a node for this installation's sessions, and reports which GPU it got.

1. A node gets as many lease pods as its device plugin has GPUs.
2. A running lease pod is asked for its GPU, and asked again when its node's number of GPUs changes.
3. If a node has too many lease pods, some are withdrawn: the next survey no longer offers their GPUs.
4. A withdrawn lease pod is deleted only when the queue has stopped offering its GPU and no session has a share of it:
   after the deletion the cluster may give the GPU to others at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fgpu_scheduler import FGPUError, Snapshot
from fgpuspawner.concurrency.background import Failures
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes import endings
from fgpuspawner.engines.kubernetes.api import Api, Refused
from fgpuspawner.engines.kubernetes.dialects.base import GpuUnknown, Manifest, count, label, name_of
from fgpuspawner.engines.kubernetes.dialects.lease import ASK, LEASE_LABEL, Lease, given_as, gpu_of
from fgpuspawner.engines.kubernetes.inventory import OVER, is_ready, pruned
from fgpuspawner.engines.kubernetes.mirror import Mirror

log = logging.getLogger("fgpu.kubernetes")
T = TypeVar("T")

GPU = "nvidia.com/gpu"
EVERY_S = 10.0
TOGETHER_S = 0.3
ANSWERS_WITHIN_S = 10.0
TOO_MANY_FOR_S = 30.0
"""The time that an update of a device plugin may take. During it the cluster counts no GPU on the node."""
AT_A_TIME = 8
MOST_BYTES = 4096
NO_SUCH_COMMAND = 127


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """A lease pod's last answer; ``text`` is None if its GPU does not work. ``uuid`` is the last GPU that it named.

    ``gpus`` is the number of its node's GPUs at that time.
    """

    text: str | None
    uuid: str | None
    gpus: int


class Leases:
    """Keeps as many lease pods on each of our nodes as it has GPUs. ``image`` needs a shell and nothing else."""

    def __init__(self, api: Api, pods: str, dialect: Lease, *, installation: str, image: str) -> None:
        self._api = api
        self._pods = pods
        self._dialect = dialect
        self._installation = installation
        self._image = image
        #: By the pods' uids: a later pod of the same name may get another GPU.
        self._answers: dict[str, LeaseAnswer] = {}
        #: The uids of lease pods to delete; their GPUs are no longer offered.
        self._withdrawn: frozenset[str] = frozenset()
        self._too_many_since: dict[str, float] = {}
        #: The leases of the last `reconcile`: uid, name and answer.
        self._offered: set[tuple[str, str, str]] = set()
        self._failures = Failures(log, "GPUs cannot be leased now")
        #: Set when there is something to reconcile.
        self.wake = asyncio.Event()
        query = (("labelSelector", f"{LEASE_LABEL}={installation}"),)
        self.mirror: Mirror[Manifest] = Mirror(
            api, pods, query, what="lease pods", keep=pruned, changed=self._changed
        )

    def _changed(self, pod: Manifest, there: bool) -> None:
        # A pod that its node refuses is made again at the next regular time, not at once in an endless loop.
        if not there or _phase(pod) not in OVER:
            self.wake.set()

    def counting(self, pods: Iterable[Manifest]) -> dict[str, str | None]:
        """Return the answers of the lease pods that count, by name; None for one that was not asked. Safe in any thread.

        Of several with the same GPU, as from a device plugin that gives each GPU several times, only the first counts.
        """
        counted: dict[str, str | None] = {}
        uuids: set[str | None] = set()
        for pod in pods:
            ours = label(pod, LEASE_LABEL) == self._installation and _uid(pod) not in self._withdrawn
            answer = self._answers.get(_uid(pod))
            if not ours or not _is_held(pod) or (answer and (answer.text is None or answer.uuid in uuids)):
                continue
            if answer is not None:
                uuids.add(answer.uuid)
            counted[name_of(pod)] = answer.text if answer else None
        return counted

    def pods_on(self, node: str) -> dict[str, Manifest]:
        """Return the lease pods of a node by their GPU, also those that are withdrawn: sessions may be on it."""
        own = {self._uuid(pod): pod for pod in self._on(node) if _is_held(pod)}
        return {uuid: pod for uuid, pod in own.items() if uuid is not None}

    def offered_on(self, node: str) -> set[str | None]:
        """Return the UUIDs of a node's leased GPUs; None is among them while a lease pod was not asked."""
        return {self._uuid(self.mirror.found[name]) for name in self.counting(self._on(node))}

    async def reconcile(
        self,
        nodes: Collection[Manifest],
        queue: Callable[[], Awaitable[Snapshot]],
        changed: Callable[[], None],
    ) -> None:
        """Make and ask the lease pods of these nodes, and delete what is withdrawn and unused.

        Calls ``changed`` if the leased GPUs change. On a node that is not ready everything stays as it is.
        """
        if not self.mirror.listed:
            await self.mirror.until_changed(EVERY_S)
            if not self.mirror.listed:
                return
        # Many changes of one moment are handled together.
        await asyncio.sleep(TOGETHER_S)
        ours = {_prefix(self._installation, name_of(node)): node for node in nodes}
        gpus = {prefix: gpus_of(node) for prefix, node in ours.items() if is_ready(node)}
        found: dict[str, list[Manifest]] = {prefix: [] for prefix in ours}
        for pod in self.mirror.found.values():
            found.setdefault(name_of(pod).rpartition("-")[0], []).append(pod)
        missing = [
            (name, name_of(ours[prefix]))
            for prefix in gpus
            for name in self._missing(prefix, gpus[prefix] - len(list(filter(_stays, found[prefix]))))
        ]
        troubles = await _each(self._make, missing)
        troubles += await _each(self._ask, [(pod, gpus[prefix]) for prefix in gpus for pod in found[prefix]])
        snapshot = await queue()
        back: list[Manifest] = []
        for prefix, pods in found.items():
            if prefix not in ours:
                back += filter(_stays, pods)
            elif prefix in gpus:
                back += self._too_many(prefix, pods, gpus[prefix], _held(snapshot, None))
                # Ended pods hold nothing, and block their names.
                back += [pod for pod in pods if _phase(pod) in OVER and not _ends(pod)]
        self._withdrawn = frozenset(map(_uid, back))
        troubles += await _each(self._remove, self._free(back, await queue()) if back else [])
        there = {_uid(pod) for pod in self.mirror.found.values()}
        self._answers = {uid: answer for uid, answer in self._answers.items() if uid in there}
        if self._note_offered():
            changed()
        if troubles:
            self._failures.failed(min(troubles, key=str))
        else:
            self._failures.worked()

    def _note_offered(self) -> bool:
        """Log which leases are new or lost since the last call; return whether any is."""
        before, counted = self._offered, self.counting(list(self.mirror.found.values()))
        self._offered = {
            (_uid(self.mirror.found[name]), name, _short(text)) for name, text in counted.items() if text
        }
        for _, name, text in sorted(self._offered - before):
            log.info("The lease pod %s holds GPU %s", name, text)
        for _, name, text in sorted(before - self._offered):
            log.warning("The lease pod %s no longer holds GPU %s for sessions", name, text)
        return self._offered != before

    def _missing(self, prefix: str, number: int) -> Iterable[str]:
        names = (name for n in itertools.count() if (name := f"{prefix}-{n}") not in self.mirror.found)
        return itertools.islice(names, max(0, number))

    def _too_many(
        self, prefix: str, pods: Sequence[Manifest], most: int, held: Collection[str]
    ) -> list[Manifest]:
        """Return the lease pods to withdraw from a node that has only ``most`` GPUs.

        First come pods that wait for a GPU or have a broken one. If these are too few for `TOO_MANY_FOR_S`, all pods
        without sessions go: the cluster does not report which GPU is missing, and a new pod gets another GPU.
        """
        stay = list(filter(_stays, pods))
        surplus = len(stay) - most
        if surplus <= 0:
            self._too_many_since.pop(prefix, None)
            return []
        since = self._too_many_since.setdefault(prefix, time.monotonic())
        waiting = [pod for pod in reversed(stay) if not _node(pod)]
        broken = [pod for pod in stay if (a := self._answers.get(_uid(pod))) is not None and a.text is None]
        back = [*waiting, *broken][:surplus]
        if len(back) < surplus and time.monotonic() - since >= TOO_MANY_FOR_S:
            idle = [pod for pod in stay if (uuid := self._uuid(pod)) is not None and uuid not in held]
            back += [pod for pod in idle if pod not in back]
        return back

    def _free(self, back: Sequence[Manifest], snapshot: Snapshot) -> list[Manifest]:
        """Return the pods of ``back`` with a GPU that has no session and cannot get one.

        If it is not known which GPU a pod has, other lease pods must hold all GPUs that the queue knows of its node.
        """
        free: list[Manifest] = []
        for pod in back:
            others = [own for own in self._on(_node(pod)) if _is_held(own) and own not in [pod, *free]]
            if not _is_held(pod) or _held(snapshot, _node(pod)) <= set(map(self._uuid, others)):
                free.append(pod)
        return free

    def _on(self, node: str) -> list[Manifest]:
        return [pod for pod in list(self.mirror.found.values()) if _node(pod) == node]

    def _uuid(self, pod: Manifest) -> str | None:
        answer = self._answers.get(_uid(pod))
        return answer.uuid if answer else None

    # -- one pod --------------------------------------------------------------------------------------

    async def _make(self, wanted: tuple[str, str]) -> None:
        name, node = wanted
        await self._api.make(self._pods, self._dialect.lease_pod(name=name, node=node, image=self._image))

    async def _remove(self, pod: Manifest) -> None:
        # The uid, because a new pod may have the same name by now.
        await self._api.delete(f"{self._pods}/{name_of(pod)}", uid=_uid(pod))

    async def _ask(self, asked: tuple[Manifest, int]) -> None:
        """Ask a running pod for its GPU, unless it has named one since its node's number of GPUs changed."""
        pod, gpus = asked
        last, name = self._answers.get(_uid(pod)), name_of(pod)
        trouble = endings.why_not_up(pod)
        if trouble is not None and not trouble.unbound:
            raise GpuUnknown(f"the lease pod {name} does not start: {trouble.message}")
        if not _is_held(pod) or (last is not None and last.text is not None and last.gpus == gpus):
            return
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                answer = await self._api.run(f"{self._pods}/{name}", "lease", ASK, most_bytes=MOST_BYTES)
        except TimeoutError as e:
            raise EngineSilent(f"the lease pod {name} does not answer") from e
        text = answer.output.decode("utf-8", "replace")
        if answer.status in (None, NO_SUCH_COMMAND):
            raise GpuUnknown(
                f"nvidia-smi cannot be run in the lease pod {name}: {_short(text)}; look at its RuntimeClass"
            )
        try:
            if answer.status != 0:
                raise GpuUnknown(f"the GPU of the lease pod {name} does not work: {_short(text)}")
            uuid = gpu_of(name, text).uuid
            self._answers[_uid(pod)] = LeaseAnswer(text, uuid, gpus)
            self._dialect.given_as[uuid] = given_as(text)
        except GpuUnknown:
            # Keep the UUID: sessions may be on that GPU.
            self._answers[_uid(pod)] = LeaseAnswer(None, self._uuid(pod), gpus)
            raise


async def _each(step: Callable[[T], Awaitable[None]], of: Iterable[T]) -> list[FGPUError]:
    """Run a step for each item, some in parallel; return the failures, which do not stop the others."""
    at_a_time = asyncio.Semaphore(AT_A_TIME)

    async def one(item: T) -> FGPUError | None:
        async with at_a_time:
            try:
                await step(item)
            except (Refused, EngineSilent, GpuUnknown) as e:
                return e
        return None

    return [e for e in await asyncio.gather(*map(one, of)) if e is not None]


def _held(snapshot: Snapshot, node: str | None) -> set[str]:
    """Return the GPUs that sessions have shares of; for one node those there, and those that the queue offers there."""
    placed = [s.placement for s in snapshot.sessions if s.placement is not None]
    shared = {share.device_uuid for p in placed if node in (None, p.node_id) for share in p.shares}
    # A closed node takes no session until it is surveyed again.
    return shared | {d.uuid for n in snapshot.nodes if n.id == node and not n.closed for d in n.devices}


def _prefix(installation: str, node: str) -> str:
    # Together a node's name and ours may be too long for a pod.
    return f"fgpu-{installation}-lease-{hashlib.sha256(node.encode()).hexdigest()[:12]}"


def gpus_of(node: Manifest) -> int:
    """Return how many GPUs a node's device plugin offers."""
    return count(((node.get("status") or {}).get("allocatable") or {}).get(GPU, "0"))


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])


def _node(pod: Manifest) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _phase(pod: Manifest) -> object:
    return (pod.get("status") or {}).get("phase")


def _ends(pod: Manifest) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _stays(pod: Manifest) -> bool:
    return _phase(pod) not in OVER and not _ends(pod)


def _is_held(pod: Manifest) -> bool:
    return _phase(pod) == "Running" and not _ends(pod)


def _short(text: str) -> str:
    return " ".join(text.split())[:200]
