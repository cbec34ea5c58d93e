"""Pods as an `Engine`: our queue decides which session is next and where; the cluster binds the pod and runs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from fgpuspawner.engines.kubernetes.api import METADATA, NOT_FOUND, Api, Refused, run_blocking
from fgpuspawner.engines.kubernetes.dialects.base import (
    CONTAINER,
    TOLERATING,
    Dialect,
    GpuRecords,
    Manifest,
    PodPatch,
    UnsupportedShare,
    annotation,
    name_of,
    with_owner,
)
from fgpuspawner.engines.kubernetes.dialects.lease import Lease
from fgpuspawner.engines.kubernetes.inventory import pruned
from fgpuspawner.engines.kubernetes.lease_readers import LeasePodsReader
from fgpuspawner.engines.kubernetes.mirror import AGAIN_AFTER_S, Mirror
from fgpuspawner.engines.kubernetes.placeholders import Placeholders, placeholder_pod
from fgpuspawner.engines.kubernetes.pods import PodOptions, session_objects
from fgpuspawner.engines.kubernetes.rights import rights_of
from fgpuspawner.isolation.base import IN_CONTAINER
from fgpuspawner.isolation.nvml_reader import NvmlReader
from fgpuspawner.isolation.report import LARGEST_BYTES, Answer
from fgpuspawner.settings.nodes import MachineFacts, are_found_by_driver

log = logging.getLogger("fgpu.kubernetes")

CORE = "/api/v1"
DRA = "/apis/resource.k8s.io/v1"
GONE_WITHIN_S = 90.0
"""How long a node may take to report a pod's end, beyond the pod's own time to end.

A kubelet (seen with 1.20) that removes the containers before it has reported their end reports it at its next clean-up,
once a minute.
"""
KILLED_WITHIN_S = 5.0
"""How long a node may take to notice that the API has no such pod any longer, beyond the pod's own time to end."""
BOUND = (("fieldSelector", "status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!="),)
LOOK_EVERY_S = 0.5
UNTOLD = "what the cluster's nodes have cannot be told"
NOT_MEASURED = 'GPU use is measured only with dialect "lease" and c.KubernetesFGPUSpawner.measure_gpus = True'


MOST_LOG_READ = 256 << 10
NOT_BEGUN = 400


def node_of(pod: Manifest) -> str:
    """Return the node that a session's pod is placed on."""
    return annotation(pod, marks.NODE) or ""


