"""Records what a session has installed, from its engine's view.

Nothing is run in the session, because its programs could lie.
"""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Mapping
from typing import Any

from docker.errors import DockerException, NotFound

from fgpuspawner.engines.docker.errors import GONE
from fgpuspawner.engines.docker.images.changed_files import changed_files, read_file
from fgpuspawner.images.recipe import (
    DPKG,
    MOST_BYTES,
    Base,
    Changes,
    not_written,
    packages_changed,
    read_changes,
    written,
)


def base_of(image: Mapping[str, Any], reference: str) -> Base:
    digests = image.get("RepoDigests") or []
    user = str((image.get("Config") or {}).get("User") or "root")
    return Base(digests[0] if digests else reference, str(image["Id"]), user, bool(digests))


def record(client: Any, container: str, *, helper: str) -> Changes:
    """Return what a container's session has installed since its start. Blocks.

    ``helper`` names a container that is made for this if necessary, and removed.

    Raises:
        DockerException: the engine does not answer.
        ValueError: there is too much to record.
    """
    changed = changed_files(client, container)
    apt: tuple[dict[str, str], list[str]] = ({}, [])
    if DPKG in changed:
        apt = _apt(client, container, helper)
    return read_changes(changed, *apt)


def _apt(client: Any, container: str, helper: str) -> tuple[dict[str, str], list[str]]:
    image = client.inspect_container(container)["Image"]
    # A killed Hub may have left it.
    with contextlib.suppress(NotFound):
        client.remove_container(helper, force=True, v=True)
    # Never started: only its files are read.
    base = client.create_container(image, ["true"], network_disabled=True, name=helper)["Id"]
    try:
        before, after = (read_file(client, one, DPKG, MOST_BYTES) for one in (base, container))
        return packages_changed(before, after)
    finally:
        client.remove_container(base, force=True, v=True)


def recorded(
    client: Any, container: str, base: Base, *, name: str, helper: str, before: str | None = None
) -> str:
    """Return the Dockerfile of a session's changes, or one that says why there is none; see `record`. Blocks."""
    try:
        return written(record(client, container, helper=helper), base, name=name, before=before)
    except (DockerException, ValueError, tarfile.TarError, OSError, *GONE) as e:
        return not_written(e, base, name=name, before=before)
