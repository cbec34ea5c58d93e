"""Private images as images that sessions are started from. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fgpu_scheduler import ImageState, PrivateImage
from fgpuspawner.images.entry import AMOUNT_FIELDS
from fgpuspawner.images.model import Catalogue, Image

FACTS = (
    *("slug", "name", "framework", "version", "python", "icon", "cuda"),
    *AMOUNT_FIELDS,
    *("kernels", "gpu_architectures", "users", "groups"),
)
"""What is kept of an image with those that are made of it."""


def facts_of(image: Image) -> str:
    """Return, as JSON, what is kept of an image with those that are made of it: should it leave the catalogue."""
    return json.dumps({name: getattr(image, name) for name in FACTS})


def private_entries(rows: Sequence[PrivateImage], catalogue: Catalogue) -> tuple[Image, ...]:
    """Return the images that are ready, each with what the catalogue says of the image under it now."""
    return tuple(_entry(row, catalogue) for row in rows if row.state is ImageState.READY)


def _entry(row: PrivateImage, catalogue: Catalogue) -> Image:
    base = catalogue.entry(row.base) or _as_it_was(row)
    return replace(
        base,
        slug=row.name,
        name=row.name,
        reference=row.reference,
        digest=row.image_id or "",
        description=f"Saved from session {row.session_id}, which ran {base.name}",
        default=False,
        enabled=True,
        hidden=False,
        users=row.shared_users if row.server_kept else (),
        groups=row.shared_groups if row.server_kept else (),
        accepted_by=row.accepted_by,
        declined_by=row.declined_by,
        owners_alone=row.owners_alone,
        # Once the image below is disabled, users cannot become root in this one either.
        sudo=base.sudo and base.enabled,
        under=base,
        owner=row.owner,
        node_id=row.node_id,
    )


def _as_it_was(row: PrivateImage) -> Image:
    """Return an image that has left the catalogue as it was there. The same users may use it."""
    facts: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(row.facts).items()
        if name in FACTS
    }
    usual = {"name": row.base, "framework": "", "version": "", "python": ""}
    return Image(**{**usual, **facts, "slug": row.base, "reference": ""})
