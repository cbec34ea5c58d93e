"""Asks the engine where the images are, tells the service, and fetches what administrators ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fgpu_scheduler import Node
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import Engine, EngineSilent
from fgpuspawner.images.availability import Availabilities, Availability, Where
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.meter.told import AVAILABLE, WANTED

LOOK_EVERY_S = 3.0
NO_SESSION = 0


class ImageWatch:
    """One for the Hub's life. ``available`` is the engine's last answer."""

    def __init__(
        self,
        engine: Engine,
        catalogue: Callable[[], Catalogue],
        nodes: Callable[[], Sequence[Node]],
        background: Background,
        *,
        data: Path,
    ) -> None:
        self._engine, self._catalogue, self._nodes = engine, catalogue, nodes
        self._background, self._data = background, data
        self._done = WANTED.read(data)
        self.available = Availabilities()

    def begin(self) -> None:
        """Ask again and again."""
        self._background.every(LOOK_EVERY_S, self.look, failed="Which images can start is not known now")

    async def look(self) -> None:
        """Begin to fetch what was asked for since the last look, then ask where each image is."""
        images, nodes = self._catalogue().images, [node.id for node in self._nodes()]
        wanted = await asyncio.to_thread(WANTED.read, self._data)
        for image in images:
            if wanted.get(image.slug) != self._done.get(image.slug):
                self._fetch(image)
        self._done = wanted
        now_s = time.time()
        answers = await asyncio.gather(*(self._at(image, node_id) for image in images for node_id in nodes))
        found = iter(answers)
        self.available = Availabilities(
            now_s, {i.slug: {node_id: next(found) for node_id in nodes} for i in images}
        )
        await asyncio.to_thread(AVAILABLE.write, self._data, self.available)

    async def _at(self, image: Image, node_id: str) -> Availability:
        try:
            return await self._engine.availability(image, node_id)
        except EngineSilent as e:
            return Availability(Where.UNKNOWN, str(e))

    def _fetch(self, image: Image) -> None:
        for node_id, one in self.available.images.get(image.slug, {}).items():
            if one.where is not Where.HERE:
                fetching = self._engine.fetch_image(image, node_id, NO_SESSION, ahead=True)
                self._background.run(fetching, failed=f"Image {image.slug} does not come to {node_id}")
