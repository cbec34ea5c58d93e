"""Installs frameworks for local sessions in the background, one after another. A restart of the service forgets it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fgpu_scheduler import memory_words
from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.frameworks import (
    FRAMEWORKS,
    INSTALLING,
    CannotInstall,
    LocalFramework,
    WheelFile,
    find_wheels,
    install,
)
from fgpuspawner.service.objects import Installing

log = logging.getLogger("fgpu.images")
FOLDER = "environments"
Add = Callable[[Mapping[str, object]], Awaitable[None]]


@dataclass
class FrameworkInstaller:
    """What was found in the package index, and what is being installed, in words by slug."""

    wheels: dict[str, Sequence[WheelFile]] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)
    doing: dict[str, str] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def progress(self, offered: Collection[str]) -> list[Installing]:
        """Return how far each framework is, for a user who is offered the images with these slugs."""
        found = []
        for one in FRAMEWORKS:
            if one.slug in self.doing:
                found.append(Installing(name=one.name, state="installing", text=self.doing[one.slug]))
            elif one.slug in self.troubles:
                # Not why: that may name the administrator's package index.
                found.append(Installing(name=one.name, state="failed", text="not installed"))
            elif one.slug in offered:
                found.append(Installing(name=one.name, state="ready", text="ready"))
        return found

    async def look(self) -> None:
        """Ask the package index what there is for this Python, and how large it is."""

        async def ask(one: LocalFramework) -> None:
            self.troubles.pop(one.slug, None)
            try:
                self.wheels[one.slug] = await asyncio.to_thread(find_wheels, one)
            except CannotInstall as e:
                self.troubles[one.slug] = str(e)

        await asyncio.gather(*map(ask, FRAMEWORKS))

    def size(self, slug: str) -> str:
        """Return how much is fetched for a framework, in words."""
        return memory_words(-(-sum(wheel.size for wheel in self.wheels[slug]) // (1 << 20)))

    async def install(self, slug: str, data: Path, add: Add) -> None:
        """Install a framework, and add its image with ``add``. Why that failed is in ``troubles``."""
        wanted = next(one for one in FRAMEWORKS if one.slug == slug)
        self.troubles.pop(slug, None)
        self._tell(wanted, data, "waits until another one is installed")
        try:
            async with self._turn:
                loop, folder = asyncio.get_running_loop(), data / FOLDER / slug

                def tell(percent: int) -> None:
                    words = f"installing, {percent} %"
                    if self.doing.get(slug) != words:
                        loop.call_soon_threadsafe(self._tell, wanted, data, words)

                tell(0)
                await asyncio.to_thread(install, self.wheels[slug], folder, tell=tell)
            await add(wanted.entry(folder))
        except (CannotInstall, CatalogueError) as e:
            log.warning("%s is not installed: %s", wanted.name, e)
            self.troubles[slug] = str(e)
        finally:
            self._tell(wanted, data, "")

    def _tell(self, wanted: LocalFramework, data: Path, words: str) -> None:
        if words:
            self.doing[wanted.slug] = words
        else:
            self.doing.pop(wanted.slug, None)
        names = {one.slug: one.name for one in FRAMEWORKS}
        INSTALLING.write(data, {names[slug]: said for slug, said in self.doing.items()})
