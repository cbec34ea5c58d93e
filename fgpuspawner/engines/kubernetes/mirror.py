"""What the cluster has of one kind, kept here: listed once, and followed event by event from there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from fgpuspawner.concurrency.background import Failures
from fgpuspawner.engines.kubernetes.api import Api, Expired, Manifest, Refused

log = logging.getLogger("fgpu.kubernetes")

AGAIN_AFTER_S = 1.0
SLOWEST_AGAIN_S = 30.0


class Mirror:
    """The objects at a path of the API, by name, as they were last told of. In one event loop.

    ``changed`` is called with each object that is new, another, or gone (its last state, and False).
    """

    def __init__(
        self,
        api: Api,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        *,
        what: str,
        changed: Callable[[Manifest, bool], None] = lambda found, there: None,
    ) -> None:
        self._api = api
        self._path = path
        self._query = tuple(query)
        self._what = what
        self._changed = changed
        self._news = asyncio.Condition()
        self.found: dict[str, Manifest] = {}
        self.listed = False
        """Whether everything was listed at least once."""
        self.forbidden = False
        """Whether the Hub may not see these."""

    async def follow(self) -> None:
        """Go on for ever."""
        failures = Failures(log, f"The cluster's {self._what} cannot be followed now")
        pause_s = AGAIN_AFTER_S
        while True:
            try:
                version = await self._list()
                failures.worked()
                pause_s = AGAIN_AFTER_S
                while True:
                    again_at = time.monotonic() + AGAIN_AFTER_S
                    version = await self._watch(version)
                    # A proxy may end each of them at once.
                    await asyncio.sleep(again_at - time.monotonic())
            except Expired as e:
                log.debug("The cluster's %s are listed again: %s", self._what, e)
            except Exception as e:
                # Whatever it was: who is not followed is not heard of again.
                self.forbidden = isinstance(e, Refused) and e.status == 403
                failures.failed(e)
            await self._tell()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, SLOWEST_AGAIN_S if self.forbidden else 4 * AGAIN_AFTER_S)

    async def until_told(self, within_s: float) -> None:
        """Wait for the next change of anything, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._news:
                await self._news.wait()

    async def until_another(self, name: str, within_s: float) -> None:
        """Wait until this object is told to be another, or gone, at most so long."""
        was = version_of(self.found.get(name))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._news:
                await self._news.wait_for(lambda: version_of(self.found.get(name)) != was)

    async def _list(self) -> str:
        answer = await self._api.ask("GET", self._path, query=self._query)
        items: dict[str, Manifest] = {item["metadata"]["name"]: item for item in answer.get("items") or ()}
        before, self.found, self.listed, self.forbidden = self.found, items, True, False
        for name, gone in before.items():
            if name not in items:
                self._changed(gone, False)
        for name, item in items.items():
            if version_of(item) != version_of(before.get(name)):
                self._changed(item, True)
        await self._tell()
        return str(answer["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        """Take in what is told, until the API has had enough; return how far that came."""
        async for event in self._api.watch(self._path, self._query, version):
            item: dict[str, Any] = event["object"]
            version = str(item["metadata"]["resourceVersion"])
            if event["type"] == "BOOKMARK":
                continue
            there = event["type"] != "DELETED"
            name = item["metadata"]["name"]
            if there:
                self.found[name] = item
            else:
                self.found.pop(name, None)
            self._changed(item, there)
            await self._tell()
        return version

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


def version_of(item: Manifest | None) -> str | None:
    """Return the version of an object; None of none."""
    return None if item is None else str(item["metadata"].get("resourceVersion"))
