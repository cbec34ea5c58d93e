"""The event stream of a Docker engine: the ends of its containers as they happen."""

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
    # The engine reports an end a little before its list of containers shows it: on a busy machine, half a second.
    loop.call_soon_threadsafe(function)
    for delay_s in LISTED_AFTER_S:
        loop.call_soon_threadsafe(loop.call_later, delay_s, function)


class Events:
    """Reads an engine's events in a thread, and reopens the stream when it ends."""

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
        """Stop; the thread ends soon after."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            # On a cut connection closing takes a while.
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
                # One observation finds what happened before the stream was open.
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
        """Return the containers that ended since the last observation without an event.

        At the first observation there are none: containers may have ended before the stream was open.
        """
        before, self._ended = self._ended, frozenset(o.handle for o in found if not o.alive)
        return frozenset() if before is None else self._ended - before - self._told.keys()

    def has_told(self, name: str) -> bool:
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
            # The event loop has ended, and the Hub with it.
            self._closed.set()


def _closed_quietly(stream: Any) -> None:
    try:
        stream.close()
    except Exception as e:
        log.debug("Closing the events: %s", e)