class KubernetesEngine(Engine):
    """Sessions as pods of one namespace, each restricted to the node of its placement."""

    capabilities = Capabilities(
        "pods",
        own_root=True,
        real_limits=True,
        apart=True,
        machines=True,
        finds_nodes=True,
        sees_processes=False,
        reads_logs=True,
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
        placeholder_class: str = "",
        most_placeholders: int = 0,
        hub_pod: str = "",
    ) -> None:
        self._installation = installation
        self._configuration = configuration
        self._own = f"{CORE}/namespaces/{namespace}"
        self._namespace = namespace
        self._stop_timeout_s = stop_timeout_s
        self._marked = (("labelSelector", f"{marks.INSTALLATION}={installation.id}"),)
        self._owner = inventory.PodOwner(installation.id, namespace)
        self._dialect = dialect
        #: The spec of a session's pod without a node: it decides which nodes take sessions.
        self._session_spec = session_spec
        self._changed: Callable[[], None] = lambda: None
        self._nodes_changed: Callable[[], None] = lambda: None
        self._queue: Queue | None = None
        self._answers = True
        self._silent = Failures(log, "What runs in the cluster cannot be seen now")
        #: The digest of each node when the Hub was last told that nodes have changed.
        self._reported: dict[str, str] = {}
        #: Pods that have ended and are being deleted; `observe` leaves them out.
        self._going: set[str] = set()
        #: Pods that the API has forgotten while their processes ran, and the time by which their node has ended these.
        self._forgotten: dict[str, tuple[Manifest, float]] = {}
        #: The GPUs that sessions hold, where the cluster chooses the GPU.
        self._held: frozenset[str] = frozenset()
        #: Nodes that are known to have a lease for every GPU that the queue offers there.
        self._as_leased: set[str] = set()
        api = self._api = Api(configuration)
        self._pods: Mirror[Manifest] = Mirror(
            api, f"{self._own}/pods", self._marked, what="pods", keep=pruned, changed=self._pod_changed
        )
        self._nodes: Mirror[Manifest] = Mirror(
            api, f"{CORE}/nodes", what="nodes", keep=pruned, changed=self._node_changed
        )
        self._others = self._mirror_of_others(f"{CORE}/pods")
        #: What the Hub may not see of the cluster. Asked once: a right that is lost later is a failure.
        self._lacking: frozenset[str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: dict[str, LeasePodsReader] = {}
        self._leases: leases.Leases | None = None
        self._placeholders: Placeholders | None = None
        if isinstance(dialect, Lease) and lease_image:
            ours, pods = installation.id, f"{self._own}/pods"
            self._leases = leases.Leases(api, pods, dialect, installation=ours, image=lease_image)
            self.capabilities = replace(self.capabilities, sees_processes=dialect.measures)
            if placeholder_class:
                pod_of = partial(
                    placeholder_pod,
                    installation=ours,
                    image=lease_image,
                    priority_class=placeholder_class,
                    session_spec=session_spec,
                )
                self._placeholders = Placeholders(
                    api, pods, pod_of, installation=ours, most=most_placeholders, hub_pod=hub_pod
                )

    # -- the Hub's life -------------------------------------------------------------------------------

    def survey(self) -> Mapping[str, MachineFacts | None]:
        """Return what our nodes offer to sessions beside the pods of others; None for a node that is not ready.

        Raises:
            EngineSilent: the cluster does not report it.
        """
        try:
            if not (self._others.listed and (self._nodes.listed or self._is_narrow)):
                return run_blocking(self._asked_for_machines)
            trouble = self._nodes.trouble or self._others.trouble
            if trouble is not None:
                raise EngineSilent(f"{UNTOLD}: {trouble}")
            records = run_blocking(self._records)
            # Copies: the event loop changes the originals during this.
            nodes, usage = list(self._known_nodes().values()), list(self._others.found.values())
            return self._machines(nodes, usage, records)
        except Refused as e:
            raise EngineSilent(f"{UNTOLD}: {e}") from e

    async def _asked_for_machines(self) -> Mapping[str, MachineFacts | None]:
        """Read nodes and pods from the API, for use while no watch runs."""
        async with Api(self._configuration) as api:
            await self._learn_rights(api)
            if self._is_narrow and (untold := inventory.untold(self._installation.settings.nodes)):
                raise EngineSilent(f"{UNTOLD}: {untold}")
            nodes = (
                list(self._known_nodes().values())
                if self._is_narrow
                else await api.listed(f"{CORE}/nodes", keep=pruned)
            )
            usage = await api.listed(self._others.path, BOUND, keep=self._usage)
        return self._machines(nodes, usage, await self._records())

    # -- how much of the cluster the Hub may see -------------------------------------------------------

    async def _learn_rights(self, api: Api) -> None:
        """Ask once which rights beyond the Hub's namespace are missing, and say what is unknown without them."""
        if self._lacking is not None:
            return
        rights = [right for right in rights_of(self._dialect.name) if right.else_]
        try:
            lacking = [right for right in rights if await right.lacking(api, self._namespace)]
        except Refused as e:
            log.warning("The Hub assumes that it has all its rights, as the cluster does not tell: %s", e)
            lacking = []
        if self._lacking is None:
            self._lacking = frozenset(right.resource for right in lacking)
            if "pods" in self._lacking:
                self._others = self._mirror_of_others(f"{self._own}/pods")
            for right in lacking:
                words, verbs = "The Hub may not %s %s in the whole cluster: %s", " and ".join(right.verbs)
                log.warning(words, verbs, right.resource, right.else_)

    @property
    def _is_narrow(self) -> bool:
        """Whether the Hub may not read nodes."""
        return "nodes" in (self._lacking or ())

    def _mirror_of_others(self, path: str) -> Mirror[inventory.PodUsage]:
        return Mirror(self._api, path, BOUND, what="other pods", keep=self._usage, everywhere=True)

    def _known_nodes(self) -> Mapping[str, Manifest]:
        """Return the cluster's nodes by name; where the Hub may not read them, as its settings and our pods tell."""
        if not self._is_narrow:
            return self._nodes.found
        specs = [s for s in self._installation.settings.nodes if not inventory.untold([s])]
        pods = list(self._pods.found.values())
        pods += [] if self._leases is None else list(self._leases.mirror.found.values())
        return {spec["name"]: inventory.told_node(spec, pods) for spec in specs}

    async def _records(self) -> GpuRecords:
        """Return the objects about GPUs that are neither nodes nor pods."""
        if self._dialect.name != "dra":
            return GpuRecords()
        found: dict[str, list[Manifest]] = {}
        async with Api(self._configuration) as api:
            for kind in {"resourceslices", "resourceclaims"} - (self._lacking or frozenset()):
                found[kind] = await api.listed(f"{DRA}/{kind}", keep=dict)
        return GpuRecords(slices=found.get("resourceslices", ()), claims=found.get("resourceclaims", ()))

    def _usage(self, pod: Manifest) -> inventory.PodUsage | None:
        return inventory.usage_of(pod, self._dialect, self._owner)

    def _machines(
        self, nodes: Sequence[Manifest], others: Sequence[inventory.PodUsage], records: GpuRecords
    ) -> Mapping[str, MachineFacts | None]:
        on = inventory.by_node(others)
        return {
            name_of(node): self._machine(node, on.get(name_of(node), []), records)
            for node in self._ours(nodes)
        }

    def _ours(self, nodes: Iterable[Manifest]) -> list[Manifest]:
        named = self._installation.settings.node_ids()
        return [node for node in nodes if inventory.is_ours(node, named)]

    def _machine(
        self, node: Manifest, others: Sequence[inventory.PodUsage], records: GpuRecords
    ) -> MachineFacts | None:
        """Return what a node offers; also None if that cannot be read, and then its last state stays in force."""
        leased = [one.pod for one in others if one.lease and one.pod is not None]
        # Before `open` no lease pod is asked, and the GPUs of its node are unknown.
        records = replace(records, leases={} if self._leases is None else self._leases.counting(leased))
        try:
            return inventory.machine_of(node, others, self._dialect, records, self._session_spec, self._held)
        except ValueError as e:
            log.error("What node %s has cannot be read: %s", name_of(node), e)
            return None

    def open(self, hub: HubSide) -> None:
        """Begin to follow pods and nodes."""
        self._nodes_changed = hub.nodes_changed
        self._queue = hub.queue
        if self._leases is not None:
            hub.background.every(
                leases.EVERY_S,
                self._reconcile_leases,
                failed="GPUs cannot be leased now",
                wake=self._leases.wake,
            )
        hub.background.run(self._follow(), failed="The cluster is not followed any longer")

    async def _follow(self) -> None:
        self._loop = asyncio.get_running_loop()
        unknown = Failures(log, "What the Hub may see of the cluster is not known yet")
        try:
            while self._lacking is None:
                try:
                    await self._learn_rights(self._api)
                except (EngineSilent, Refused) as e:
                    unknown.failed(e)
                    await asyncio.sleep(AGAIN_AFTER_S)
            followed: list[Mirror[Any]] = [self._pods, self._others]
            followed += [] if self._is_narrow else [self._nodes]
            followed += [own.mirror for own in (self._leases, self._placeholders) if own is not None]
            await asyncio.gather(*(mirror.follow() for mirror in followed))
        finally:
            await self._api.close()

    async def _reconcile_leases(self) -> None:
        assert self._leases is not None
        assert self._queue is not None
        if not (self._nodes.listed or self._is_narrow):
            await self._nodes.until_changed(leases.EVERY_S)
            # Without the nodes all leases would be too many.
            if not self._nodes.listed:
                return
        nodes = list(filter(self._is_leased, self._known_nodes().values()))
        if self._placeholders is not None:
            snapshot = await self._queue.snapshot()
            nodes = self._placeholders.kept(nodes, snapshot)
            await self._placeholders.reconcile(snapshot)
        await self._leases.reconcile(nodes, self._queue.snapshot, self._offer_changed)

    def _is_leased(self, node: Manifest) -> bool:
        """Return whether a node is ours, with GPUs that its driver lists."""
        named = self._installation.settings.nodes
        spec = next((spec for spec in named if spec["name"] == name_of(node)), None)
        return inventory.is_ours(node, [spec["name"]] if spec else []) and are_found_by_driver(spec or {})

    def _offer_changed(self) -> None:
        self._nodes_changed()
        self._changed()

    def close(self) -> None:
        """Release nothing: only connections are open, and they end with the event loop."""

    def answering(self) -> tuple[int, int]:
        return (1, 0) if self._answers else (0, 1)

    # -- what runs ------------------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def _pod_changed(self, pod: Manifest, there: bool) -> None:
        if not there:
            self._going.discard(name_of(pod))
            self._note_forgotten(pod)
        if not there or endings.how_it_ended(pod) is not None:
            self._changed()

    def _node_changed(self, node: Manifest, there: bool) -> None:
        # A kubelet reports every few seconds that it lives: only changes that matter for sessions count.
        before = self._reported.pop(name_of(node), "")
        now = inventory.digest(node) if there else ""
        if there:
            self._reported[name_of(node)] = now
        if now != before:
            self._offer_changed()
            if self._leases is not None:
                self._leases.wake.set()

    async def observe(self) -> Seen:
        try:
            pods = await self._present()
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
        nodes = self._known_nodes()
        ready = [name_of(node) for node in self._ours(nodes.values()) if inventory.is_ready(node)]
        late = await self._late(ready, nodes)
        return Seen(things, [name for name in ready if name not in late], tuple(late))

    async def _present(self) -> list[Manifest]:
        """Return our pods that the cluster has at this moment.

        Shares are freed by this, so the mirror alone is not enough: it may be late. The API is asked for the names of
        pods, and for all pods if the mirror does not have one of them.
        """
        path = f"{self._own}/pods"
        names = await self._api.names(path, self._marked)
        found = self._pods.found
        if names - found.keys() or self._pods.trouble is not None:
            return await self._api.listed(path, self._marked, keep=pruned)
        return [found[name] for name in names]

    def _note_forgotten(self, pod: Manifest) -> None:
        """Note that a pod has left the API. After a deletion by force its processes may run for its grace period."""
        if endings.is_running(pod):
            found = pod["metadata"]
            dying = {**pod, "metadata": {"deletionTimestamp": "by force", **found}}
            grace_s = float(pod["spec"].get("terminationGracePeriodSeconds") or self._stop_timeout_s)
            self._forgotten.setdefault(found["name"], (dying, time.monotonic() + grace_s + KILLED_WITHIN_S))

    async def _late(self, ready: Sequence[str], nodes: Mapping[str, Manifest]) -> set[str]:
        """Return the nodes where a Hub that has just started may still offer GPUs that are no longer leased."""
        if self._leases is None or self._queue is None:
            return set()
        late = {n for n in ready if n not in self._as_leased and self._is_leased(nodes[n])}
        if late and self._leases.mirror.listed:
            offered = {n.id: {d.uuid for d in n.devices} for n in (await self._queue.snapshot()).nodes}
            self._as_leased |= {n for n in late if offered.get(n, set()) <= self._leases.offered_on(n)}
        return late - self._as_leased

    def _is_lost(self, node_id: str) -> bool:
        """Return whether a node is known to be away or removed."""
        found = self._known_nodes().get(node_id)
        return self._is_removed(node_id) or (found is not None and not inventory.is_ready(found))

    def _is_removed(self, node_id: str) -> bool:
        return self._nodes.listed and node_id not in self._nodes.found

    def _observed(self, pod: Manifest) -> Observed | None:
        name, labels = name_of(pod), pod["metadata"].get("labels") or {}
        named = marks.session_and_attempt(name, self._installation.id)
        # A pod is ours by its name and its labels together.
        if named is None or (labels.get(marks.SESSION), labels.get(marks.ATTEMPT)) != tuple(map(str, named)):
            return None
        if name in self._going:
            return None
        ended, node_id = endings.how_it_ended(pod), node_of(pod)
        if not endings.has_ended(pod) and self._is_lost(node_id) and not self._is_removed(node_id):
            # The pod was deleted, but its node has not ended its processes.
            ended = None
        return Observed(
            node_id=node_id,
            session_id=named[0],
            attempt=named[1],
            handle=name,
            alive=ended is None,
            end_cause=ended.cause if ended else EndCause.EXITED,
            message=ended.message if ended else None,
        )

    async def remove(self, observed: Observed) -> bool:
        return await self._ended_and_gone(observed.handle, grace_s=self._stop_timeout_s)

    # -- one session ----------------------------------------------------------------------------------

    async def start(self, spec: LaunchSpec) -> Endpoint:
        assert isinstance(spec.options, PodOptions)
        placement = spec.session.placement
        assert placement is not None
        if not spec.image.reference:
            raise LaunchFailed(f"there is no image {spec.image.slug!r} any more", EndCause.PULL_FAILED)
        try:
            session_files = await asyncio.to_thread(files.pod_files, spec.prepared, spec.shared)
        except OSError as e:
            raise LaunchFailed(f"the session's files cannot be read: {e}") from e
        objects = session_objects(
            spec, spec.options, session_files, installation=self._installation.id, node=placement.node_id
        )
        name, patch = name_of(objects.pod), PodPatch()
        try:
            if spec.devices:
                patch = self._dialect.patch(placement.shares, spec.devices, name=name)
            if spec.options.claim is not None:
                await self._make_if_missing("persistentvolumeclaims", spec.options.claim)
            for config_map in session_files.config_maps:
                await self._make_if_missing("configmaps", config_map)
            pod = await self._make("pods", patch.applied(objects.pod))
            # The pod waits until it has these. The cluster deletes them with it, even after a crash of this Hub.
            for claim in patch.claims:
                await self._make("resourceclaims", with_owner(claim, pod), api=f"/apis/{claim['apiVersion']}")
            await self._make("secrets", with_owner(objects.secret, pod))
        except UnsupportedShare as e:
            raise LaunchFailed(str(e)) from e
        except Refused as e:
            raise LaunchFailed(f"the cluster refuses the session: {e}") from e
        except EngineSilent as e:
            raise LaunchFailed("the cluster does not answer") from e
        return await self._up(spec, name)

    async def _make(self, kind: str, manifest: Mapping[str, Any], *, api: str = CORE) -> dict[str, Any]:
        path = f"{api}/namespaces/{self._namespace}/{kind}"
        return await to_the_end(self._api.ask("POST", path, body=dict(manifest)))

    async def _make_if_missing(self, kind: str, manifest: Manifest) -> None:
        """Create an object of our namespace; one of its name that is there stays as it is."""
        path = f"{self._own}/{kind}"
        try:
            # Its metadata alone: the content of a ConfigMap is large.
            await self._api.ask("GET", f"{path}/{name_of(manifest)}", accept=METADATA)
        except Refused as e:
            if e.status != NOT_FOUND:
                raise
            await to_the_end(self._api.make(path, manifest))

    async def _up(self, spec: LaunchSpec, name: str) -> Endpoint:
        """Wait until a pod's server may answer.

        Raises:
            NotBound: the place is not available.
            LaunchFailed: the pod will not come up.
        """
        since: dict[str, float] = {}
        while True:
            if not self._holds(spec):
                await self._give_up_place(name, "its GPU is no longer leased")
            if (pod := self._pods.found.get(name)) is not None:
                if endings.is_up(pod) and endings.address_of(pod):
                    log.info("Session %d: pod %s is started", spec.session.id, name)
                    return Endpoint(endings.address_of(pod), spec.port, spec.simulated or bool(spec.devices))
                ended, trouble = endings.how_it_ended(pod), endings.why_not_up(pod)
                if ended is not None:
                    if endings.was_refused(pod):
                        await self._give_up_place(name, ended.message)
                    cause = ended.cause if ended.cause is not EndCause.EXITED else EndCause.LAUNCH_FAILED
                    raise LaunchFailed(ended.message, cause)
                if trouble is not None:
                    began = since.setdefault(trouble.message, time.monotonic())
                    if time.monotonic() - began >= trouble.patience_s:
                        if trouble.unbound:
                            await self._give_up_place(name, trouble.message)
                        raise LaunchFailed(trouble.message, trouble.cause)
            await self._pods.until_changed(LOOK_EVERY_S)

    async def _note_held(self) -> None:
        """Note which GPUs sessions hold, where the cluster chooses the GPU: pods of others then hide other GPUs first."""
        if self._dialect.pins_card or self._queue is None:
            return
        placed = [s.placement for s in (await self._queue.snapshot()).sessions if s.state in HOLDING]
        self._held = frozenset(share.device_uuid for where in placed if where for share in where.shares)

    def _holds(self, spec: LaunchSpec) -> bool:
        """Return whether the GPUs of a session are still leased, if its node's GPUs are leased at all."""
        placement = spec.session.placement
        assert placement is not None
        node = self._known_nodes().get(placement.node_id)
        if self._leases is None or not spec.devices or node is None or not self._is_leased(node):
            return True
        return {d.uuid for d in spec.devices} <= self._leases.offered_on(placement.node_id)

    async def _give_up_place(self, name: str, why: str) -> None:
        """Let the session wait again, if its pod is certainly gone."""
        if await to_the_end(self._ended_and_gone(name, grace_s=1)):
            raise NotBound(why)

    def _name_of(self, session: Session) -> str:
        return marks.name_of(self._installation.id, session.id, session.attempt)

    async def ended(self, session: Session) -> Ended | None:
        name = self._name_of(session)
        try:
            pod = self._pods.found.get(name) or await self._api.ask("GET", f"{self._own}/pods/{name}")
            return endings.how_it_ended(pod)
        except EngineSilent:
            return None
        except Refused as e:
            if e.status != NOT_FOUND:
                return None
        removed = session.placement is not None and self._is_removed(session.placement.node_id)
        return endings.NODE_GONE if removed else endings.GONE

    def is_away(self, session: Session) -> bool:
        assert session.placement is not None
        return not self._answers or self._is_lost(session.placement.node_id)

    async def probe(
        self, session: Session, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
    ) -> Answer:
        program, *rest = command
        words, path = [f"{IN_CONTAINER}/{program}", *rest], f"{self._own}/pods/{self._name_of(session)}"
        try:
            async with asyncio.timeout(timeout_s):
                return await self._api.run(path, CONTAINER, words, most_bytes=LARGEST_BYTES)
        except (Refused, EngineSilent, TimeoutError) as e:
            log.warning("Session %d: the check of its GPU limit was not run: %s", session.id, e or "too late")
            raise LaunchFailed("the cluster did not run the check of the session's GPU limit") from e

    async def log(self, session: Session, *, lines: int) -> bytes | None:
        query = [("container", CONTAINER), ("tailLines", str(lines)), ("limitBytes", str(MOST_LOG_READ))]
        try:
            return await self._api.text(f"{self._own}/pods/{self._name_of(session)}/log", query) or None
        except Refused as e:
            # 400: its container has not begun.
            if e.status in (NOT_FOUND, NOT_BEGUN):
                return None
            raise EngineSilent(f"the cluster does not return the log: {e}") from e

    async def stop(self, session: Session, *, now: bool) -> bool:
        grace_s = 1 if now else self._stop_timeout_s
        names = marks.names_of(self._installation.id, session)
        return all(await asyncio.gather(*(self._ended_and_gone(name, grace_s=grace_s) for name in names)))

    async def _ended_and_gone(self, name: str, *, grace_s: int) -> bool:
        """Delete a pod and return whether it is known to hold nothing."""
        path = f"{self._own}/pods/{name}"
        try:
            await to_the_end(self._api.delete(path, grace_s=grace_s))
            since = time.monotonic() + grace_s
            while time.monotonic() < since + GONE_WITHIN_S:
                pod = await self._api.ask("GET", path)
                # By now a node that answers knows of the deletion, and starts nothing of this pod.
                late = time.monotonic() > since + KILLED_WITHIN_S and not self._is_lost(node_of(pod))
                if endings.holds_nothing(pod) or (late and endings.nothing_runs(pod)):
                    # The cluster removes the rest of it.
                    self._going.add(name)
                    return True
                await self._pods.until_changed(LOOK_EVERY_S, name)
        except Refused as e:
            if e.status == NOT_FOUND:
                await self._until_killed(name)
                return True
            log.warning("Pod %s could not be removed: %s", name, e)
        except EngineSilent as e:
            log.warning("Pod %s could not be removed: %s", name, e)
        return False

    async def _until_killed(self, name: str) -> None:
        """Wait until the processes of a pod that the API has forgotten should have ended."""
        for _ in range(4):
            if name not in self._pods.found:
                break
            # The watch reports the node's last words shortly after the API has forgotten the pod.
            await self._pods.until_changed(LOOK_EVERY_S, name)
        else:
            self._note_forgotten(self._pods.found[name])
        if name in self._forgotten:
            await asyncio.sleep(self._forgotten[name][1] - time.monotonic())
            self._forgotten.pop(name, None)

    # -- who uses which GPU ---------------------------------------------------------------------------

    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        reader = self._readers.get(node_id or "")
        if reader is None:
            raise EngineSilent(NOT_MEASURED)
        if not pids:
            return {}
        sessions: dict[str, int] = {}
        for pod in list(self._pods.found.values()):
            named = marks.session_and_attempt(name_of(pod), self._installation.id)
            if named is not None:
                sessions[str(pod["metadata"]["uid"])] = named[0]
        return {pid: sessions[uid] for pid, uid in reader.pods_of(pids).items() if uid in sessions}

    def gpu_reader(self, node_id: str) -> NvmlReader:
        own = self._leases
        if own is None or self._loop is None or not self.capabilities.sees_processes:
            raise EngineSilent(NOT_MEASURED)
        self._readers[node_id] = LeasePodsReader(
            node_id,
            api=Api(self._configuration),
            path=f"{self._own}/pods",
            pods=lambda: own.pods_on(node_id),
            loop=self._loop,
        )
        return self._readers[node_id]
