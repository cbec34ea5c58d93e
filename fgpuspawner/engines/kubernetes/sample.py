"""A sample of a session's pod, made as the configuration says, and the safeguards that such pods have."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fgpu_scheduler import Device, Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.base import Held, LaunchSpec, Safeguard
from fgpuspawner.engines.kubernetes.dialects.base import TOLERATING, Dialect, Manifest, name_of
from fgpuspawner.engines.kubernetes.files import pod_files
from fgpuspawner.engines.kubernetes.pods import PodOptions, session_objects, tolerations
from fgpuspawner.images.model import Image
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.limits import Limits

log = logging.getLogger("fgpu.kubernetes")
GPU = "GPU-00000000-0000-0000-0000-000000000000"
IMAGE = Image("sample", "Sample", "python", "3", "3", "fgpuspawner/sample:1", enabled=True)
SESSION = Session(1, Request("sample", "", "sample", "default", 500, 100, 128), SessionState.PREPARING, 0)

OptionsOf = Callable[[Session, Image], Awaitable[PodOptions]]
"""Returns the configured options of a session's pod. It calls an administrator's functions, so it may raise anything."""


async def sample_spec(options_of: OptionsOf) -> Manifest:
    """Return the spec of a session's pod without a node, which decides which nodes take the pod.

    If an administrator's function fails, it has only our tolerations, so tainted nodes take no session.
    """
    try:
        spec = (await options_of(SESSION, IMAGE)).manifest.get("spec") or {}
    except Exception as e:
        log.warning("Tainted nodes take no sessions, as a function of c.KubeSpawner failed: %s", e)
        return TOLERATING
    return {**spec, "tolerations": tolerations(spec)}


async def sample_pod(
    options_of: OptionsOf,
    *,
    node: str = "sample",
    dialect: Dialect | None = None,
    image: str = "",
    gpu: str = GPU,
) -> Manifest:
    """Return a small session's pod; with a dialect it has half a GPU, or a whole device if only these are given.

    Raises what ``options_of`` raises.
    """
    model, memory_mib = "Tesla T4", 2048
    if dialect is not None and dialect.whole_only:
        model, memory_mib = "Tesla T4 MIG 1g.5gb", 4096
    share = Share(gpu, 500, memory_mib, 50)
    own = replace(IMAGE, reference=image) if image else IMAGE
    options = await options_of(SESSION, own)
    spec = LaunchSpec(
        replace(SESSION, placement=Placement(node, (share,))),
        own,
        command=(),
        arguments=(),
        environment={},
        slice_environment={},
        prepared=Prepared("none", Limits(1, "none", ())),
        devices=(Device(gpu, node, 0, model, 4096, 1000),),
        folder=Path("/"),
        port=8888,
        options=options,
    )
    pod = session_objects(spec, options, pod_files(spec.prepared), installation="sample", node=node).pod
    if dialect is None:
        return pod
    return dialect.patch((share,), spec.devices, name=name_of(pod)).applied(pod)


# --- Safeguards ---

LINES: Mapping[Safeguard, str] = {
    Safeguard.UNPRIVILEGED: "c.KubeSpawner without privileged, added capabilities, uid 0 or the host's namespaces",
    Safeguard.FILTERED: "c.KubeSpawner without a seccompProfile of its own",
    Safeguard.LIMITS: "always so: pods have limits of CPU and memory",
    Safeguard.PROCESSES: "podPidsLimit in the configuration of the nodes' kubelets",
    Safeguard.PORTS: "a NetworkPolicy for sessions, and a network plugin that enforces it",
    Safeguard.COMMANDS: "an API server that refuses anonymous requests",
    Safeguard.REMAPPED: 'c.KubeSpawner.extra_pod_config = {"hostUsers": False}, on nodes that have user namespaces',
    Safeguard.READ_ONLY: 'c.KubeSpawner.container_security_context = {"readOnlyRootFilesystem": True}',
}
"""The setting that turns each safeguard on."""

HOSTS = ("hostNetwork", "hostPID", "hostIPC")


def safeguards_of(pod: Manifest, *, opaque: bool, closed: bool | None) -> dict[Safeguard, Held]:
    """Return the safeguards of a session's pod; ``closed``: the API refuses anonymous requests, None if unknown.

    ``opaque``: functions of the administrator make parts of the pod, and may make other ones for another session.
    """
    spec = pod["spec"]
    pods = spec.get("securityContext") or {}
    inherited = {name: pods[name] for name in ("runAsUser", "runAsNonRoot", "seccompProfile") if name in pods}
    containers = [{**inherited, **(c.get("securityContext") or {})} for c in spec["containers"]]
    server = spec["containers"][0]
    limits = (server.get("resources") or {}).get("limits") or {}
    met: dict[Safeguard, bool | None] = {
        Safeguard.UNPRIVILEGED: all(map(_is_unprivileged, containers)) and not any(map(spec.get, HOSTS)),
        Safeguard.FILTERED: _filters(containers),
        Safeguard.LIMITS: limits.keys() >= {"cpu", "memory"},
        Safeguard.READ_ONLY: bool(containers[0].get("readOnlyRootFilesystem")),
    }
    if opaque:
        met = {
            guard: found if guard is Safeguard.LIMITS or not found else None for guard, found in met.items()
        }
    met |= {
        # The API does not report kubelets' settings and the network plugin.
        Safeguard.PROCESSES: None,
        Safeguard.PORTS: None,
        Safeguard.COMMANDS: closed,
        # A cluster or a node without user namespaces may ignore the field.
        Safeguard.REMAPPED: None if spec.get("hostUsers") is False else False,
    }
    return {guard: Held(found, LINES[guard]) for guard, found in met.items()}


def _is_unprivileged(security: Mapping[str, Any]) -> bool:
    return (
        not security.get("privileged")
        and security.get("allowPrivilegeEscalation") is False
        and not (security.get("capabilities") or {}).get("add")
        and security.get("runAsUser") != 0
    )


def _filters(containers: list[dict[str, Any]]) -> bool | None:
    found = {(security.get("seccompProfile") or {}).get("type") for security in containers}
    if found == {"RuntimeDefault"}:
        return True
    # We do not know what an administrator's own profile refuses.
    return None if found <= {"RuntimeDefault", "Localhost"} else False
