"""Asks the engine where each image is, writes that for the service, and pulls what administrators ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fgpu_scheduler import Node
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import Engine, EngineSilent
from fgpuspawner.images.availability import (
    AVAILABLE,
    NOTHING_KNOWN,
    WANTED,
    Availabilities,
    Availability,
    Where,
)
from fgpuspawner.images.model import Catalogue, Image

LOOK_EVERY_S = 3.0
ASK_EVERY_S = 15.0
"""Interval while nothing is pulled and no image or node is new."""
NO_SESSION = 0


class ImageWatch:
    """Polls the availability of images; ``available`` is the last answer. One for the Hub."""

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
        self._seen: object = None
        self.available = NOTHING_KNOWN

    def begin(self) -> None:
        self._background.every(LOOK_EVERY_S, self.look, failed="Which images can start is not known now")

    async def look(self) -> None:
        """Start the pulls that were asked for since the last round, then ask where each image is, if due."""
        images, nodes = self._catalogue().images, [node.id for node in self._nodes()]
        wanted = await asyncio.to_thread(WANTED.read, self._data)
        for image in images:
            if wanted.get(image.slug) != self._done.get(image.slug):
                for node_id in nodes:
                    fetching = self._engine.fetch_image(image, node_id, NO_SESSION, ahead=True)
                    self._background.run(fetching, failed=f"Image {image.slug} does not come to {node_id}")
        self._done = wanted
        now_s, now = time.time(), (images, nodes, wanted)
        is_young = abs(now_s - self.available.at_s) < ASK_EVERY_S
        if is_young and now == self._seen and not self.available.moving:
            return
        answers = await asyncio.gather(*(self._at(image, node_id) for image in images for node_id in nodes))
        found = iter(answers)
        known = {i.slug: {n: one for n in nodes if (one := next(found)) != Availability()} for i in images}
        self.available, self._seen = Availabilities(now_s, known), now
        await asyncio.to_thread(AVAILABLE.write, self._data, self.available)

    async def _at(self, image: Image, node_id: str) -> Availability:
        try:
            return await self._engine.availability(image, node_id)
        except EngineSilent as e:
            return Availability(Where.UNKNOWN, str(e))
