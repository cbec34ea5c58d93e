"""What a Docker engine tells of its containers' ends, as it happens."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from docker.errors import APIError, DockerException

from fgpu_scheduler import Observed
from fgpuspawner.engines.docker.containers import LABEL, MOST_TOLD, Containers
from fgpuspawner.engines.docker.errors import GONE

log = logging.getLogger("fgpu.docker")

EVENTS = ("die", "oom", "destroy")
EVENTS_AGAIN_S = 1.0
LISTED_AFTER_S = (0.2, 0.6, 1.5)


def call_soon_and_again(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    # The engine tells of a death a little before its list of containers does: on a busy machine, half a second.
    loop.call_soon_threadsafe(function)
    for delay_s in LISTED_AFTER_S:
        loop.call_soon_threadsafe(loop.call_later, delay_s, function)


class Events:
    """The stream of an engine's events, in a thread of its own, for as long as it is open; then anew."""

    def __init__(self, containers: Containers, name: str, happened: Callable[[], None]) -> None:
        self._containers = containers
        self._name = name
        self._happened = happened
        self._closed = threading.Event()
        self._stream: Any = None
        self._told: dict[str, None] = {}
        self._ended: frozenset[str] | None = None
        threading.Thread(target=self._run, name="fgpu-events", daemon=True).start()

    def close(self) -> None:
        """End it; its thread ends by itself."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            # It may be at the other end of a connection that is cut: that takes a while to find out.
            threading.Thread(target=_closed_quietly, args=(stream,), daemon=True).start()

    def _run(self) -> None:
        filters = {
            "type": "container",
            "event": list(EVENTS),
            "label": f"{LABEL}.installation={self._containers.installation}",
        }
        while not self._closed.is_set():
            try:
                self._stream = self._containers.client.events(decode=True, filters=filters)
                # Whatever happened while nobody listened is seen by looking once.
                self._tell()
                for event in self._stream:
                    if self._closed.is_set():
                        return
                    self._note(event)
                    self._tell()
            except (DockerException, APIError, *GONE, OSError, ValueError) as e:
                log.debug("%s: the events end: %s", self._name, e)
            finally:
                if self._stream is not None:
                    _closed_quietly(self._stream)
            self._tell()
            time.sleep(EVENTS_AGAIN_S)

    def missed(self, found: Sequence[Observed]) -> frozenset[str]:
        """Return what has ended between the last look and this one, and was not told of.

        What had ended at the first look may have done so before anybody listened.
        """
        before, self._ended = self._ended, frozenset(o.handle for o in found if not o.alive)
        return frozenset() if before is None else self._ended - before - self._told.keys()

    def has_told(self, name: str) -> bool:
        """Return whether it was told that this container has ended."""
        return name in self._told

    def _note(self, event: Mapping[str, Any]) -> None:
        name = str(((event.get("Actor") or {}).get("Attributes") or {}).get("name", ""))
        self._told[name] = None
        if len(self._told) > MOST_TOLD:
            del self._told[next(iter(self._told))]

    def _tell(self) -> None:
        try:
            self._happened()
        except RuntimeError:
            # The loop has ended, and with it the Hub.
            self._closed.set()


def _closed_quietly(stream: Any) -> None:
    try:
        stream.close()
    except Exception as e:
        log.debug("Closing the events: %s", e)
