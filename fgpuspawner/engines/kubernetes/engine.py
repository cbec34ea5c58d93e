"""Pods as an `Engine`: our queue decides who is next and where, the cluster binds and runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kubernetes_asyncio.client import Configuration

from fgpu_scheduler import HOLDING, EndCause, Observed, Queue, Seen, Session
from fgpuspawner.concurrency.background import Failures
from fgpuspawner.concurrency.waiting import to_the_end
from fgpuspawner.engines import marks
from fgpuspawner.engines.base import (
    Capabilities,
    Ended,
    Endpoint,
    Engine,
    EngineSilent,
    HubSide,
    Installation,
    LaunchFailed,
    LaunchSpec,
    NotBound,
)
from fgpuspawner.engines.kubernetes import endings, files, inventory, leases
from fgpuspawner.engines.kubernetes.api import Api, Manifest, Refused, at_once
from fgpuspawner.engines.kubernetes.dialects import Beside, Dialect, Lease, NotSayable, PodPatch
from fgpuspawner.engines.kubernetes.dialects.base import CONTAINER, TOLERATING, name_of
from fgpuspawner.engines.kubernetes.kept import node_kept, own_kept
from fgpuspawner.engines.kubernetes.leases import Leases
from fgpuspawner.engines.kubernetes.mirror import Mirror
from fgpuspawner.engines.kubernetes.pods import PodOptions, made, owned
from fgpuspawner.isolation.base import IN_CONTAINER
from fgpuspawner.isolation.nvml_reader import NvmlReader
from fgpuspawner.isolation.report import LARGEST_BYTES, Answer
from fgpuspawner.settings.nodes import Machine, are_found_by_driver

log = logging.getLogger("fgpu.kubernetes")

NOT_FOUND, CONFLICT = 404, 409
DRA = "/apis/resource.k8s.io/v1"
UNBOUND_FOR_S = 30.0
"""How long the cluster may take to bind a pod to its session's node."""
UNREADY_FOR_S = 10.0
GONE_WITHIN_S = 90.0
"""Beyond a pod's own time to end: how long its node may take to say that it has.

A kubelet (1.20 was seen to) that removes the containers before it has told of their end tells at the next clean-up, and
there is one a minute.
"""
BOUND = (("fieldSelector", "status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!="),)
LOOK_EVERY_S = 0.5
BEGUN_EVERY_S, BEGUN_WITHIN_S = 0.1, 2.0
NOTHING = (f"{IN_CONTAINER}/probe-static",)
"""A program of ours that ends at once, since it gets no arguments."""
FEW = 20
"""Up to this many pods that the watch has not reported are asked for one by one; else all pods are listed."""
UNTOLD = "what the cluster's nodes have cannot be told"
NOT_ASKED = "GPU use is not measured on Kubernetes: pods may not see the processes of their node"
"""They see processes by their numbers on the node, which the Hub cannot follow into pods."""
KILLED_WITHIN_S = 5.0
"""Beyond a pod's own time to end: how long its node may take to see that the API has forgotten it."""


def node_of(pod: Manifest) -> str:
    """Return the node on which a session's pod has its place."""
    return str((pod["metadata"].get("annotations") or {}).get(marks.NODE, ""))


