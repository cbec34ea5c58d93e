"""The OAuth scopes that the Hub gives and the service asks for, each in one place."""

from __future__ import annotations

SERVICE = "fgpu"
"""The managed service's name at the Hub."""

ACCESS = f"access:services!service={SERVICE}"
QUEUE_READ = "custom:fgpu:queue:read"
KEEP = "custom:fgpu:sessions:keep"
IMAGES = "custom:fgpu:images"
ADMIN = "custom:fgpu:admin"

CUSTOM: dict[str, dict[str, object]] = {
    QUEUE_READ: {"description": "See the GPU queue, capacity and one's own sessions"},
    KEEP: {"description": "Keep one's own idle GPU sessions, and extend their time limits"},
    IMAGES: {"description": "Save one's own GPU sessions as private images, and manage these"},
    ADMIN: {
        "description": "See and manage everybody's GPU sessions and private images",
        "subscopes": [QUEUE_READ, KEEP, IMAGES],
    },
}
"""What the Hub is told of those that are ours: ``c.JupyterHub.custom_scopes``."""
