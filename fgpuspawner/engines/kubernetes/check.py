"""`fgpu kube check`: whether a cluster has what a Hub needs, checked with the caller's own rights.

With ``--start`` it also starts one real lease and one real session's pod, and reports which GPUs they see:

1. Ask a lease pod that runs on the node, or a new one, which GPU it holds and how it got the GPU.
2. Start a pod with the labels, limits and RuntimeClass of a session, which names this GPU as sessions would.
3. If it sees other GPUs, try the other ways (`INJECTIONS`), to report which setting works.

These pods are removed. If this process is killed, they end after a few minutes. Nothing else is made or changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kubernetes_asyncio.client import Configuration

from fgpu_scheduler import FGPUError, format_milli
from fgpuspawner.concurrency.waiting import to_the_end
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes import endings, inventory
from fgpuspawner.engines.kubernetes.api import Api, Refused
from fgpuspawner.engines.kubernetes.dialects.base import (
    CONTAINER,
    UUID,
    VISIBLE,
    Dialect,
    GpuRecords,
    GpuUnknown,
    Manifest,
    name_of,
)
from fgpuspawner.engines.kubernetes.dialects.lease import (
    ASK,
    INJECTIONS,
    LEASE_LABEL,
    Lease,
    given_as,
    gpu_of,
)
from fgpuspawner.engines.kubernetes.inventory import pruned
from fgpuspawner.engines.kubernetes.lease_readers import LeasePodsReader
from fgpuspawner.engines.kubernetes.leases import MOST_BYTES, gpus_of
from fgpuspawner.engines.kubernetes.placeholders import placeholder_pod
from fgpuspawner.engines.kubernetes.rights import Right, rights_of
from fgpuspawner.engines.kubernetes.sample import SESSION, sample_pod, sample_spec
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.images.catalogue import load_catalogue
from fgpuspawner.settings import FGPU

NO_OWNER = inventory.PodOwner("", "")
"""No pod is a session of ours: all pods count."""
NO_CLASS = (
    '; NVIDIA\'s GPU operator makes it. Name yours in c.KubernetesFGPUSpawner.runtime_class, or set "" there if the '
    "operator runs its NRI plugin"
)
LABEL = "fgpu.check"
"""On the pods that are started, in place of the labels by which a Hub recognises its own."""
PATIENCE_S = 120
"""For one pod, including the pull of its image."""
LOOK_EVERY_S = 0.5
LIST_GPUS = "nvidia-smi --query-gpu=uuid --format=csv,noheader >/dev/termination-log 2>&1"
SHARES_SINCE = (1, 36)
"""From then on several claims may share a device (consumable capacity)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the check, in words; its ``grade`` is OK, WARN or FAIL."""

    grade: str
    words: str

    def __str__(self) -> str:
        return f"{self.grade}: {self.words}"


ok, warn, fail = (partial(Finding, grade) for grade in ("OK", "WARN", "FAIL"))


async def findings(
    kind: type[KubernetesFGPUSpawner],
    config: Any,
    settings: FGPU,
    reached: Configuration,
    *,
    start: bool = False,
) -> list[Finding]:
    """Return the findings in the order in which to mend them; with ``start`` also by starting pods.

    Raises:
        EngineSilent: the cluster does not answer.
    """
    async with Api(reached) as api:
        check = _Check(api, kind, config, settings)
        return [*await check.all(), *(await check.started() if start else [])]


class _Check:
    def __init__(self, api: Api, kind: type[KubernetesFGPUSpawner], config: Any, settings: FGPU) -> None:
        self._api = api
        self._sample_options = partial(kind.sample_options, config)
        self._settings = settings
        self._own = kind.values_of(config)
        self._namespace = kind.where(config)
        self._path = f"/api/v1/namespaces/{self._namespace}"
        self._dialect: Dialect = kind.dialect_of(config, installation="check")
        #: What the caller may not see of the cluster.
        self._lacking: set[str] = set()

    async def all(self) -> list[Finding]:
        version, rights = await self._version(), rights_of(self._dialect.name)
        may = [await self._right(right) for right in rights]
        return [version, *may, *await self._pods(), *await self._nodes(), self._homes()]

    async def _version(self) -> Finding:
        found = await self._api.version()
        words = f"Kubernetes {found[0]}.{found[1]} answers"
        if self._dialect.name == "dra" and found < SHARES_SINCE:
            return fail(f'{words}; dialect "dra" needs {SHARES_SINCE[0]}.{SHARES_SINCE[1]} or newer')
        return ok(words)

    async def _right(self, right: Right) -> Finding:
        where = "in the whole cluster" if right.everywhere else f"in namespace {self._namespace}"
        lacking = await right.lacking(self._api, self._namespace)
        if not lacking:
            return ok(f"right {right.resource} ({', '.join(right.verbs)}) {where}: {right.what_for}")
        mend = f"have an administrator apply what `fgpu kube manifests --namespace {self._namespace}` prints"
        words = f"the caller may not {', '.join(lacking)} {right.resource} {where} ({right.what_for})"
        if not right.else_:
            return fail(f"{words}; {mend}")
        self._lacking.add(right.resource)
        return warn(f"{words}; without that, {right.else_}. To change that, {mend}")

    async def _pods(self) -> list[Finding]:
        named = self._settings.nodes
        real = not named or any("simulated" not in (spec.get("gpus") or {}) for spec in named)
        try:
            pod = await sample_pod(self._sample_options, dialect=self._dialect if real else None)
        except FGPUError as e:
            return [fail(f"a session's pod cannot be made: {e}")]
        except Exception as e:
            # An administrator's function may need more than this sample session has.
            return [warn(f"a session's pod cannot be tried: {type(e).__name__}: {e}")]
        pods = {"a session's pod": pod}
        image, priority = str(self._own["lease_image"]), str(self._own["placeholder_priority_class"])
        if isinstance(self._dialect, Lease) and real and image:
            lease = self._dialect.lease_pod(name="fgpu-check", node="check", image=image)
            pods["a pod that leases a GPU"] = lease
            if priority:
                pods["a placeholder for an autoscaler"] = placeholder_pod(
                    SESSION, 1, installation="check", image=image, priority_class=priority, session_spec={}
                )
        found = [await self._accepted(what, pod) for what, pod in pods.items()]
        if isinstance(self._dialect, Lease) and real and not image:
            words = (
                "c.KubernetesFGPUSpawner.lease_image is empty: no GPU is leased; name an image with a shell"
            )
            found.append(fail(words))
        return found

    async def _accepted(self, what: str, pod: Manifest) -> Finding:
        try:
            await self._api.ask("POST", f"{self._path}/pods", query=[("dryRun", "All")], body=dict(pod))
        except Refused as e:
            return fail(f"{what} is refused: {e}{NO_CLASS if 'RuntimeClass' in str(e) else ''}")
        return ok(f"{what} is accepted")

    async def _nodes(self) -> list[Finding]:
        everywhere = "/api/v1/pods" if "pods" not in self._lacking else f"{self._path}/pods"
        try:
            nodes = {name_of(node): node for node in await self._listed_nodes()}
            usage = await self._api.listed(
                everywhere, keep=lambda pod: inventory.usage_of(pod, self._dialect, NO_OWNER)
            )
        except (GpuUnknown, Refused) as e:
            return [fail(f"nodes cannot be seen: {e}")]
        others, few = inventory.by_node(usage), ", ".join([*list(nodes)[:3], *["..."] * (len(nodes) > 3)])
        session = await sample_spec(self._sample_options)
        found = [
            fail(f"node {name} of c.FGPU.nodes is not in the cluster; it has: {few}")
            for name in self._settings.node_ids()
            if name not in nodes
        ]
        ours = [n for n, node in nodes.items() if inventory.is_ours(node, self._settings.node_ids())]
        if not ours:
            words = f"no node has the label {inventory.GROUP}; give it to those that sessions may use"
            found.append(
                fail(f"{words}: kubectl label node {next(iter(nodes), 'NAME')} {inventory.GROUP}=default")
            )
        return [*found, *(self._node(nodes[name], others.get(name, []), session) for name in ours)]

    async def _listed_nodes(self) -> list[Manifest]:
        if "nodes" not in self._lacking:
            return await self._api.listed("/api/v1/nodes", keep=pruned)
        if untold := inventory.untold(self._settings.nodes):
            raise GpuUnknown(untold)
        return [inventory.told_node(spec, ()) for spec in self._settings.nodes]

    def _node(self, node: Manifest, others: Sequence[inventory.PodUsage], session: Manifest) -> Finding:
        name = name_of(node)
        if "nodes" in self._lacking:
            return ok(f"node {name}: as c.FGPU.nodes describes it; whether it is there is not seen")
        try:
            machine = inventory.machine_of(node, others, self._dialect, GpuRecords(), session)
        except ValueError as e:
            return fail(f"node {name}: {e}")
        if machine is None:
            return warn(f"node {name} is not ready")
        words = f"node {name}: {format_milli(machine.cpu_milli)} CPU, {machine.memory_mib} MiB free"
        if machine.closed:
            return warn(
                f"{words}; it takes no sessions: it is cordoned, or c.KubeSpawner's "
                "tolerations, node_selector and node_affinity_required do not go with its taints and labels"
            )
        if machine.devices:
            return ok(f"{words}, {len(machine.devices)} GPUs ({self._dialect.name})")
        return ok(f"{words}; GPUs: {machine.trouble or 'none'}")

    def _homes(self) -> Finding:
        if self._own["storage_pvc_ensure"]:
            return ok("homes: volume claims of c.KubeSpawner")
        if self._own["volumes"]:
            return ok("homes: on volumes of c.KubeSpawner.volumes")
        return warn(
            "homes: none is kept: c.KubeSpawner.storage_pvc_ensure is False, and there are no volumes"
        )

    # -- started pods ---------------------------------------------------------------------------------

    async def started(self) -> list[Finding]:
        """Start a real lease and a real session's pod, and return which GPUs they see."""
        lease, images = str(self._own["lease_image"]), load_catalogue(self._settings.catalogue_path()).images
        image = next((one.reference for one in images if one.enabled and one.reference), "")
        try:
            session = await sample_spec(self._sample_options)
            nodes = await self._listed_nodes()
            node = next((name_of(node) for node in nodes if self._may_lease(node, session)), "")
            if not isinstance(self._dialect, Lease) or not (lease and image and node):
                what = 'dialect "lease", lease_image, an image of the catalogue, and a ready node with nvidia.com/gpu'
                return [warn(f"start: not tried: it needs {what}")]
            async with self._leased(self._dialect, node, lease) as pod:
                answer = await self._api.run(f"{self._path}/pods/{pod}", "lease", ASK, most_bytes=MOST_BYTES)
                text = answer.output.decode("utf-8", "replace")
                if answer.status != 0:
                    raise GpuUnknown(f"nvidia-smi fails in the lease pod {pod}: {_in_a_line(text)}")
                uuid, visible = gpu_of(pod, text).uuid, given_as(text)
                self._dialect.given_as[uuid] = visible
                held = f"start: the lease on node {node} holds {uuid} (NVIDIA_VISIBLE_DEVICES={visible!r})"
                measured = [await self._measures(pod, uuid)] if self._dialect.measures else []
                seen = await self._session_sees(node, image, uuid, self._dialect.way_of(uuid))
                return [ok(held), *measured, seen]
        except (GpuUnknown, Refused) as e:
            return [fail(f"start: no GPU can be leased: {e}")]

    async def _measures(self, lease: str, uuid: str) -> Finding:
        """Return whether NVML answers in a lease pod."""
        path = f"{self._path}/pods"
        pod = await self._api.ask("GET", f"{path}/{lease}")
        loop = asyncio.get_running_loop()
        reader = LeasePodsReader("", api=self._api, path=path, pods=lambda: {uuid: pod}, loop=loop)
        answer = (await reader.ask({"do": "uses", "uuids": [uuid], "since_us": {}}))["devices"][uuid]
        if "error" in answer:
            return fail(f"start: the use of {uuid} cannot be measured: {answer['error']}")
        return ok(
            f"start: the use of {uuid} can be measured; it has {len(answer['processes'])} processes now"
        )

    def _may_lease(self, node: Manifest, session: Manifest) -> bool:
        return (
            inventory.is_ours(node, self._settings.node_ids())
            and inventory.is_ready(node)
            and not inventory.is_closed(node, session)
            and gpus_of(node) > 0
        )

    async def _session_sees(self, node: str, image: str, uuid: str, first: str) -> Finding:
        """Return whether a session's pod sees its GPU, named in the ``first`` way, and if not, which other way works."""
        failed = list[str]()
        for way in dict.fromkeys((first, *INJECTIONS[1:])):
            dialect = Lease("check", runtime_class=str(self._own["runtime_class"]), injection=way)
            try:
                pod = await sample_pod(
                    self._sample_options, node=node, dialect=dialect, image=image, gpu=uuid
                )
                seen = await self._seen_by(_gpu_listing_pod(pod))
                if seen != {uuid}:
                    raise GpuUnknown(f"it sees {len(seen)} GPUs")
            except EngineSilent:
                raise
            except Exception as e:
                # Also if an administrator's function needs more than this sample session has.
                failed.append(f'with gpu_injection "{way}": {e}')
                continue
            words = f'start: a session\'s container sees {uuid} alone with gpu_injection "{way}"'
            if not failed:
                return ok(words)
            return fail(f'{words}; set c.KubernetesFGPUSpawner.gpu_injection = "{way}"; {"; ".join(failed)}')
        return fail(f"start: a session's container does not see its GPU: {'; '.join(failed)}")

    @asynccontextmanager
    async def _leased(self, dialect: Lease, node: str, image: str) -> AsyncIterator[str]:
        """Yield the name of a running lease pod on a node: one that is there, else one that is made for this."""
        query = (
            ("labelSelector", LEASE_LABEL),
            ("fieldSelector", f"spec.nodeName={node},status.phase=Running"),
        )
        there = await self._api.listed(f"{self._path}/pods", query, keep=name_of)
        if there:
            yield there[0]
            return
        pod = dialect.lease_pod(name=_new_name(), node=node, image=image)
        pod["metadata"]["labels"] = {LABEL: "lease"}
        pod["spec"]["activeDeadlineSeconds"] = 2 * len(INJECTIONS) * PATIENCE_S
        async with self._made(pod) as name:
            await self._until(name, lambda found: (found.get("status") or {}).get("phase") == "Running")
            yield name

    async def _seen_by(self, pod: Manifest) -> set[str]:
        """Return the UUIDs of the GPUs that the container of a pod sees; raises GpuUnknown if it sees none."""
        async with self._made(pod) as name:
            ended = _terminated(await self._until(name, lambda found: bool(_terminated(found))))
        said = str(ended.get("message") or "")
        # A node's error message may name the GPU, too.
        uuids = set() if ended.get("exitCode") else set(UUID.findall(said))
        if not uuids:
            raise GpuUnknown(_in_a_line(said) or "nvidia-smi says nothing")
        return uuids

    @asynccontextmanager
    async def _made(self, pod: Manifest) -> AsyncIterator[str]:
        """Make a pod, yield its name, and remove it."""
        try:
            await to_the_end(self._api.ask("POST", f"{self._path}/pods", body=dict(pod)))
            yield name_of(pod)
        finally:
            await to_the_end(self._removed(name_of(pod)))

    async def _removed(self, name: str) -> None:
        path, until = f"{self._path}/pods/{name}", time.monotonic() + PATIENCE_S
        with contextlib.suppress(Refused):
            await self._api.delete(path)
            while time.monotonic() < until:
                await self._api.ask("GET", path)
                await asyncio.sleep(LOOK_EVERY_S)

    async def _until(self, name: str, is_so: Callable[[Manifest], bool]) -> Manifest:
        words = f"it was not ready within {PATIENCE_S} s"
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            pod = await self._api.ask("GET", f"{self._path}/pods/{name}")
            if is_so(pod):
                return pod
            ended, trouble = endings.how_it_ended(pod), endings.why_not_up(pod)
            words = ended.message if ended else trouble.message if trouble else words
            if ended or (trouble and not trouble.patience_s):
                break
            await asyncio.sleep(LOOK_EVERY_S)
        raise GpuUnknown(f"the pod {name}: {words}")


def _gpu_listing_pod(session: Manifest) -> Manifest:
    """Return a session's pod that only lists its GPUs, without volumes, files and secret."""
    found, spec, server = session["metadata"], session["spec"], session["spec"]["containers"][0]
    labels = {key: value for key, value in found["labels"].items() if not key.startswith("fgpu.")}
    container = {
        "name": CONTAINER,
        "command": ["sh", "-c", LIST_GPUS],
        "env": [variable for variable in server["env"] if variable["name"] == VISIBLE],
        **{key: server[key] for key in ("image", "resources", "securityContext") if key in server},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**found, "name": _new_name(), "labels": {**labels, LABEL: "session"}},
        "spec": {
            **{key: value for key, value in spec.items() if key not in ("volumes", "initContainers")},
            "containers": [container],
            "activeDeadlineSeconds": 2 * PATIENCE_S,
        },
    }


def _new_name() -> str:
    return f"fgpu-check-{secrets.token_hex(3)}"


def _in_a_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _terminated(pod: Manifest) -> Mapping[str, Any]:
    """Return how the container of a pod ended; empty while it has not."""
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        return dict((one.get("state") or {}).get("terminated") or {})
    return {}