class KubernetesEngine(Engine):
    """Sessions as pods of one namespace, each pinned to the node on which it has its place."""

    capabilities = Capabilities(
        "pods",
        own_root=True,
        real_limits=True,
        apart=True,
        machines=True,
        finds_nodes=True,
        sees_processes=False,
    )

    def __init__(
        self,
        installation: Installation,
        configuration: Configuration,
        *,
        namespace: str,
        stop_timeout_s: int,
        dialect: Dialect,
        session_spec: Manifest = TOLERATING,
        lease_image: str = "",
    ) -> None:
        self._installation = installation
        self._configuration = configuration
        self._namespace = namespace
        self._stop_timeout_s = stop_timeout_s
        self._core = "/api/v1"
        self._own = f"{self._core}/namespaces/{namespace}"
        self._marked = (("labelSelector", f"{marks.INSTALLATION}={installation.id}"),)
        self._changed: Callable[[], None] = lambda: None
        self._answers = True
        self._ready: dict[str, bool] = {}
        self._told: dict[str, str] = {}
        """What was seen of each node when the Hub was last told that nodes have changed."""
        self._going: set[str] = set()
        """Pods that have ended, and that the Hub had removed."""
        self._forgotten: dict[str, tuple[Manifest, float]] = {}
        """Pods that the API has forgotten while their processes ran, and until when their node may let these run."""
        self._owner = inventory.Owner(installation.id, namespace)
        self._silent = Failures(log, "What runs in the cluster cannot be seen now")
        self._api = Api(configuration)
        self._pods: Mirror[Manifest] | None = None
        self._nodes: Mirror[Manifest] | None = None
        self._others: Mirror[inventory.Taken] | None = None
        self._dialect = dialect
        self._lease_image = lease_image
        self._session_spec = session_spec
        """Of a session's pod that is on no node: which nodes take it."""
        self._leases: Leases | None = None
        self._nodes_changed: Callable[[], None] = lambda: None
        self._queue: Queue | None = None
        self._held: frozenset[str] = frozenset()
        """The GPUs that sessions hold, where the cluster chooses them."""
        self._as_leased: set[str] = set()
        """Nodes known to have a lease for every GPU that the queue offers there."""

    # -- the Hub's life -------------------------------------------------------------------------------

    def survey(self) -> Mapping[str, Machine | None]:
        """Return what the nodes have that sessions may use, beyond what pods of others take; None of one not ready.

        Raises:
            EngineSilent: the cluster does not say.
        """

        nodes, others = self._nodes, self._others
        try:
            if nodes is None or others is None or not (nodes.listed and others.listed):
                return at_once(self._asked_for_machines)
            trouble = nodes.trouble or others.trouble
            if trouble is not None:
                raise EngineSilent(f"{UNTOLD}: {trouble}")
            about_gpus = at_once(self._about_gpus)
        except Refused as e:
            raise EngineSilent(f"{UNTOLD}: {e}") from e
        # Copies: the event loop changes the originals during this.
        return self._machines(list(nodes.found.values()), list(others.found.values()), about_gpus)

    async def _asked_for_machines(self) -> Mapping[str, Machine | None]:
        """Ask the cluster itself, for use while no watch runs."""
        api = Api(self._configuration)
        try:
            nodes = await api.listed(f"{self._core}/nodes", keep=node_kept)
            others = await api.listed(f"{self._core}/pods", BOUND, keep=self._taken)
        finally:
            await api.close()
        return self._machines(nodes, others, await self._about_gpus())

    async def _about_gpus(self) -> Beside:
        """Return what the cluster says of GPUs beside its nodes and pods."""
        if self._dialect.name != "dra":
            return Beside()
        api = Api(self._configuration)
        try:
            slices = await api.listed(f"{DRA}/resourceslices", keep=dict)
            return Beside(slices=slices, claims=await api.listed(f"{DRA}/resourceclaims", keep=dict))
        finally:
            await api.close()

    def _taken(self, pod: Manifest) -> inventory.Taken | None:
        return inventory.taken(pod, self._dialect, self._owner)

    def _machines(
        self, nodes: Sequence[Manifest], others: Sequence[inventory.Taken], about_gpus: Beside
    ) -> Mapping[str, Machine | None]:
        named = self._installation.settings.node_ids()
        on = inventory.by_node(others)
        ours = {name_of(node): node for node in nodes if inventory.is_ours(node, named)}
        return {name: self._machine(node, on.get(name, []), about_gpus) for name, node in ours.items()}

    def _machine(
        self, node: Manifest, others: Sequence[inventory.Taken], about_gpus: Beside
    ) -> Machine | None:
        """Return what a node has; None also where that cannot be read, and then it stays as it was."""
        leased = [one.pod for one in others if one.lease and one.pod is not None]
        # Before the first lease has been asked the GPUs of its node are not known.
        counted, told = (leased, {}) if self._leases is None else self._leases.counting(leased)
        beside = replace(about_gpus, pods=counted, told=told)
        try:
            return inventory.machine_of(node, others, self._dialect, beside, self._session_spec, self._held)
        except ValueError as e:
            log.error("What node %s has cannot be read: %s", node["metadata"]["name"], e)
            return None

    def open(self, hub: HubSide) -> None:
        """Begin to follow pods and nodes."""
        self._pods = Mirror(
            self._api,
            f"{self._own}/pods",
            self._marked,
            what="pods",
            keep=own_kept,
            changed=self._pod_changed,
        )
        self._nodes = Mirror(
            self._api, f"{self._core}/nodes", what="nodes", keep=node_kept, changed=self._node_changed
        )
        self._others = Mirror(
            self._api, f"{self._core}/pods", BOUND, what="other pods", keep=self._taken, everywhere=True
        )
        self._nodes_changed = hub.nodes_changed
        self._queue = hub.queue
        followed: list[Mirror[Any]] = [self._pods, self._nodes, self._others]
        if isinstance(self._dialect, Lease) and self._lease_image:
            self._leases = Leases(
                self._api,
                f"{self._own}/pods",
                self._dialect,
                installation=self._installation.id,
                image=self._lease_image,
            )
            followed.append(self._leases.mirror)
            hub.background.every(
                leases.EVERY_S,
                self._tend_leases,
                failed="GPUs cannot be leased now",
                wake=self._leases.wake,
            )
        hub.background.run(self._follow(followed), failed="The cluster is not followed any more")

    async def _follow(self, mirrors: Sequence[Mirror[Any]]) -> None:
        try:
            await asyncio.gather(*(mirror.follow() for mirror in mirrors))
        finally:
            await self._api.close()

    async def _tend_leases(self) -> None:
        assert self._leases is not None
        assert self._nodes is not None
        assert self._queue is not None
        if not self._nodes.listed:
            await self._nodes.until_told(leases.EVERY_S)
        # Without them all leases would be too many.
        if self._nodes.listed:
            found = self._nodes.found.values()
            await self._leases.tend(list(filter(self._is_leased, found)), self._queue.snapshot, self._leased)

    def _is_leased(self, node: Manifest) -> bool:
        """Return whether a node is ours, with GPUs that its driver lists."""
        named = self._installation.settings.nodes
        spec = next((spec for spec in named if spec["name"] == node["metadata"]["name"]), None)
        return inventory.is_ours(node, [spec["name"]] if spec else []) and are_found_by_driver(spec or {})

    def _leased(self) -> None:
        self._nodes_changed()
        self._changed()

    def close(self) -> None:
        """Nothing is held but connections, which end with the event loop."""

    def answering(self) -> tuple[int, int]:
        return (1, 0) if self._answers else (0, 1)

    # -- what runs ------------------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def _pod_changed(self, pod: Manifest, there: bool) -> None:
        if not there:
            self._going.discard(pod["metadata"]["name"])
            self._is_forgotten(pod)
        if not there or endings.how_it_ended(pod) is not None:
            self._changed()

    def _node_changed(self, node: Manifest, there: bool) -> None:
        ready = there and inventory.is_ready(node)
        name = node["metadata"]["name"]
        if self._ready.get(name, False) != ready:
            self._changed()
        self._ready[name] = ready
        # A kubelet says every few seconds that it lives: only what sessions see of its node counts.
        seen = inventory.digest(node) if there else ""
        if self._told.get(name) != seen:
            self._told[name] = seen
            self._nodes_changed()
            if self._leases is not None:
                self._leases.wake.set()
        if not there:
            del self._ready[name], self._told[name]

    async def observe(self) -> Seen:
        try:
            pods = await self._there()
        except (EngineSilent, Refused) as e:
            self._answers = False
            self._silent.failed(e)
            return Seen((), ())
        self._answers = True
        self._silent.worked()
        await self._note_held()
        now = time.monotonic()
        self._forgotten = {name: own for name, own in self._forgotten.items() if own[1] > now}
        pods += [pod for pod, _ in self._forgotten.values()]
        things = [one for pod in pods if (one := self._observed(pod)) is not None]
        nodes = {} if self._nodes is None else self._nodes.found
        named = self._installation.settings.node_ids()
        ours = {name: node for name, node in nodes.items() if inventory.is_ours(node, named)}
        ready = [name for name, node in ours.items() if inventory.is_ready(node)]
        late = await self._late(ready)
        return Seen(things, [name for name in ready if name not in late], tuple(late))

    async def _there(self) -> list[Manifest]:
        """Return our pods, each that the cluster has at this moment.

        Their names are asked for, as a few bytes tell them: shares are given away by what is there. What each of them
        is, is known from following; of one that was not heard of yet it is asked.
        """
        assert self._pods is not None
        path = f"{self._own}/pods"
        names = await self._api.names(path, self._marked)
        found = self._pods.found
        unknown = names - found.keys()
        if len(unknown) > FEW or self._pods.trouble is not None:
            return await self._api.listed(path, self._marked, keep=own_kept)
        asked = await asyncio.gather(*(self._asked_for(name) for name in unknown))
        if None in asked:
            raise EngineSilent("a pod of the cluster cannot be seen now")
        return [*(found[name] for name in names & found.keys()), *(pod for pod in asked if pod)]

    def _is_forgotten(self, pod: Manifest) -> None:
        """Note that a pod has left the API. After a removal by force it may run on for its grace period."""
        if endings.is_running(pod):
            found = pod["metadata"]
            dying = {**pod, "metadata": {"deletionTimestamp": "by force", **found}}
            grace_s = float(pod["spec"].get("terminationGracePeriodSeconds") or self._stop_timeout_s)
            self._forgotten.setdefault(found["name"], (dying, time.monotonic() + grace_s + KILLED_WITHIN_S))

    async def _late(self, ready: Sequence[str]) -> set[str]:
        """Return the nodes where a Hub that has just started may still offer GPUs that it has ceased to lease."""
        assert self._nodes is not None
        if self._leases is None or self._queue is None:
            return set()
        late = {n for n in ready if n not in self._as_leased and self._is_leased(self._nodes.found[n])}
        if late and self._leases.mirror.listed:
            offered = {n.id: {d.uuid for d in n.devices} for n in (await self._queue.snapshot()).nodes}
            self._as_leased |= {n for n in late if offered.get(n, set()) <= self._leases.offered_on(n)}
        return late - self._as_leased

    def _is_lost(self, node_id: str) -> bool:
        if self._nodes is None or not self._nodes.listed:
            return False
        found = self._nodes.found.get(node_id)
        return found is None or not inventory.is_ready(found)

    def _is_removed(self, node_id: str) -> bool:
        """Return whether the node is known to have left the cluster."""
        return self._nodes is not None and self._nodes.listed and node_id not in self._nodes.found

    def _observed(self, pod: Manifest) -> Observed | None:
        named = self._named(pod)
        if named is None or pod["metadata"]["name"] in self._going:
            return None
        ended = endings.how_it_ended(pod)
        node_id = node_of(pod)
        if not endings.has_ended(pod) and self._is_lost(node_id) and not self._is_removed(node_id):
            # The pod was deleted, but its node has not ended its processes.
            ended = None
        return Observed(
            node_id=node_id,
            session_id=named[0],
            attempt=named[1],
            handle=pod["metadata"]["name"],
            alive=ended is None,
            end_cause=ended.cause if ended else EndCause.EXITED,
            message=ended.message if ended else None,
        )

    def _named(self, pod: Manifest) -> tuple[int, int] | None:
        """Return session and attempt of a pod that is ours by its name and its labels, else None."""
        found = pod["metadata"]
        labels = found.get("labels") or {}
        named = marks.session_and_attempt(found["name"], self._installation.id)
        said = labels.get(marks.SESSION), labels.get(marks.ATTEMPT)
        return named if named is not None and said == (str(named[0]), str(named[1])) else None

    async def remove(self, observed: Observed) -> bool:
        return await self._ended_and_gone(observed.handle, grace_s=self._stop_timeout_s)

    # -- one session ----------------------------------------------------------------------------------

    async def start(self, spec: LaunchSpec) -> Endpoint:
        assert isinstance(spec.options, PodOptions)
        assert spec.session.placement is not None
        if not spec.image.reference:
            raise LaunchFailed(f"there is no image {spec.image.slug!r} any more", EndCause.PULL_FAILED)
        carries = self._dialect.init_containers or not spec.devices
        try:
            carried = await asyncio.to_thread(files.carry, spec.prepared) if carries else None
        except OSError as e:
            raise LaunchFailed(f"the session's files cannot be read: {e}") from e
        made_of = made(
            spec,
            spec.options,
            carried,
            installation=self._installation.id,
            node=spec.session.placement.node_id,
        )
        try:
            patch = self._patch(spec, made_of.pod["metadata"]["name"])
            if spec.options.claim is not None:
                await self._claim(spec.options.claim)
            pod = await self._make("pods", patch.applied(made_of.pod))
            # These go with their pod, whatever becomes of this Hub; until they are there it waits.
            for claim in patch.claims:
                await self._make("resourceclaims", owned(claim, pod), api=f"/apis/{claim['apiVersion']}")
            await self._make("secrets", owned(made_of.secret, pod))
        except NotSayable as e:
            raise LaunchFailed(str(e)) from e
        except Refused as e:
            raise LaunchFailed(f"the cluster refuses the session: {e}") from e
        except EngineSilent as e:
            raise LaunchFailed("the cluster does not answer") from e
        return await self._up(spec, made_of.pod["metadata"]["name"])

    def _patch(self, spec: LaunchSpec, name: str) -> PodPatch:
        placement = spec.session.placement
        if placement is None or not spec.devices:
            return PodPatch()
        return self._dialect.patch(placement.shares, spec.devices, name=name)

    async def _make(self, kind: str, manifest: Mapping[str, Any], *, api: str = "/api/v1") -> dict[str, Any]:
        path = f"{api}/namespaces/{self._namespace}/{kind}"
        return await to_the_end(self._api.ask("POST", path, body=dict(manifest)))

    async def _claim(self, claim: Manifest) -> None:
        """Create a volume claim if it is missing; an existing one stays as it is."""
        kind = "persistentvolumeclaims"
        try:
            await self._make(kind, claim)
        except Refused as e:
            # Where a quota is reached the cluster says so before it looks whether it is there.
            if e.status == CONFLICT:
                return
            try:
                await self._api.ask("GET", f"{self._own}/{kind}/{claim['metadata']['name']}")
            except Refused:
                raise e from None

    async def _up(self, spec: LaunchSpec, name: str) -> Endpoint:
        """Wait until a pod's server may answer.

        Raises:
            NotBound: the cluster does not give it its place.
            LaunchFailed: it will not.
        """
        assert self._pods is not None
        since: dict[str, float] = {}
        while True:
            if not self._holds(spec):
                await self._give_up_place(name, "its GPU is not leased any more")
            pod = self._pods.found.get(name)
            if pod is not None:
                up = endings.is_up(pod) or (endings.is_coming(pod) and await self._has_begun(name))
                if up and endings.address_of(pod):
                    log.info("Session %d: pod %s is started", spec.session.id, name)
                    return Endpoint(endings.address_of(pod), spec.port, spec.simulated or bool(spec.devices))
                ended = endings.how_it_ended(pod)
                if ended is not None and endings.was_refused(pod):
                    await self._give_up_place(name, ended.message)
                if ended is not None:
                    cause = ended.cause if ended.cause is not EndCause.EXITED else EndCause.LAUNCH_FAILED
                    raise LaunchFailed(ended.message, cause)
                trouble = endings.why_not_up(pod)
                if trouble is not None:
                    began = since.setdefault(trouble.message, time.monotonic())
                    await self._bear(trouble, time.monotonic() - began, name)
            coming = pod is not None and endings.is_coming(pod)
            await self._pods.until_told(BEGUN_EVERY_S if coming else LOOK_EVERY_S)

    async def _has_begun(self, name: str) -> bool:
        """Return whether a session's container runs by now: its node looks once a second, and tells of it after that."""
        path = f"{self._own}/pods/{name}"
        try:
            async with asyncio.timeout(BEGUN_WITHIN_S):
                answer = await self._api.run(path, CONTAINER, NOTHING, most_bytes=LARGEST_BYTES)
        except (Refused, EngineSilent, TimeoutError):
            return False
        return answer.status is not None

    async def _note_held(self) -> None:
        """Keep which GPUs sessions hold, where the cluster chooses them: pods of others take the rest first."""
        if self._dialect.pins_card or self._queue is None:
            return
        placed = [s.placement for s in (await self._queue.snapshot()).sessions if s.state in HOLDING]
        self._held = frozenset(share.device_uuid for where in placed if where for share in where.shares)

    def _holds(self, spec: LaunchSpec) -> bool:
        """Return whether the GPUs of a session's place are leased still, where they are leased at all."""
        placement = spec.session.placement
        assert placement is not None
        if self._leases is None or self._nodes is None or not spec.devices:
            return True
        node = self._nodes.found.get(placement.node_id)
        leased = node is not None and self._is_leased(node)
        return not leased or {d.uuid for d in spec.devices} <= self._leases.offered_on(placement.node_id)

    async def _bear(self, trouble: endings.Trouble, for_s: float, name: str) -> None:
        """Return if a trouble may still pass.

        Raises:
            NotBound, LaunchFailed: it lasts, or cannot pass.
        """
        patience_s = UNBOUND_FOR_S if trouble.unbound else UNREADY_FOR_S if trouble.unready else 0.0
        if for_s < patience_s:
            return
        if trouble.unbound:
            await self._give_up_place(name, trouble.message)
        raise LaunchFailed(trouble.message, trouble.cause)

    async def _give_up_place(self, name: str, why: str) -> None:
        """Let the session wait again, if nothing of its pod is left."""
        if await to_the_end(self._ended_and_gone(name, grace_s=1)):
            raise NotBound(why)

    async def ended(self, session: Session) -> Ended | None:
        assert self._pods is not None
        name = marks.name_of(self._installation.id, session.id, session.attempt)
        pod = self._pods.found.get(name)
        if pod is None:
            pod = await self._asked_for(name)
            if pod is None:
                return None
        if pod:
            return endings.how_it_ended(pod)
        removed = session.placement is not None and self._is_removed(session.placement.node_id)
        return endings.NODE_GONE if removed else endings.GONE

    async def _asked_for(self, name: str) -> Manifest | None:
        """Return a pod: empty if there is none, None if it could not be read."""
        try:
            return await self._api.ask("GET", f"{self._own}/pods/{name}")
        except Refused as e:
            return {} if e.status == NOT_FOUND else None
        except EngineSilent:
            return None

    def is_away(self, session: Session) -> bool:
        assert session.placement is not None
        return not self._answers or self._is_lost(session.placement.node_id)

    async def probe(
        self, session: Session, command: Sequence[str], *, told: Mapping[str, str], timeout_s: float
    ) -> Answer:
        name = marks.name_of(self._installation.id, session.id, session.attempt)
        program, *rest = command
        try:
            async with asyncio.timeout(timeout_s):
                return await self._api.run(
                    f"{self._own}/pods/{name}",
                    CONTAINER,
                    [f"{IN_CONTAINER}/{program}", *rest],
                    most_bytes=LARGEST_BYTES,
                )
        except (Refused, EngineSilent, TimeoutError) as e:
            log.warning(
                "Session %d: the check of its GPU limit could not be run: %s", session.id, e or "too late"
            )
            raise LaunchFailed("the cluster did not run the check of the session's GPU limit") from e

    async def stop(self, session: Session, *, now: bool) -> bool:
        grace_s = 1 if now else self._stop_timeout_s
        names = marks.names_of(self._installation.id, session)
        return all(await asyncio.gather(*(self._ended_and_gone(name, grace_s=grace_s) for name in names)))

    async def _ended_and_gone(self, name: str, *, grace_s: int) -> bool:
        """Delete a pod and return whether it is known to hold nothing.

        The grace is never 0: the API would forget the pod at once, and its processes would run on.
        """
        path = f"{self._own}/pods/{name}"
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": max(1, grace_s)}
        try:
            await to_the_end(self._api.ask("DELETE", path, body=body))
            since = time.monotonic() + grace_s
            while time.monotonic() < since + GONE_WITHIN_S:
                pod = await self._api.ask("GET", path)
                # A node that answers has heard of the deletion by then: it begins nothing of this pod.
                late = time.monotonic() > since + KILLED_WITHIN_S and not self._is_lost(node_of(pod))
                if endings.holds_nothing(pod) or (late and endings.nothing_runs(pod)):
                    # The cluster removes the rest of it; this engine reports it no longer.
                    self._going.add(name)
                    return True
                if self._pods is not None:
                    await self._pods.until_another(name, LOOK_EVERY_S)
        except Refused as e:
            if e.status == NOT_FOUND:
                await self._until_killed(name)
                return True
            log.warning("Pod %s could not be removed: %s", name, e)
        except EngineSilent as e:
            log.warning("Pod %s could not be removed: %s", name, e)
        return False

    async def _until_killed(self, name: str) -> None:
        """Wait until the processes of a pod that the API does not have should have ended."""
        if self._pods is not None:
            for _ in range(4):
                if name not in self._pods.found:
                    break
                # What its node said last comes a moment after the API has forgotten it.
                await self._pods.until_another(name, LOOK_EVERY_S)
            else:
                self._is_forgotten(self._pods.found[name])
        if name in self._forgotten:
            await asyncio.sleep(self._forgotten[name][1] - time.monotonic())
            self._forgotten.pop(name, None)

    # -- who uses which GPU ---------------------------------------------------------------------------

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        raise EngineSilent(NOT_ASKED)

    def gpu_reader(self, node_id: str) -> NvmlReader:
        raise EngineSilent(NOT_ASKED)
