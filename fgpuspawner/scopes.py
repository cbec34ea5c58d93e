"""The OAuth scopes that the Hub grants and the service checks."""

from __future__ import annotations

from collections.abc import Iterable

SERVICE = "fgpu"
"""The managed service's name at the Hub."""

SESSION_HEADER = "X-FGPU-Session"
"""Header of a request to end a server: the id of the session that is meant."""

ACCESS = f"access:services!service={SERVICE}"
QUEUE_READ = "custom:fgpu:queue:read"
KEEP = "custom:fgpu:sessions:keep"
IMAGES = "custom:fgpu:images"
ADMIN = "custom:fgpu:admin"
OF_GROUPS = "custom:fgpu:group:"
"""Prefix of the scopes of resource groups."""


def admin_of(group: str) -> str:
    """Return the scope of the administrators of one resource group, whatever its name."""
    return f"{OF_GROUPS}{group}:admin"


def custom(groups: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return the definitions of our scopes, for ``c.JupyterHub.custom_scopes``."""
    of_groups: dict[str, dict[str, object]] = {
        admin_of(group): {
            "description": f"See and manage the GPU sessions, queue, quotas and machines of resource group {group}",
            "subscopes": [QUEUE_READ, KEEP],
        }
        for group in groups
    }
    return {
        QUEUE_READ: {"description": "See the GPU queue, capacity and one's own sessions"},
        KEEP: {"description": "Keep, extend, resize, park and rename one's own GPU sessions"},
        IMAGES: {"description": "Save one's own GPU sessions as private images, and manage these"},
        **of_groups,
        ADMIN: {
            "description": "See and manage everybody's GPU sessions and private images",
            "subscopes": [QUEUE_READ, KEEP, IMAGES, *of_groups],
        },
    }
