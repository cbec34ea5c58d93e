"""What sessions' pods are made with so that they do no harm, and what only the cluster's administrator knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fgpuspawner.engines.base import Held, Safeguard
from fgpuspawner.engines.kubernetes.api import Manifest

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
"""What makes it so."""

HOSTS = ("hostNetwork", "hostPID", "hostIPC")


def judge(pod: Manifest, *, opaque: bool, closed: bool | None) -> dict[Safeguard, Held]:
    """Return what a session's pod sees to; ``closed``: whether the API refuses anonymous requests.

    ``opaque``: functions of the administrator's make parts of it, and may make them otherwise for another session.
    """
    spec = pod["spec"]
    containers = [{**_inherited(spec), **(c.get("securityContext") or {})} for c in spec["containers"]]
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
        # Kubelets' own settings and the network's plugin are nothing that the API tells.
        Safeguard.PROCESSES: None,
        Safeguard.PORTS: None,
        Safeguard.COMMANDS: closed,
        # A cluster or a node that knows no user namespaces may pass over it.
        Safeguard.REMAPPED: None if spec.get("hostUsers") is False else False,
    }
    return {guard: Held(found, LINES[guard]) for guard, found in met.items()}


def _inherited(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that containers inherit from their pod."""
    own = spec.get("securityContext") or {}
    return {name: own[name] for name in ("runAsUser", "runAsNonRoot", "seccompProfile") if name in own}


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
    # What a profile of the administrator's own refuses is for them to know.
    return None if found <= {"RuntimeDefault", "Localhost"} else False
