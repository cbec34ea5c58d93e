"""Lease pods: each holds a whole GPU of a node for this installation's sessions, and says which one it got.

A lease is given back only after its GPU was withdrawn from the queue and no session has a share of it: the cluster may
give the GPU to others at once. Each lease pod is asked which GPU it holds, and again when its node has more GPUs or
fewer.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fgpu_scheduler import FGPUError, Snapshot
from fgpuspawner.concurrency.background import Failures
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes.api import Api, Manifest, Refused
from fgpuspawner.engines.kubernetes.dialects import NotKnown
from fgpuspawner.engines.kubernetes.dialects.base import label, name_of
from fgpuspawner.engines.kubernetes.dialects.lease import ASK, LEASE_LABEL, Lease, given_as, told_by
from fgpuspawner.engines.kubernetes.inventory import is_ready
from fgpuspawner.engines.kubernetes.kept import own_kept
from fgpuspawner.engines.kubernetes.mirror import Mirror
from fgpuspawner.engines.kubernetes.quantity import count

log = logging.getLogger("fgpu.kubernetes")
T = TypeVar("T")

GPU = "nvidia.com/gpu"
SLEEP = ("/bin/sh", "-c", "while :; do sleep 3600; done")
EVERY_S = 10.0
TOGETHER_S = 0.3
ANSWERS_WITHIN_S = 10.0
TOO_MANY_FOR_S = 30.0
"""The time that an update of a device plugin may take. During it the cluster counts no GPU on the node."""
AT_A_TIME = 8
MOST_BYTES = 4096
CONFLICT, NOT_FOUND = 409, 404
NO_SUCH_COMMAND = 127
COMING = ("ContainerCreating", "PodInitializing")
OVER = ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class Said:
    """What a lease pod said of its GPU, its ``text``; None if it has none that works. ``uuid`` is the last it named.

    ``gpus`` is how many its node had when it was asked.
    """

    text: str | None
    uuid: str | None
    gpus: int


class Leases:
    """Keeps as many lease pods on each of our nodes as it has GPUs. ``image`` needs a shell and nothing else.

    ``wake`` is set when there is something to tend.
    """

    def __init__(self, api: Api, pods: str, dialect: Lease, *, installation: str, image: str) -> None:
        self._api = api
        self._pods = pods
        self._dialect = dialect
        self._installation = installation
        self._image = image
        self._said: dict[str, Said] = {}
        """By the pods' uids: a pod of the same name may get another GPU."""
        self._withdrawn: frozenset[str] = frozenset()
        """The uids of lease pods that will be given back: their GPUs were withdrawn from the queue."""
        self._too_many_since: dict[str, float] = {}
        self._offered: dict[str, tuple[str, str]] = {}
        self._failures = Failures(log, "GPUs cannot be leased now")
        self.wake = asyncio.Event()
        self.mirror: Mirror[Manifest] = Mirror(
            api,
            pods,
            (("labelSelector", f"{LEASE_LABEL}={installation}"),),
            what="lease pods",
            keep=own_kept,
            changed=self._changed,
        )

    def _changed(self, pod: Manifest, there: bool) -> None:
        # One that its node refuses is made again in its time, and not at once and for ever.
        if not there or _phase(pod) not in OVER:
            self.wake.set()

    # -- what is leased -------------------------------------------------------------------------------

    def counting(self, pods: Iterable[Manifest]) -> tuple[list[Manifest], dict[str, str]]:
        """Return which of these pods are leases that count, and what those said, by name. For any thread.

        Those that have not been asked yet count. Of several that got one GPU, as where a device plugin gives each several
        times, the first does.
        """
        counted: list[Manifest] = []
        told: dict[str, str] = {}
        uuids: set[str | None] = set()
        for pod in pods:
            if (
                label(pod, LEASE_LABEL) != self._installation
                or _uid(pod) in self._withdrawn
                or not _is_held(pod)
            ):
                continue
            said = self._said.get(_uid(pod))
            if said is not None:
                if said.text is None or said.uuid in uuids:
                    continue
                uuids.add(said.uuid)
                told[name_of(pod)] = said.text
            counted.append(pod)
        return counted, told

    def offered_on(self, node: str) -> set[str | None]:
        """Return the GPUs of a node that are offered, by UUID; None among them while a lease has not been asked."""
        return {self._uuid(pod) for pod in self.counting(self._on(node))[0]}

    # -- what is done ---------------------------------------------------------------------------------

    async def tend(
        self,
        nodes: Collection[Manifest],
        queue: Callable[[], Awaitable[Snapshot]],
        changed: Callable[[], None],
    ) -> None:
        """Ask those that have begun to run, make what is missing on these nodes, and give back what is too many.

        ``queue`` says what is offered and held. ``changed`` is called where something else is leased than before. On a
        node that is not ready everything stays as it is.
        """
        if not self.mirror.listed:
            await self.mirror.until_told(EVERY_S)
        if not self.mirror.listed:
            return
        # One time for the many changes of one moment.
        await asyncio.sleep(TOGETHER_S)
        ours = {_prefix(self._installation, name_of(node)): node for node in nodes}
        found: dict[str, list[Manifest]] = {prefix: [] for prefix in ours}
        for pod in self.mirror.found.values():
            found.setdefault(name_of(pod).rpartition("-")[0], []).append(pod)
        gpus = {prefix: gpus_of(node) for prefix, node in ours.items() if is_ready(node)}
        troubles = await _each(self._make, list(self._missing(ours, gpus, found)))
        troubles += await self._ask([(pod, gpus[prefix]) for prefix in gpus for pod in found[prefix]])
        back: list[Manifest] = []
        for prefix, pods in found.items():
            if prefix in ours and prefix not in gpus:
                continue
            stay = list(filter(_stays, pods))
            if prefix not in ours:
                back += stay
            elif len(stay) > gpus[prefix]:
                back += self._too_many(prefix, stay, gpus[prefix], _held(await queue(), None))
            else:
                self._too_many_since.pop(prefix, None)
            # These hold nothing, and their names are wanted.
            back += [pod for pod in pods if _phase(pod) in OVER and not _ends(pod)]
        self._withdrawn = frozenset(_uid(pod) for pod in back)
        troubles += await _each(self._remove, self._free(back, await queue()) if back else [])
        there = {_uid(pod) for pod in self.mirror.found.values()}
        self._said = {uid: said for uid, said in self._said.items() if uid in there}
        told = self.counting(list(self.mirror.found.values()))[1]
        offered = {_uid(self.mirror.found[name]): (name, text) for name, text in told.items()}
        if offered != self._offered:
            for name, text in sorted(set(offered.values()) - set(self._offered.values())):
                log.info("The lease pod %s holds GPU %s", name, _short(text))
            for name, text in sorted(set(self._offered.values()) - set(offered.values())):
                log.warning(
                    "The lease pod %s holds nothing that sessions can use any more; it held GPU %s",
                    name,
                    _short(text),
                )
            self._offered = offered
            changed()
        if troubles:
            self._failures.failed(min(troubles, key=str))
        else:
            self._failures.worked()

    def _missing(
        self, ours: Mapping[str, Manifest], gpus: Mapping[str, int], found: Mapping[str, Sequence[Manifest]]
    ) -> Iterator[tuple[str, str]]:
        """Yield the names of the leases that nodes have too few of, each with its node."""
        for prefix, most in gpus.items():
            names = (name for n in itertools.count() if (name := f"{prefix}-{n}") not in self.mirror.found)
            too_few = most - len(list(filter(_stays, found[prefix])))
            for name in itertools.islice(names, max(0, too_few)):
                yield name, name_of(ours[prefix])

    def _too_many(
        self, prefix: str, pods: Sequence[Manifest], most: int, held: Collection[str]
    ) -> list[Manifest]:
        """Return the leases to give back of a node that has only ``most`` GPUs.

        First come leases that wait for a GPU or have a broken one. If these are too few for `TOO_MANY_FOR_S`, all idle
        leases are given back: the cluster does not say which GPU is missing, and a new lease gets another GPU.
        """
        since = self._too_many_since.setdefault(prefix, time.monotonic())
        waiting = [pod for pod in pods if not _node(pod)]
        broken = [
            pod for pod in pods if (said := self._said.get(_uid(pod))) is not None and said.text is None
        ]
        back = [*reversed(waiting), *broken][: len(pods) - most]
        if len(back) == len(pods) - most or time.monotonic() - since < TOO_MANY_FOR_S:
            return back
        idle = [pod for pod in pods if (uuid := self._uuid(pod)) is not None and uuid not in held]
        return [*back, *(pod for pod in idle if pod not in back)]

    def _free(self, back: Sequence[Manifest], snapshot: Snapshot) -> list[Manifest]:
        """Return those of these leases that have no session on their GPU and cannot get one.

        If it is not known which GPU a lease has, other leases must hold all GPUs that the queue knows of its node.
        """
        free: list[Manifest] = []
        for pod in back:
            others = {
                self._uuid(other)
                for other in self._on(_node(pod))
                if _is_held(other) and other not in [pod, *free]
            }
            if not _is_held(pod) or _held(snapshot, _node(pod)) <= others:
                free.append(pod)
        return free

    def _on(self, node: str) -> list[Manifest]:
        return [pod for pod in list(self.mirror.found.values()) if _node(pod) == node]

    def _uuid(self, pod: Manifest) -> str | None:
        said = self._said.get(_uid(pod))
        return None if said is None else said.uuid

    # -- one pod --------------------------------------------------------------------------------------

    async def _make(self, wanted: tuple[str, str]) -> None:
        name, node = wanted
        pod = self._dialect.lease_pod(name=name, node=node, image=self._image, command=SLEEP)
        try:
            await self._api.ask("POST", self._pods, body=pod)
        except Refused as e:
            if e.status != CONFLICT:
                raise

    async def _remove(self, pod: Manifest) -> None:
        # By its uid: another pod may have got the same name since.
        options: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "gracePeriodSeconds": 1,
            "preconditions": {"uid": _uid(pod)},
        }
        try:
            await self._api.ask("DELETE", f"{self._pods}/{name_of(pod)}", body=options)
        except Refused as e:
            if e.status not in (NOT_FOUND, CONFLICT):
                raise

    async def _ask(self, pods: Iterable[tuple[Manifest, int]]) -> list[FGPUError]:
        """Ask the running leases that named no working GPU since their node's number of GPUs changed."""

        async def ask(asked: tuple[Manifest, int]) -> None:
            pod, gpus = asked
            _check_starts(pod)
            said = self._said.get(_uid(pod))
            if _is_held(pod) and (said is None or said.text is None or said.gpus != gpus):
                await self._ask_one(pod, gpus)

        return await _each(ask, pods)

    async def _ask_one(self, pod: Manifest, gpus: int) -> None:
        name = name_of(pod)
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                answer = await self._api.run(
                    f"{self._pods}/{name}", "lease", list(ASK), most_bytes=MOST_BYTES
                )
        except TimeoutError as e:
            raise EngineSilent(f"the lease pod {name} does not answer") from e
        text = answer.output.decode("utf-8", "replace")
        if answer.status in (None, NO_SUCH_COMMAND):
            raise NotKnown(
                f"nvidia-smi cannot be run in the lease pod {name}: {_short(text)}; look at its RuntimeClass"
            )
        try:
            if answer.status != 0:
                raise NotKnown(f"the GPU of the lease pod {name} does not work: {_short(text)}")
            uuid = told_by(name, text).uuid
            self._said[_uid(pod)] = Said(text, uuid, gpus)
            self._dialect.given_as[uuid] = given_as(text)
        except NotKnown:
            # Which one it was is still needed: sessions may be on it.
            self._said[_uid(pod)] = Said(None, self._uuid(pod), gpus)
            raise


