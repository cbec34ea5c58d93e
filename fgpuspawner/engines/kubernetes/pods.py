"""A session's pod: the session's own values override those set for KubeSpawner, which override our defaults. Pure."""

from __future__ import annotations

import copy
import fnmatch
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fgpuspawner.engines import marks
from fgpuspawner.engines.base import LaunchSpec, place_of
from fgpuspawner.engines.kubernetes.dialects.base import (
    CONTAINER,
    NO_PRIVILEGES,
    NO_ROOT,
    TOLERATIONS,
    Manifest,
    only_on,
)
from fgpuspawner.engines.kubernetes.files import READ, WRITTEN, PodFiles
from fgpuspawner.engines.kubernetes.placeholders import KEEPS
from fgpuspawner.isolation.sealing import KNOBS, is_knob, sealed_environment
from fgpuspawner.settings.folders import SharedFolder

SERVER = "jupyterhub-singleuser"
SHARED_MEMORY = "/dev/shm"
HIDDEN = ("LD_PRELOAD", "LD_AUDIT", "CUDA_DISABLE_CONTROL", "FGPU_SIMULATED_MACHINE")
"""A pod cannot unset a variable of its image. An empty value of these has the same effect."""
PUBLIC = ("PATH", "LD_*", "PYTHON*", "LANG", "LC_*", "HOME", "MALLOC_*")
SUDO_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID")
"""Those that `sudo` and `apt-get` need."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """The options of one session's pod, set by ``c.KubeSpawner`` and ``c.KubernetesFGPUSpawner``.

    ``manifest`` is KubeSpawner's pod and ``claim`` the volume claim that must exist before it, both as in the API.
    """

    manifest: Manifest = field(default_factory=dict)
    claim: Manifest | None = None
    user: int = 1000
    stop_timeout_s: int = 10


@dataclass(frozen=True, slots=True)
class SessionObjects:
    """The objects of a session: its pod, and the secret with its token and other private variables."""

    pod: dict[str, Any]
    secret: dict[str, Any] = field(repr=False)


def session_objects(
    spec: LaunchSpec, options: PodOptions, session_files: PodFiles, *, installation: str, node: str
) -> SessionObjects:
    """Return the pod of a session on a node, and its secret."""
    session = spec.session
    name = marks.name_of(installation, session.id, session.attempt)
    labels = {
        marks.INSTALLATION: installation,
        marks.SESSION: str(session.id),
        marks.ATTEMPT: str(session.attempt),
    }
    # Names of users are not valid as labels.
    annotations = {
        marks.NODE: node,
        "fgpu.user": session.request.user,
        "fgpu.server": session.request.server_name,
        "fgpu.image": session.request.image,
    }
    pod: dict[str, Any] = copy.deepcopy(dict(options.manifest))
    given = dict(pod.get("spec") or {})
    public, secret, references = _environment(spec)
    container = _container(given, spec, options, session_files)
    container["env"] = [
        *({"name": key, "value": value} for key, value in sorted(public.items())),
        *references,
    ]
    container["envFrom"] = [*(container.get("envFrom") or ()), {"secretRef": {"name": name}}]
    ours: dict[str, Any] = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": options.stop_timeout_s,
        "containers": [container, *(given.get("containers") or [{}])[1:]],
        "volumes": [
            *(volume for volume in given.get("volumes") or () if volume.get("name") not in (READ, WRITTEN)),
            *session_files.volumes,
        ],
        "affinity": only_on(node, given.get("affinity") or {}),
        "tolerations": tolerations(given),
    }
    _share_memory(container, ours, spec.shared_memory_mib)
    _share_folders(container, ours, spec.shared)
    given.setdefault("automountServiceAccountToken", False)
    found = pod.get("metadata") or {}
    return SessionObjects(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {**(found.get("labels") or {}), **labels},
                "annotations": {
                    **KEEPS,
                    **(found.get("annotations") or {}),
                    **annotations,
                    **session_files.annotations,
                },
            },
            "spec": {**given, **ours},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": labels},
            "type": "Opaque",
            "stringData": secret,
        },
    )


def tolerations(spec: Manifest) -> list[dict[str, Any]]:
    """Return a pod's own tolerations with ours added; ours replace its own of the same key."""
    ours = {one["key"] for one in TOLERATIONS}
    own = [dict(one) for one in spec.get("tolerations") or () if one.get("key") not in ours]
    return [*own, *(dict(one) for one in TOLERATIONS)]


