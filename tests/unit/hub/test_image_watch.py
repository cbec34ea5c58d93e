"""Where images are is asked of the engine and told to the service; what administrators ask for is fetched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from fgpu_scheduler import Node
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import Engine, EngineSilent
from fgpuspawner.hub import image_pulls as module
from fgpuspawner.hub.image_pulls import ImageWatch
from fgpuspawner.images.availability import AVAILABLE, FRESH_S, WANTED, Availability, Where
from fgpuspawner.images.model import Catalogue, Image

TORCH = Image("torch", "PyTorch", "pytorch", "2", "3", "lab/torch:1")


class Engines(Engine):
    """An engine that knows where images are, and nothing else."""

    def __init__(self) -> None:
        self.where = {"a": Where.HERE, "b": Where.FETCHABLE}
        self.fetched: list[tuple[str, str]] = []
        self.asked = 0

    async def availability(self, image: Image, node_id: str) -> Availability:
        self.asked += 1
        if node_id not in self.where:
            raise EngineSilent("it does not answer")
        return Availability(self.where[node_id])

    async def fetch_image(self, image: Image, node_id: str, session_id: int, *, ahead: bool = False) -> None:
        if self.where.get(node_id) is not Where.HERE:
            self.fetched.append((image.slug, node_id))
            self.where[node_id] = Where.HERE


class Lab:
    def __init__(self, data: Path, background: Background) -> None:
        # Its sessions are not asked for here.
        self.engine = type("Asked", (Engines,), dict.fromkeys(Engine.__abstractmethods__))()
        self.data = data
        self.images: tuple[Image, ...] = (TORCH,)
        nodes = tuple(Node(name, "default", 8000, 16384, ()) for name in "abc")
        self.watch = ImageWatch(
            self.engine, lambda: Catalogue(self.images), lambda: nodes, background, data=data
        )

    async def look(self) -> dict[str, Availability]:
        await self.watch.look()
        await asyncio.sleep(0)
        return dict(AVAILABLE.read(self.data).fresh(time.time()).images["torch"])


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    WANTED.write(tmp_path, {"torch": 900})
    background = Background(logging.getLogger("fgpu"))
    yield Lab(tmp_path, background)
    await background.close()


async def test_availability_of_each_node_is_published_and_silent_ones_are_unknown(lab: Lab) -> None:
    assert await lab.look() == {
        "a": Availability(Where.HERE),
        "b": Availability(Where.FETCHABLE),
        "c": Availability(Where.UNKNOWN, "it does not answer"),
    }
    # What an earlier Hub was asked for is not begun again.
    assert lab.engine.fetched == []
    told = AVAILABLE.read(lab.data)
    assert told.fresh(told.at_s + FRESH_S + 1).images == {}


async def test_requested_image_is_pulled_once_to_nodes_without_it(lab: Lab) -> None:
    # Asked for before the Hub's first look.
    WANTED.write(lab.data, {"torch": 1001, "unknown": 1001})
    await lab.look()
    assert (await lab.look())["b"] == Availability(Where.HERE)
    assert lab.engine.fetched == [("torch", "b"), ("torch", "c")]


async def test_engines_are_asked_rarely_unless_an_image_is_new_or_being_pulled(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        await lab.look()
    assert lab.engine.asked == 3
    lab.images += (replace(TORCH, slug="new"),)
    lab.engine.where["a"] = Where.COMING
    await lab.look()
    lab.engine.where["a"] = Where.UNKNOWN
    # What is not known takes no place in the file.
    assert "a" not in await lab.look()
    await lab.look()
    assert lab.engine.asked == 3 + 6 + 6
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.0)
    await lab.look()
    assert lab.engine.asked == 21
