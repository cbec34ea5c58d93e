"""The OAuth scopes that the Hub gives and the service asks for, each in one place, and which session is meant."""

from __future__ import annotations

from collections.abc import Iterable

SERVICE = "fgpu"
"""The managed service's name at the Hub."""

SESSION_HEADER = "X-FGPU-Session"
"""The session that a request to the Hub to end a server means, by its id."""

ACCESS = f"access:services!service={SERVICE}"
QUEUE_READ = "custom:fgpu:queue:read"
KEEP = "custom:fgpu:sessions:keep"
IMAGES = "custom:fgpu:images"
ADMIN = "custom:fgpu:admin"
OF_GROUPS = "custom:fgpu:group:"
"""How the scopes of resource groups begin."""


def admin_of(group: str) -> str:
    """Return the scope of who administers one resource group, whatever name the group has."""
    return f"{OF_GROUPS}{group}:admin"


def custom(groups: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return what the Hub is told of the scopes that are ours: ``c.JupyterHub.custom_scopes``."""
    of_groups: dict[str, dict[str, object]] = {
        admin_of(group): {
            "description": f"See and manage the GPU sessions, queue, quotas and machines of resource group {group}",
            "subscopes": [QUEUE_READ, KEEP],
        }
        for group in groups
    }
    return {
        QUEUE_READ: {"description": "See the GPU queue, capacity and one's own sessions"},
        KEEP: {"description": "Keep one's own idle GPU sessions, extend their time limits, and resize them"},
        IMAGES: {"description": "Save one's own GPU sessions as private images, and manage these"},
        **of_groups,
        ADMIN: {
            "description": "See and manage everybody's GPU sessions and private images",
            "subscopes": [QUEUE_READ, KEEP, IMAGES, *of_groups],
        },
    }