def _environment(spec: LaunchSpec) -> tuple[dict[str, str], dict[str, str], list[dict[str, Any]]]:
    """Return the public variables, the secret ones, and the administrator's references to other objects."""
    given: dict[str, Any] = dict(spec.environment)
    references = [
        {"name": name, **value}
        for name, value in sorted(given.items())
        if isinstance(value, Mapping) and not is_knob(name)
    ]
    plain = {name: value for name, value in given.items() if not isinstance(value, Mapping)}
    sealed = sealed_environment(plain, spec.slice_environment, spec.prepared)
    prepared = {*spec.slice_environment, *spec.prepared.environment, *spec.prepared.search_paths}
    found = {name: str(value) for name, value in sealed.items() if value is not None}
    # "$$(" keeps the cluster from expanding "$(NAME)".
    public = {
        name: value.replace("$(", "$$(")
        for name, value in found.items()
        if name in prepared or any(fnmatch.fnmatchcase(name, pattern) for pattern in (*PUBLIC, *KNOBS))
    }
    for name in HIDDEN:
        public.setdefault(name, "")
    if "NVIDIA_VISIBLE_DEVICES" not in public:
        # An image may ask for all GPUs, and NVIDIA's runtime would give them.
        public["NVIDIA_VISIBLE_DEVICES"] = "void"
    secret = {name: value for name, value in found.items() if name not in public}
    return public, secret, [r for r in references if r["name"] not in public]


def _share_memory(container: dict[str, Any], pod: dict[str, Any], size_mib: int) -> None:
    """Mount a ``/dev/shm`` of this size, unless it is 0 or something is mounted there; the default has 64 MiB."""
    if not size_mib or any(
        _lies_over(str(m.get("mountPath")), [SHARED_MEMORY]) for m in container["volumeMounts"]
    ):
        return
    container["volumeMounts"].append({"name": "fgpu-shm", "mountPath": SHARED_MEMORY})
    in_memory = {"medium": "Memory", "sizeLimit": f"{size_mib}Mi"}
    pod["volumes"].append({"name": "fgpu-shm", "emptyDir": in_memory})


def _share_folders(container: dict[str, Any], pod: dict[str, Any], folders: Sequence[SharedFolder]) -> None:
    """Mount shared folders, with one volume for each claim, which may be that of the homes."""
    volumes = {(v.get("persistentVolumeClaim") or {}).get("claimName"): v["name"] for v in pod["volumes"]}
    for folder in folders:
        if folder.claim not in volumes:
            volumes[folder.claim] = f"fgpu-folder-{len(volumes)}"
            read_only = all(other.read_only for other in folders if other.claim == folder.claim)
            claim = {"claimName": folder.claim, "readOnly": read_only}
            pod["volumes"].append({"name": volumes[folder.claim], "persistentVolumeClaim": claim})
        mount = {"name": volumes[folder.claim], "mountPath": place_of(folder), "readOnly": folder.read_only}
        container["volumeMounts"].append(mount | ({"subPath": folder.subpath} if folder.subpath else {}))


def _container(
    given: Mapping[str, Any], spec: LaunchSpec, options: PodOptions, session_files: PodFiles
) -> dict[str, Any]:
    container: dict[str, Any] = dict((given.get("containers") or [{}])[0])
    request = spec.session.request
    amounts = {"cpu": f"{request.cpu_milli}m", "memory": f"{request.memory_mib}Mi"}
    resources = container.get("resources") or {}
    container["name"] = CONTAINER
    container["image"] = spec.image.reference
    container["args"] = [*(spec.command or (SERVER,)), *spec.arguments]
    container["ports"] = [{"name": "notebook-port", "containerPort": spec.port}]
    container["resources"] = {
        "limits": {**(resources.get("limits") or {}), **amounts},
        "requests": {**(resources.get("requests") or {}), **amounts},
    }
    container["volumeMounts"] = [
        *(
            mount
            for mount in container.get("volumeMounts") or ()
            if not _lies_over(str(mount.get("mountPath", "")), session_files.targets)
        ),
        *session_files.mounts,
    ]
    own = {**NO_PRIVILEGES, **NO_ROOT, "privileged": False, "runAsUser": options.user}
    container["securityContext"] = {**own, **(container.get("securityContext") or {})}
    if spec.sudo:
        container["securityContext"] |= {
            "allowPrivilegeEscalation": True,
            "capabilities": {"drop": ["ALL"], "add": list(SUDO_CAPABILITIES)},
        }
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return container


def _lies_over(path: str, ours: Collection[str]) -> bool:
    path = posixpath.normpath("/" + path.strip("/"))
    return any(path == own or path.startswith(f"{own}/") for own in ours)
