"""The images of a daemon, for administrators' commands. Blocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fgpuspawner.engines.base import ImageStore
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.errors import FAILED
from fgpuspawner.images.labels import PRIVATE, SLUG
from fgpuspawner.images.model import FoundImage


def store_of(daemon: Daemon) -> ImageStore:
    """Return a daemon's images, under the names of its nodes."""
    return ImageStore(
        ", ".join(daemon.address.node_ids),
        functools.partial(find, daemon),
        functools.partial(labelled, daemon),
    )


def find(daemon: Daemon, reference: str) -> FoundImage | None:
    """Return a daemon's image of this reference; None if there is none, or it does not answer."""
    if not daemon.answers:
        return None
    try:
        found = daemon.client.inspect_image(reference)  # type: ignore[no-untyped-call]
    except FAILED:
        return None
    return _found(found, (found.get("Config") or {}).get("Labels"))


def labelled(daemon: Daemon) -> Sequence[FoundImage]:
    """Return the images with labels that propose a catalogue entry; none if the daemon does not answer."""
    if not daemon.answers:
        return ()
    try:
        listed = daemon.client.images(filters={"label": SLUG})
    except FAILED:
        return ()
    found = [_found(one, one.get("Labels")) for one in listed]
    return sorted((f for f in found if f.references and PRIVATE not in f.labels), key=lambda f: f.references)


def _found(one: Mapping[str, Any], labels: Mapping[str, str] | None) -> FoundImage:
    tags = [tag for tag in one.get("RepoTags") or () if tag != "<none>:<none>"]
    digests = [digest for digest in one.get("RepoDigests") or () if not digest.startswith("<none>")]
    return FoundImage(str(one["Id"]), tuple(sorted(tags)), tuple(sorted(digests)), dict(labels or {}))
