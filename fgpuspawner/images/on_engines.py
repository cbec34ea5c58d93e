"""Which images the engines of an installation have, for the command ``fgpu images``. Blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from docker.errors import DockerException, ImageNotFound, NotFound

from fgpuspawner.containers import GONE
from fgpuspawner.images.labels import PRIVATE, SLUG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from traitlets.config import Config

    from fgpuspawner.engines import Engine, Engines
    from fgpuspawner.images.live import Images
    from fgpuspawner.settings import FGPU


@dataclass(frozen=True, slots=True)
class Found:
    """An image on an engine: its id, the names and digests by which it is known there, and its labels."""

    image_id: str
    references: tuple[str, ...]
    digests: tuple[str, ...]
    labels: Mapping[str, str]


@contextmanager
def engines_of(
    spawner_class: Any, config: Config, settings: FGPU, images: Images, installation: str
) -> Iterator[Engines | None]:
    """Connect to the engines, as the Hub does; None where sessions are no containers.

    Raises:
        BadSettings: this machine's own engine does not answer.
    """
    if not spawner_class.containers:
        yield None
        return
    engines: Engines = spawner_class.make_launcher(
        config=config, settings=settings, images=images, installation=installation
    )
    try:
        yield engines
    finally:
        for engine in engines.engines:
            engine.close()


def name_of(engine: Engine) -> str:
    """Return the engine's name for administrators: its nodes'."""
    return ", ".join(engine.address.node_ids)


def found_on(engine: Engine, reference: str) -> Found | None:
    """Return what an engine has under a reference; None where it has nothing, or does not answer."""
    if not engine.answers:
        return None
    try:
        found = engine.containers.client.inspect_image(reference)  # type: ignore[no-untyped-call]
    except (ImageNotFound, NotFound):
        return None
    except (DockerException, *GONE):
        return None
    return _found(found, (found.get("Config") or {}).get("Labels"))


def labelled_on(engine: Engine) -> Sequence[Found]:
    """Return the images on an engine whose labels propose an entry, by their names; none where it does not answer."""
    if not engine.answers:
        return ()
    try:
        listed = engine.containers.client.images(filters={"label": SLUG})
    except (DockerException, *GONE):
        return ()
    found = [_found(one, one.get("Labels")) for one in listed]
    return sorted((f for f in found if f.references and PRIVATE not in f.labels), key=lambda f: f.references)


def _found(one: Mapping[str, Any], labels: Mapping[str, str] | None) -> Found:
    tags = [tag for tag in one.get("RepoTags") or () if tag != "<none>:<none>"]
    digests = [digest for digest in one.get("RepoDigests") or () if not digest.startswith("<none>")]
    return Found(str(one["Id"]), tuple(sorted(tags)), tuple(sorted(digests)), dict(labels or {}))
