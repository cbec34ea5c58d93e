"""A local copy of the cluster's objects of one kind: listed once, then updated by a watch.

KubeSpawner's `ResourceReflector` is not used: it ends the Hub after failures, lists everything in one answer (seconds
without another task for thousands of pods), keeps whole objects, and reports no changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fgpuspawner.concurrency.background import Failures
from fgpuspawner.engines.kubernetes.api import FORBIDDEN, GONE, Api, Refused
from fgpuspawner.engines.kubernetes.dialects.base import Manifest, name_of

log = logging.getLogger("fgpu.kubernetes")
T = TypeVar("T")

AGAIN_AFTER_S = 1.0
SLOWEST_AGAIN_S = 30.0


class Mirror(Generic[T]):
    """The objects at a path of the API, by name, as last reported. For one event loop.

    ``keep`` returns the part of an object to keep, None to ignore the object. ``changed`` is called with the kept part of
    each object that is new, changed, or gone (its last state, and False). With ``everywhere`` the objects are of all
    namespaces, and their keys "NAMESPACE/NAME".
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
        self.path = path
        self._query = tuple(query)
        self._what = what
        self._keep = keep
        self._changed = changed
        self._key = _full_name if everywhere else name_of
        self._news = asyncio.Condition()
        #: The kept objects, by key.
        self.found: dict[str, T] = {}
        #: Whether everything was listed at least once.
        self.listed = False
        #: Why the present objects are unknown; None while they are known.
        self.trouble: str | None = None

    async def follow(self) -> None:
        """List and watch until cancelled; retry after every failure."""
        failures = Failures(log, f"The cluster's {self._what} cannot be followed now")
        pause_s = AGAIN_AFTER_S
        while True:
            longest_s = 4 * AGAIN_AFTER_S
            try:
                version = await self._list()
                failures.worked()
                pause_s, self.trouble = AGAIN_AFTER_S, None
                while True:
                    again_at = time.monotonic() + AGAIN_AFTER_S
                    version = await self._watch(version)
                    # A proxy may end each of them at once.
                    await asyncio.sleep(again_at - time.monotonic())
            except Exception as e:
                # Whatever failed, stopping here would leave sessions unwatched.
                status = e.status if isinstance(e, Refused) else None
                if status == FORBIDDEN:
                    longest_s = SLOWEST_AGAIN_S
                # The version of a watch may be too old: then everything is listed again.
                if status != GONE:
                    self.trouble = str(e) or type(e).__name__
                    failures.failed(e)
            await self._notify()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def until_changed(self, within_s: float, name: str | None = None) -> None:
        """Wait for the next change of this object, or of any if no ``name`` is given, for ``within_s`` at most."""
        before = self.found.get(name or "")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._news:
                await self._news.wait()
                while name is not None and self.found.get(name) == before:
                    await self._news.wait()

    async def _list(self) -> str:
        items: dict[str, T] = {}
        version = ""
        async for page in self._api.pages(self.path, self._query):
            version = str(page["metadata"]["resourceVersion"])
            for item in page.get("items") or ():
                own = self._keep(item)
                if own is not None:
                    items[self._key(item)] = own
        before, self.found, self.listed = self.found, items, True
        for name, gone in before.items():
            if name not in items:
                self._changed(gone, False)
        for name, new in items.items():
            if new != before.get(name):
                self._changed(new, True)
        await self._notify()
        return version

    async def _watch(self, version: str) -> str:
        """Apply the watch's events until the API closes it; return the last version seen."""
        async for event in self._api.watch(self.path, self._query, version):
            item: dict[str, Any] = event["object"]
            version = str(item["metadata"]["resourceVersion"])
            if event["type"] != "BOOKMARK" and self._apply(item, event["type"] == "DELETED"):
                await self._notify()
        return version

    def _apply(self, item: Manifest, deleted: bool) -> bool:
        """Take over an object of an event; return whether anything changed."""
        name, own = self._key(item), self._keep(item)
        before = self.found.get(name)
        if deleted or own is None:
            self.found.pop(name, None)
            # The event has the object's very last state.
            last = own or before
            if last is not None:
                self._changed(last, False)
        elif own == before:
            return False
        else:
            self.found[name] = own
            self._changed(own, True)
        return True

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()


def _full_name(item: Manifest) -> str:
    return f"{item['metadata'].get('namespace')}/{name_of(item)}"
