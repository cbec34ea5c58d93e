"""The spawner for sessions as pods: KubeSpawner's settings, and ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from socket import gethostname
from typing import Any

from kubernetes_asyncio.client import ApiClient, Configuration
from kubespawner import KubeSpawner
from traitlets import Bool, Enum, Integer, Unicode, default
from traitlets.config import Config

from fgpu_scheduler import BadSettings, FGPUError, Session
from fgpuspawner.engines import marks
from fgpuspawner.engines.base import EngineSilent, Held, Installation, Safeguard
from fgpuspawner.engines.kubernetes.api import Api, configuration, refuses_anonymous, run_blocking
from fgpuspawner.engines.kubernetes.dialects import DIALECTS
from fgpuspawner.engines.kubernetes.dialects.base import Dialect, Manifest, label, name_of
from fgpuspawner.engines.kubernetes.dialects.hami import Hami
from fgpuspawner.engines.kubernetes.dialects.lease import AUTO, INJECTIONS, Lease
from fgpuspawner.engines.kubernetes.engine import KubernetesEngine
from fgpuspawner.engines.kubernetes.pods import SERVER, PodOptions
from fgpuspawner.engines.kubernetes.sample import safeguards_of, sample_pod, sample_spec
from fgpuspawner.images.model import Image
from fgpuspawner.settings import FGPU, configured
from fgpuspawner.spawner.base import QueuedSpawner

DEFAULT_USER = 1000
KINDS = {kind.name: kind for kind in DIALECTS}

FUNCTIONS = ("uid", "container_security_context", "pod_security_context", "extra_containers")
"""Settings that decide a session's privileges and may be functions."""
SESSIONS = (
    ("labelSelector", f"{marks.INSTALLATION},{marks.SESSION}"),
    ("fieldSelector", "status.phase!=Succeeded,status.phase!=Failed"),
)


