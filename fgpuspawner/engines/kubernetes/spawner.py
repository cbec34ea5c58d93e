"""The settings of sessions as pods: those of KubeSpawner, and ours over them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kubernetes_asyncio.client import ApiClient, Configuration
from kubespawner import KubeSpawner
from traitlets import Enum, Integer, Unicode, default
from traitlets.config import Config

from fgpu_scheduler import BadSettings, Session
from fgpuspawner.engines.base import EngineSilent, Held, Installation, LaunchFailed, Safeguard
from fgpuspawner.engines.kubernetes import others, safeguards
from fgpuspawner.engines.kubernetes.api import Manifest, at_once, configuration, is_closed_to_strangers
from fgpuspawner.engines.kubernetes.dialects import DIALECTS, Dialect, Hami, Lease
from fgpuspawner.engines.kubernetes.dialects.base import TOLERATING
from fgpuspawner.engines.kubernetes.dialects.lease import AUTO, INJECTIONS
from fgpuspawner.engines.kubernetes.engine import KubernetesEngine
from fgpuspawner.engines.kubernetes.files_image import REFERENCE
from fgpuspawner.engines.kubernetes.pods import PodOptions
from fgpuspawner.engines.kubernetes.sample import sample_pod, sample_spec
from fgpuspawner.images.model import Image
from fgpuspawner.settings import FGPU, configured
from fgpuspawner.spawner.base import QueuedSpawner

SERVER = "jupyterhub-singleuser"
DEFAULT_USER = 1000
log = logging.getLogger("fgpu.kubernetes")
KINDS = {kind.name: kind for kind in DIALECTS}

FUNCTIONS = ("uid", "container_security_context", "pod_security_context", "extra_containers")
"""Settings that may be functions, and say what a session may do."""


class KubernetesFGPUSpawner(QueuedSpawner, KubeSpawner):
    """Sessions as pods, each with its slice, no new privileges and no capabilities.

    Volumes, claims, tolerations, pull secrets and the rest are set as for KubeSpawner. The pod's name, its node and its
    limits are ours.
    """

    capabilities = KubernetesEngine.capabilities

    files_image = Unicode(
        help="""The image that brings libfgpu and its tools into each session: ``fgpu kube image`` writes it.

        Example: ``c.KubernetesFGPUSpawner.files_image = "registry.example.org/fgpu/files:0.1"``
        """
    ).tag(config=True)

    files_pull_policy = Enum(
        ["IfNotPresent", "Always", "Never"],
        "IfNotPresent",
        help="""When nodes fetch ``files_image``. Example: ``c.KubernetesFGPUSpawner.files_pull_policy = "Never"``""",
    ).tag(config=True)

    dialect = Enum(
        sorted(KINDS),
        "lease",
        help="""The cluster's way of sharing GPUs (docs/kubernetes.md, "Choosing a dialect").

        Example: ``c.KubernetesFGPUSpawner.dialect = "hami"``
        """,
    ).tag(config=True)

    lease_image = Unicode(
        help="""The image of the pods that lease GPUs with the dialect "lease"; it needs a shell and nothing else.

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

    lease_priority_class = Unicode(
        help="""The PriorityClass of the pods that lease GPUs with the dialect "lease".

        Name one above that of all pods that ask for GPUs: the cluster ends lease pods for more important ones, and then
        gives away GPUs on which sessions run. Empty: the cluster's default.

        Example: ``c.KubernetesFGPUSpawner.lease_priority_class = "gpu-leases"``
        """
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
    def check_settings(cls, config: Config, settings: FGPU) -> None:
        """Refuse what does not go with the dialect."""
        own = configured(cls, config)
        scheduler = str(own.get("scheduler_name") or "")
        if scheduler.endswith("user-scheduler"):
            raise BadSettings(
                f"c.KubeSpawner.scheduler_name is {scheduler!r}, which is for servers without a place; set "
                'c.KubernetesFGPUSpawner.scheduler_name = ""'
            )
        dialect = cls.dialect_of(config, installation="")
        if not dialect.libfgpu_holds and settings.isolation != "none":
            raise BadSettings(
                f'c.FGPU.isolation is {settings.isolation!r}; with dialect {dialect.name!r} use "none": '
                f"{dialect.memory_held_by} holds sessions to their slices"
            )
        if dialect.whole_only and not settings.gives_whole_gpus_only():
            raise BadSettings(
                f"c.FGPU.fgpu_step is less than a whole GPU; with dialect {dialect.name!r} sessions have whole "
                "devices: use c.FGPU.fgpu_per_gpu = 1 and c.FGPU.fgpu_step = 1"
            )

    @classmethod
    def safeguards(cls, settings: FGPU, config: Config) -> Mapping[Safeguard, Held]:
        """Return what a session's pod sees to, as it would be made now."""
        own = configured(cls, config)
        try:
            reached = cls.reached(config)
            pod = at_once(lambda: sample_pod(partial(cls.sample_options, config)))
        except Exception:
            # No cluster is configured here, or a function of the administrator's fails: then nothing is known.
            return {}
        try:
            closed: bool | None = at_once(lambda: is_closed_to_strangers(reached))
        except EngineSilent:
            closed = None
        return safeguards.judge(pod, opaque=any(callable(own.get(name)) for name in FUNCTIONS), closed=closed)

    @classmethod
    def holds(cls, config: Config, settings: FGPU) -> Sequence[str]:
        """Return who holds sessions to limits of the disk."""
        return [
            "disk: what sessions may use of their nodes' disks is the cluster's: c.KubeSpawner.extra_resource_limits = "
            '{"ephemeral-storage": "20Gi"}; homes have the size of their claims'
        ]

    @classmethod
    def wrong_elsewhere(cls, config: Config, settings: FGPU, installation: str) -> Sequence[str]:
        """Return a line for each other installation with pods in our namespace. Other namespaces may be other Hubs'."""
        return others.in_namespace(lambda: cls.reached(config), cls.where(config), installation)

    @classmethod
    def reached(cls, config: Config) -> Configuration:
        """Return how the cluster's API is reached. Blocks.

        Raises:
            BadSettings: it is not known.
        """
        own, traits = configured(cls, config), cls.class_traits()
        names = ("host", "ssl_ca_cert", "verify_ssl")
        return configuration(**{n: own.get(f"k8s_api_{n}", traits[f"k8s_api_{n}"].default()) for n in names})

    @classmethod
    def where(cls, config: Config) -> str:
        """Return the namespace of sessions."""
        return str(configured(cls, config).get("namespace") or _namespace_here())

    @classmethod
    def dialect_of(cls, config: Config, *, installation: str) -> Dialect:
        """Return the dialect that is set.

        Raises:
            BadSettings: there is no such dialect.
        """
        own, traits = configured(cls, config), cls.class_traits()
        name = str(own.get("dialect", traits["dialect"].default()))
        kind = KINDS.get(name)
        if kind is None:
            raise BadSettings(
                f"c.KubernetesFGPUSpawner.dialect is {name!r}; use {' or '.join(map(repr, KINDS))}"
            )
        if kind is Hami:
            return Hami(memory_unit_mib=int(own.get("hami_memory_factor", 1)))
        if kind is not Lease:
            return kind()
        runtime, priority, injection = (
            str(own.get(trait, traits[trait].default()))
            for trait in ("runtime_class", "lease_priority_class", "gpu_injection")
        )
        return Lease(installation, runtime_class=runtime, priority_class=priority, injection=injection)

    @classmethod
    def make_engine(cls, installation: Installation) -> KubernetesEngine:
        """Return the engine, with what is needed to reach the cluster."""
        own = configured(cls, installation.config)
        dialect = cls.dialect_of(installation.config, installation=installation.id)
        return KubernetesEngine(
            installation,
            cls.reached(installation.config),
            dialect=dialect,
            lease_image=str(own.get("lease_image", "")),
            session_spec=at_once(lambda: cls._sample_spec(installation.config)),
            namespace=cls.where(installation.config),
            stop_timeout_s=int(own.get("stop_timeout_s", cls.stop_timeout_s.default_value)),
        )

    @classmethod
    async def _sample_spec(cls, config: Config) -> Manifest:
        try:
            return await sample_spec(partial(cls.sample_options, config))
        except Exception as e:
            log.warning(
                "Which nodes sessions' pods tolerate is not known, so tainted nodes take none: a function in the "
                "configuration of KubeSpawner failed: %s",
                e,
            )
            return TOLERATING

    @classmethod
    async def sample_options(cls, config: Config, session: Session, image: Image) -> PodOptions:
        """Return the options of a pod without a user, a Hub and a cluster that answers; callables can raise."""
        # As KubeSpawner's own tests make one.
        spawner = cls(config=config, _mock=True)
        spawner.files_image = spawner.files_image or REFERENCE
        spawner._session = session
        return await spawner.engine_options(image)

    async def engine_options(self, image: Image) -> PodOptions:
        """Return what is set for this session's pod, with its callables asked and its templates filled in."""
        if not self.files_image:
            raise LaunchFailed(
                "c.KubernetesFGPUSpawner.files_image is empty; ask an administrator to set it (docs/kubernetes.md)"
            )
        self.image = image.reference
        uid = self.uid(self) if callable(self.uid) else self.uid
        if inspect.isawaitable(uid):
            uid = await uid
        return PodOptions(
            manifest=_as_api(await self.get_pod_manifest()),
            claim=_as_api(self.get_pvc_manifest()) if self.storage_pvc_ensure else None,
            image=self.image,
            files_image=self.files_image,
            pull_policy=self.files_pull_policy,
            user=DEFAULT_USER if uid is None else int(uid),
            stop_timeout_s=self.stop_timeout_s,
        )


def _as_api(model: Any) -> Manifest:
    found: Manifest = ApiClient.sanitize_for_serialization(_NOT_OPENED, model)
    return found


_NOT_OPENED = object.__new__(ApiClient)
"""Turns models into JSON without a connection."""


def _namespace_here() -> str:
    """Return the namespace of the pod that the Hub runs in, else ``default``."""
    try:
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
            return file.read().strip()
    except OSError:
        return "default"
