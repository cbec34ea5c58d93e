"""What the commands of ``fgpu images`` share: the catalogue with its database, open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from traitlets.config import Config

from fgpu_scheduler import BadSettings, Node, Store, amounts_that_fit
from fgpuspawner.cli.command import who, writable
from fgpuspawner.cli.hub_config import checked_like_the_hub, load_config, quiet
from fgpuspawner.engines.base import ImageStore, Installation
from fgpuspawner.images.availability import AVAILABLE
from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.edits import Draft, Update, edit_catalogue
from fgpuspawner.images.entry import shown
from fgpuspawner.images.live import Images
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.images.needs import between_steps, never_held
from fgpuspawner.settings import FGPU


@dataclass(frozen=True)
class Opened:
    """An installation's catalogue and database, open."""

    path: str
    config: Config
    settings: FGPU
    store: Store
    images: Images
    nodes: tuple[Node, ...]

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue in force, without private images."""
        return self.images.listed.catalogue

    @contextlib.contextmanager
    def stores(self) -> Iterator[Sequence[ImageStore] | None]:
        """Connect to the engine, as the Hub does, and give its machines' images; None where it fetches none."""
        with quiet():
            _, app = checked_like_the_hub(self.config, self.path)
        if not app.spawner_class.capabilities.fetches_images:
            yield None
            return
        own = Installation(
            self.store.installation_id, self.settings, self.config, lambda: self.images.catalogue
        )
        with contextlib.closing(app.spawner_class.make_engine(own)) as engine:
            yield engine.image_stores()

    def edit(self, change: Callable[[Draft], Update]) -> None:
        """Change the catalogue."""
        if self.images.problem is not None:
            raise CatalogueError(self.images.problem)
        edit_catalogue(self.store, self.images.file, change, by=who(), amounts=self.amounts)

    @property
    def amounts(self) -> tuple[int, ...]:
        """The amounts of fGPU x 1000 that can be asked for."""
        return amounts_that_fit(self.nodes, self.settings.caps())

    def unfit(self, image: Image) -> str | None:
        """Return why no session of this image can start here; None: it may."""
        available = AVAILABLE.read(self.settings.data_path()).fresh(time.time())
        why = available.why_not(image.slug, self.nodes)
        blocked = None if why is None else f"image {shown(image.slug)}: it can't start: {why}"
        return (
            never_held(image, self.nodes, self.settings.caps())
            or between_steps(image, self.amounts)
            or blocked
        )

    def problems(self) -> list[str]:
        """Return what of the catalogue cannot be used, or has no effect."""
        found = [self.images.problem, *self.images.listed.problems]
        found += [self.unfit(image) for image in self.catalogue.images if image.enabled]
        return [problem for problem in found if problem is not None]


@contextlib.contextmanager
def opened(path: str) -> Iterator[Opened]:
    """Open what a configuration is of."""
    config = load_config(path)
    settings = FGPU.from_config(config).checked()
    with writable(settings) as store:
        with quiet():
            images = Images(settings.catalogue_path(), store, must_be_good=False)
            images.refresh()
        if images.trouble is not None:
            raise BadSettings(images.trouble)
        yield Opened(path, config, settings, store, images, store.snapshot(0).nodes)