class KubernetesFGPUSpawner(QueuedSpawner, KubeSpawner):
    """Sessions as pods, each with its slice, without privileges and capabilities.

    Volumes, claims, tolerations, pull secrets and the rest are set as for KubeSpawner. The queue sets the pod's name,
    node and limits.
    """

    capabilities = KubernetesEngine.capabilities

    dialect = Enum(
        sorted(KINDS),
        "lease",
        help="""The cluster's way of sharing GPUs (docs/kubernetes.md, "Choosing a dialect").

        Example: ``c.KubernetesFGPUSpawner.dialect = "hami"``
        """,
    ).tag(config=True)

    lease_image = Unicode(
        help="""The image of the pods that lease GPUs with the dialect "lease".

        It needs a shell, and with ``measure_gpus`` Python 3.

        Empty: no GPU is leased, and those of ``c.FGPU.nodes`` must be declared or simulated.

        Example: ``c.KubernetesFGPUSpawner.lease_image = "registry.example.org/debian:12-slim"``
        """
    ).tag(config=True)

    runtime_class = Unicode(
        "nvidia",
        help="""The RuntimeClass of pods that use GPUs, with the dialect "lease".

        Empty: they need none, as where the GPU operator runs its NRI plugin.

        Example: ``c.KubernetesFGPUSpawner.runtime_class = "nvidia-cdi"``
        """,
    ).tag(config=True)

    gpu_injection = Enum(
        INJECTIONS,
        AUTO,
        help="""How a session's pod names its GPU, with the dialect "lease".

        ``"auto"``: as the pod that leases the GPU got it. ``"variable"``: by its UUID in NVIDIA_VISIBLE_DEVICES.
        ``"cdi"``: there by its name in the device plugin's CDI specification. ``"nri"``: by that name in an annotation,
        for the toolkit's NRI plugin. ``fgpu kube check --start`` says which one works.

        Example: ``c.KubernetesFGPUSpawner.gpu_injection = "nri"``
        """,
    ).tag(config=True)

    measure_gpus = Bool(
        False,
        help="""Whether sessions' use of GPUs is measured and watched, with the dialect "lease".

        The pods that lease GPUs then see the processes of their node (``hostPID``), which Pod Security "baseline" and
        "restricted" refuse, and ``lease_image`` needs Python 3, as session images have.

        Example: ``c.KubernetesFGPUSpawner.measure_gpus = True``
        """,
    ).tag(config=True)

    lease_priority_class = Unicode(
        help="""The PriorityClass of the pods that lease GPUs with the dialect "lease".

        Name one above that of all pods that ask for GPUs: the cluster ends lease pods for more important ones, and then
        gives away GPUs on which sessions run. Empty: the cluster's default.

        Example: ``c.KubernetesFGPUSpawner.lease_priority_class = "gpu-leases"``
        """
    ).tag(config=True)

    placeholder_priority_class = Unicode(
        help="""The PriorityClass of pods by which an autoscaler sees waiting requests, with the dialect "lease".

        Its value must be below that of lease pods and sessions, and for Cluster Autoscaler at least -10. Idle nodes are
        then also given back. Empty: an autoscaler sees no request.

        Example: ``c.KubernetesFGPUSpawner.placeholder_priority_class = "fgpu-placeholder"``
        """
    ).tag(config=True)

    most_placeholders = Integer(
        10,
        min=1,
        help="""The most waiting requests that an autoscaler sees at once; fractions of one GPU count as one.

        Example: ``c.KubernetesFGPUSpawner.most_placeholders = 4``
        """,
    ).tag(config=True)

    hami_memory_factor = Integer(
        1,
        min=1,
        help="""MiB in one unit of HAMi's resource "nvidia.com/gpumem": its ``memoryFactor``, with the dialect "hami".

        Example: ``c.KubernetesFGPUSpawner.hami_memory_factor = 10``
        """,
    ).tag(config=True)

    stop_timeout_s = Integer(
        10,
        min=1,
        help="""Seconds that a pod may take to end before it is killed.

        Example: ``c.KubernetesFGPUSpawner.stop_timeout_s = 5``
        """,
    ).tag(config=True)

    @default("cmd")
    def _own_server(self) -> list[str]:
        return [SERVER]

    @default("uid")
    def _not_root(self) -> int:
        return DEFAULT_USER

    @default("fs_gid")
    def _group_of_volumes(self) -> int:
        return DEFAULT_USER

    @classmethod
    def values_of(cls, config: Config) -> dict[str, Any]:
        """Return the value of each setting: the configured one, else the default."""
        own = configured(cls, config)
        return {name: own.get(name, trait.default()) for name, trait in cls.class_traits(config=True).items()}

    @classmethod
    def check_settings(cls, config: Config, settings: FGPU) -> None:
        """Refuse settings that contradict the dialect."""
        own, dialect = cls.values_of(config), cls.dialect_of(config, installation="")
        scheduler = str(own["scheduler_name"] or "")
        if scheduler.endswith("user-scheduler"):
            raise BadSettings(
                f"c.KubeSpawner.scheduler_name is {scheduler!r}, which is for servers without a place; set "
                'c.KubernetesFGPUSpawner.scheduler_name = ""'
            )
        leases = isinstance(dialect, Lease) and own["lease_image"]
        for setting in ("placeholder_priority_class", "measure_gpus"):
            if own[setting] and not leases:
                raise BadSettings(
                    f"c.KubernetesFGPUSpawner.{setting} is for pods that lease GPUs: it needs dialect "
                    '"lease" and a lease_image'
                )
        if not dialect.libfgpu_holds and settings.isolation != "none":
            raise BadSettings(
                f'c.FGPU.isolation is {settings.isolation!r}; with dialect {dialect.name!r} use "none": '
                f"{dialect.held_by} holds sessions to their slices"
            )
        if dialect.whole_only and not settings.gives_whole_gpus_only():
            raise BadSettings(
                f"c.FGPU.fgpu_step is less than a whole GPU; with dialect {dialect.name!r} sessions have whole "
                "devices: use c.FGPU.fgpu_per_gpu = 1 and c.FGPU.fgpu_step = 1"
            )

    @classmethod
    def safeguards(cls, settings: FGPU, config: Config) -> Mapping[Safeguard, Held]:
        """Return the safeguards of a session's pod with this configuration."""
        own = configured(cls, config)
        try:
            reached = cls.reached(config)
            pod = run_blocking(lambda: sample_pod(partial(cls.sample_options, config)))
        except Exception:
            # No cluster is configured here, or an administrator's function fails: then nothing is known.
            return {}
        try:
            closed: bool | None = run_blocking(lambda: refuses_anonymous(reached))
        except EngineSilent:
            closed = None
        return safeguards_of(pod, opaque=any(callable(own.get(name)) for name in FUNCTIONS), closed=closed)

    @classmethod
    def holds(cls, config: Config, settings: FGPU) -> Sequence[str]:
        """Return a line on disk limits, which are the cluster's."""
        return [
            "disk: what sessions may use of their nodes' disks is the cluster's: c.KubeSpawner.extra_resource_limits = "
            '{"ephemeral-storage": "20Gi"}; homes have the size of their claims'
        ]

    @classmethod
    def wrong_elsewhere(cls, config: Config, settings: FGPU, installation: str) -> Sequence[str]:
        """Return a line for each other installation with sessions in our namespace, as after a change of ``db_url``.

        No Hub ends these. Sessions in other namespaces may be another Hub's.
        """
        where = cls.where(config)

        async def sessions() -> list[tuple[str, str]]:
            async with Api(reached) as api:
                return await api.listed(
                    f"/api/v1/namespaces/{where}/pods",
                    SESSIONS,
                    keep=lambda pod: (name_of(pod), label(pod, marks.INSTALLATION) or ""),
                )

        try:
            reached = cls.reached(config)
            found = marks.of_others(run_blocking(sessions), installation)
        except FGPUError as e:
            return [f"whose sessions run in namespace {where} is not known: {e}"]
        return [
            f"Sessions of another installation, {other}, run in namespace {where} ({number}): they count as other pods, "
            "and no Hub ends them. If they are this Hub's, of another database: set c.FGPU.db_url back to continue them;"
            f" else end them: kubectl --namespace {where} delete pods --selector "
            f"{marks.INSTALLATION}={other},{marks.SESSION}"
            for other, number in found.items()
        ]

    @classmethod
    def reached(cls, config: Config) -> Configuration:
        """Return the connection to the cluster's API; raises BadSettings if there is none. Blocks."""
        values = cls.values_of(config)
        return configuration(**{n: values[f"k8s_api_{n}"] for n in ("host", "ssl_ca_cert", "verify_ssl")})

    @classmethod
    def where(cls, config: Config) -> str:
        """Return the namespace of sessions."""
        return str(configured(cls, config).get("namespace") or _hubs_namespace() or "default")

    @classmethod
    def dialect_of(cls, config: Config, *, installation: str) -> Dialect:
        """Return the configured dialect; raises BadSettings if there is no such dialect."""
        values = cls.values_of(config)
        kind = KINDS.get(name := str(values["dialect"]))
        if kind is None:
            use = " or ".join(map(repr, KINDS))
            raise BadSettings(f"c.KubernetesFGPUSpawner.dialect is {name!r}; use {use}")
        if kind is Hami:
            return Hami(memory_unit_mib=int(values["hami_memory_factor"]))
        if kind is not Lease:
            return kind()
        return Lease(
            installation,
            runtime_class=str(values["runtime_class"]),
            priority_class=str(values["lease_priority_class"]),
            injection=str(values["gpu_injection"]),
            measures=bool(values["measure_gpus"]),
        )

    @classmethod
    def make_engine(cls, installation: Installation) -> KubernetesEngine:
        config = installation.config
        values, namespace = cls.values_of(config), cls.where(config)
        return KubernetesEngine(
            installation,
            cls.reached(config),
            dialect=cls.dialect_of(config, installation=installation.id),
            lease_image=str(values["lease_image"]),
            placeholder_class=str(values["placeholder_priority_class"]),
            most_placeholders=int(values["most_placeholders"]),
            session_spec=run_blocking(lambda: sample_spec(partial(cls.sample_options, config))),
            namespace=namespace,
            hub_pod=gethostname() if namespace == _hubs_namespace() else "",
            stop_timeout_s=int(values["stop_timeout_s"]),
        )

    @classmethod
    async def sample_options(cls, config: Config, session: Session, image: Image) -> PodOptions:
        """Return the options of a pod without a user, a Hub and a cluster; an administrator's function may raise."""
        # KubeSpawner's own tests make a spawner this way.
        spawner = cls(config=config, _mock=True)
        spawner._session = session
        return await spawner.engine_options(image)

    async def engine_options(self, image: Image) -> PodOptions:
        """Return this session's pod options, with KubeSpawner's functions called and its templates filled in."""
        self.image = image.reference
        uid = self.uid(self) if callable(self.uid) else self.uid
        if inspect.isawaitable(uid):
            uid = await uid
        return PodOptions(
            manifest=_as_api(await self.get_pod_manifest()),
            claim=_as_api(self.get_pvc_manifest()) if self.storage_pvc_ensure else None,
            user=DEFAULT_USER if uid is None else int(uid),
            stop_timeout_s=self.stop_timeout_s,
        )


def _as_api(model: Any) -> Manifest:
    found: Manifest = ApiClient.sanitize_for_serialization(_NOT_OPENED, model)
    return found


_NOT_OPENED = object.__new__(ApiClient)
"""Turns models into JSON without a connection."""


def _hubs_namespace() -> str:
    """Return the namespace of the Hub's own pod; empty if the Hub runs outside the cluster."""
    try:
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
            return file.read().strip()
    except OSError:
        return ""
