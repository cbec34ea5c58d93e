"""An image kept to what the engines have of it now, so that it cannot change under its name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.entry import entry_of
from fgpuspawner.images.model import Image
from fgpuspawner.images.on_engines import Found
from fgpuspawner.images.saying import shown


def pinned(image: Image, found: Mapping[str, Found]) -> tuple[dict[str, Any], str]:
    """Return the entry that holds an image to what was found, by engine, and what is to be said of it.

    What came from a registry is pinned by the registry's digest, in the reference, so that an engine that does not
    have it can still pull the same. What was built there has none: it is pinned by its id.

    Raises:
        CatalogueError: no engine has it, or they have different ones.
    """
    if not found:
        raise CatalogueError(
            f"image {shown(image.slug)}: no engine has {image.reference}; pull or build it first"
        )
    name = image.reference.partition("@")[0]
    digests = {engine: _digest(name, one) for engine, one in found.items()}
    if all(digests.values()):
        which = {digest for digest in digests.values() if digest is not None}
        if len(which) == 1:
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


def _digest(name: str, found: Found) -> str | None:
    """Return the digest that a registry knows it by, of the repository of this name."""
    repository = _repository(name)
    for one in found.digests:
        of, _, digest = one.partition("@")
        if of == repository and digest.startswith("sha256:"):
            return digest
    return None


def _repository(name: str) -> str:
    """Return a reference without its tag, as engines list it: ``docker.io/library/`` is never said."""
    head, slash, last = name.rpartition("/")
    repository = head + slash + last.partition(":")[0]
    return repository.removeprefix("docker.io/").removeprefix("library/")
