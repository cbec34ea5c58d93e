"""A local copy of the cluster's objects of one kind: listed once, then updated by a watch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fgpuspawner.concurrency.background import Failures
from fgpuspawner.engines.kubernetes.api import Api, Expired, Manifest, Refused
from fgpuspawner.engines.kubernetes.dialects.base import name_of

log = logging.getLogger("fgpu.kubernetes")
T = TypeVar("T")

AGAIN_AFTER_S = 1.0
SLOWEST_AGAIN_S = 30.0


class Mirror(Generic[T]):
    """The objects at a path of the API, by name, as they were last told of. In one event loop.

    ``keep`` returns what is kept of one, None where it does not count. ``changed`` is called with what is kept of each
    that is new, another, or gone (what it was last, and False). With ``everywhere`` they are of all namespaces, and
    known as "NAMESPACE/NAME".
    """

    def __init__(
        self,
        api: Api,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        *,
        what: str,
        keep: Callable[[Manifest], T | None],
        changed: Callable[[T, bool], None] = lambda found, there: None,
        everywhere: bool = False,
    ) -> None:
        self._api = api
        self._path = path
        self._query = tuple(query)
        self._what = what
        self._keep = keep
        self._changed = changed
        self._key = _whole_name if everywhere else name_of
        self._news = asyncio.Condition()
        self.found: dict[str, T] = {}
        self.listed = False
        """Whether everything was listed at least once."""
        self.forbidden = False
        """Whether the Hub may not see these."""
        self.trouble: str | None = None
        """Why it is not known now what there is."""

    async def follow(self) -> None:
        """Go on for ever."""
        failures = Failures(log, f"The cluster's {self._what} cannot be followed now")
        pause_s = AGAIN_AFTER_S
        while True:
            try:
                version = await self._list()
                failures.worked()
                pause_s, self.trouble = AGAIN_AFTER_S, None
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
                self.trouble = str(e) or type(e).__name__
                failures.failed(e)
            await self._tell()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, SLOWEST_AGAIN_S if self.forbidden else 4 * AGAIN_AFTER_S)

    async def until_told(self, within_s: float) -> None:
        """Wait for the next change of any object, for ``within_s`` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._news:
                await self._news.wait()

    async def until_another(self, name: str, within_s: float) -> None:
        """Wait until this object has changed or is gone, for ``within_s`` at most."""
        was = self.found.get(name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._news:
                await self._news.wait_for(lambda: self.found.get(name) != was)

    async def _list(self) -> str:
        items: dict[str, T] = {}
        version = ""
        async for page in self._api.pages(self._path, self._query):
            version = str(page["metadata"]["resourceVersion"])
            for item in page.get("items") or ():
                own = self._keep(item)
                if own is not None:
                    items[self._key(item)] = own
        before, self.found, self.listed, self.forbidden = self.found, items, True, False
        for name, gone in before.items():
            if name not in items:
                self._changed(gone, False)
        for name, new in items.items():
            if new != before.get(name):
                self._changed(new, True)
        await self._tell()
        return version

    async def _watch(self, version: str) -> str:
        """Apply the watch's events until the API closes it; return the last version seen."""
        async for event in self._api.watch(self._path, self._query, version):
            item: dict[str, Any] = event["object"]
            version = str(item["metadata"]["resourceVersion"])
            if event["type"] != "BOOKMARK":
                own = None if event["type"] == "DELETED" else self._keep(item)
                await self._take(self._key(item), own, item)
        return version

    async def _take(self, name: str, own: T | None, item: Manifest) -> None:
        before = self.found.get(name)
        if own is None:
            self.found.pop(name, None)
            # What it was at its very last, where that says more than what was seen of it.
            last = self._keep(item) or before
            if last is not None:
                self._changed(last, False)
        elif own != before:
            self.found[name] = own
            self._changed(own, True)
        else:
            return
        await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


def _whole_name(item: Manifest) -> str:
    return f"{item['metadata'].get('namespace')}/{name_of(item)}"
