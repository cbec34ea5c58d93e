"""Private images: the labels of a saved session, and the images that sessions are started from. Pure."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fgpu_scheduler import ImageState, PrivateImage
from fgpuspawner.images.entry import AMOUNT_FIELDS
from fgpuspawner.images.labels import HANDOVER, HANDOVER_VERSION, PREFIX, PRIVATE
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


NOT_ITS_OWN = tuple(PREFIX + name for name in ("slug", "name", "inputs"))
"""Labels that name the image that a session was started from, and not the saved one."""
READ_BY_THE_SERVER = ("JUPYTER_PATH=", "JUPYTER_CONFIG_PATH=", "JUPYTER_CONFIG_DIR=", "JUPYTERLAB_DIR=")
"""Variables that send a server to other folders for its configuration and extensions."""


def labels_of(image: PrivateImage, installation: str, made_at_s: int) -> dict[str, str]:
    """Return the labels that name an image's owner and origin."""
    return {
        PRIVATE: "1",
        f"{PRIVATE}.installation": installation,
        f"{PRIVATE}.owner": image.owner,
        f"{PRIVATE}.session": str(image.session_id),
        f"{PRIVATE}.from": image.made_from,
        f"{PRIVATE}.base": image.base,
        f"{PRIVATE}.made-at": instant(made_at_s),
    }


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of an image that hold for what is made of it, too."""
    return {name: value for name, value in labels.items() if name not in NOT_ITS_OWN}


def is_server_apart(config: Mapping[str, Any], *, home: str) -> bool:
    """Return whether root owns an image's server, by its configuration, so that the session's user cannot change it.

    Nor may the server read configuration that the session could write: in its working folder, or where the image says.
    """
    apart = (config.get("Labels") or {}).get(HANDOVER) == str(HANDOVER_VERSION)
    elsewhere = any(entry.startswith(READ_BY_THE_SERVER) for entry in config.get("Env") or ())
    at_home = posixpath.normpath(config.get("WorkingDir") or "/") in ("/", home)
    return apart and at_home and not elsewhere


def instant(at_s: int) -> str:
    """Return an instant as images have it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