async def _each(step: Callable[[T], Awaitable[None]], of: Iterable[T]) -> list[FGPUError]:
    """Run a step for each, some side by side; return the failures. A failure does not stop the others."""
    at_a_time = asyncio.Semaphore(AT_A_TIME)

    async def one(item: T) -> FGPUError | None:
        async with at_a_time:
            try:
                await step(item)
            except (Refused, EngineSilent, NotKnown) as e:
                return e
        return None

    return [e for e in await asyncio.gather(*(one(item) for item in of)) if e is not None]


def _held(snapshot: Snapshot, node: str | None) -> set[str]:
    """Return the GPUs that sessions have shares of; with a node those of that, and those that it offers."""
    placed = [s.placement for s in snapshot.sessions if s.placement is not None]
    shared = {share.device_uuid for p in placed if node in (None, p.node_id) for share in p.shares}
    # One that is closed takes nothing until it is surveyed again.
    return shared | {d.uuid for n in snapshot.nodes if n.id == node and not n.closed for d in n.devices}


def _check_starts(pod: Manifest) -> None:
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting and waiting.get("reason") not in COMING:
            why = waiting.get("message") or waiting.get("reason")
            raise NotKnown(f"the lease pod {name_of(pod)} does not start: {_short(str(why))}")


def _prefix(installation: str, node: str) -> str:
    # A node's name may be longer than what is left of a pod's.
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
