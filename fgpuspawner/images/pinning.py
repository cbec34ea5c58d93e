"""An image kept to what the engines have of it now, so that it cannot change under its name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.entry import entry_of, shown
from fgpuspawner.images.model import FoundImage, Image


def pinned(image: Image, found: Mapping[str, FoundImage]) -> tuple[dict[str, Any], str]:
    """Return the entry that pins an image to what was found, by engine, and a message about it.

    An image from a registry is pinned by the registry's digest, in the reference, so that an engine that does not
    have it can still pull the same. An image built there has no digest and is pinned by its id.
    """
    if not found:
        raise CatalogueError(
            f"image {shown(image.slug)}: no engine has {image.reference}; pull or build it first"
        )
    name = image.reference.partition("@")[0]
    which = {_digest(name, one) for one in found.values()}
    if len(which) == 1 and None not in which:
        reference = f"{name}@{which.pop()}"
        return entry_of(replace(image, reference=reference, digest="")), f"pinned to {reference}"
    ids = {one.image_id for one in found.values()}
    if len(ids) > 1:
        has = "; ".join(f"{engine}: {one.image_id}" for engine, one in found.items())
        raise CatalogueError(
            f"image {shown(image.slug)}: the engines have different images under {image.reference} ({has}); "
            "remove the wrong one"
        )
    (image_id,) = ids
    said = f"it came from no registry, so it is pinned by its id {image_id}; every engine must have that very image"
    return entry_of(replace(image, digest=image_id)), said


def _digest(name: str, found: FoundImage) -> str | None:
    """Return the digest that a registry knows it by, of the repository of this name."""
    head, slash, last = name.rpartition("/")
    # As engines list it: without a tag, and ``docker.io/library/`` is never said.
    repository = f"{head}{slash}{last.partition(':')[0]}".removeprefix("docker.io/").removeprefix("library/")
    known = (one.partition("@") for one in found.digests)
    return next(
        (digest for of, _, digest in known if of == repository and digest.startswith("sha256:")), None
    )
