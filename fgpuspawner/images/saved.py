"""Images that sessions are saved as, whatever engine saves them: their labels, and the owner of their server. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fgpu_scheduler import PrivateImage
from fgpuspawner.images.labels import HANDOVER, HANDOVER_VERSION, PREFIX, PRIVATE

NOT_ITS_OWN = tuple(PREFIX + name for name in ("slug", "name", "inputs"))
"""Labels of the image that a session was started from, which say of that one alone which it is."""
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
