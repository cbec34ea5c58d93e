"""The progress of a pull, and the reason why it failed, from the engine's output. Pure.

An engine reports a layer's size only when it begins to fetch it, and fetches a few at a time: until it has begun all
layers, the total is unknown. It gives the reason only as text, which differs between versions and registries.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fgpuspawner.images.pull_state import Progress
from fgpuspawner.text.logs import as_text

RATE_OVER_S = 10.0
RATE_AFTER_S = 1.0

BEGUN = ("Pulling fs layer", "Waiting")
FETCHED = ("Verifying Checksum", "Download complete")
DONE = ("Pull complete", "Already exists")
BROKE_OFF = "Retrying in "
"""Prefix of the status with which the engine says that it retries a layer."""


@dataclass(slots=True)
class _Layer:
    bytes_done: int = 0
    bytes_total: int | None = None
    fetched: bool = False
    done: bool = False
    broke_off: bool = False


@dataclass(slots=True)
class PullMeter:
    """Counts bytes and layers. Its numbers never decrease, even if a pull starts over, except for the seconds left."""

    _layers: dict[str, _Layer] = field(default_factory=dict)
    _most: Progress = field(default_factory=Progress)
    _past: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, told: Mapping[str, Any], now_s: float) -> None:
        """Add one line of the engine's output, with a monotonic time."""
        status, name = told.get("status"), told.get("id")
        if not isinstance(status, str) or not isinstance(name, str):
            return
        broke_off = status.startswith(BROKE_OFF)
        if not broke_off and status not in (*BEGUN, *FETCHED, *DONE, "Downloading", "Extracting"):
            return
        layer = self._layers.setdefault(name, _Layer())
        layer.broke_off = broke_off
        detail = told.get("progressDetail")
        detail = detail if isinstance(detail, dict) else {}
        if status == "Downloading":
            current, total = detail.get("current"), detail.get("total")
            if isinstance(total, int) and total > 0:
                layer.bytes_total = max(total, layer.bytes_total or 0)
            if isinstance(current, int):
                layer.bytes_done = max(layer.bytes_done, current)
        elif status in FETCHED or status == "Extracting":
            layer.fetched = True
        elif status in DONE:
            layer.fetched = layer.done = True
        if layer.fetched:
            # A small layer can be complete before its size is reported.
            layer.bytes_done = layer.bytes_total = layer.bytes_total or layer.bytes_done
        self._counted(now_s)

    def count(self, bytes_done: int, bytes_total: int, now_s: float) -> None:
        """Add the number of copied bytes; slightly more than the total, which is the size of the files."""
        self._layers = {"": _Layer(min(bytes_done, bytes_total), bytes_total)}
        self._counted(now_s)

    def _counted(self, now_s: float) -> None:
        done = sum(layer.bytes_done for layer in self._layers.values())
        if not self._past or now_s - self._past[-1][0] >= 0.2:
            self._past.append((now_s, done))
        while len(self._past) > 2 and now_s - self._past[0][0] > RATE_OVER_S:
            self._past.popleft()

    def progress(self, now_s: float) -> Progress:
        named = [layer for name, layer in self._layers.items() if name]
        done = max(self._most.bytes_done, sum(layer.bytes_done for layer in self._layers.values()))
        totals = [t for layer in self._layers.values() if (t := layer.bytes_total) is not None]
        total = self._most.bytes_total
        if totals and len(totals) == len(self._layers):
            total = max(total or 0, sum(totals))
        if total is not None:
            total = max(total, done)
        self._most = Progress(
            max(self._most.layers_done, sum(layer.done for layer in named)),
            max(self._most.layers, len(named)),
            done,
            total,
            self._seconds_left(done, total, now_s),
            bool(named) and all(layer.fetched for layer in named),
            any(layer.broke_off for layer in named),
        )
        return self._most

    def _seconds_left(self, done: int, total: int | None, now_s: float) -> int | None:
        if total is None or total <= done or not self._past:
            return None
        since_s, then = self._past[0]
        if now_s - since_s < RATE_AFTER_S or done <= then:
            return None
        return max(1, round((total - done) * (now_s - since_s) / (done - then)))


LONGEST_REASON = 300


class Kind(StrEnum):
    """The kinds of failures, in words."""

    NOT_FOUND = "the registry has no such image"
    DENIED = "the registry denies access to it, or has no such image"
    NO_SUCH_HOST = "there is no such registry"
    NOT_TRUSTED = "the engine does not trust the registry"
    DISK_FULL = "the disk of the engine is full"
    DIGEST = "what came is not what its digest says"
    PLATFORM = "the image is for another kind of machine"
    REGISTRY = "the registry has trouble of its own"
    NETWORK = "the registry does not answer"
    ENGINE = "the Docker engine does not answer"
    OTHER = "the engine says"


PASSING = (Kind.REGISTRY, Kind.NETWORK, Kind.ENGINE)
"""Kinds for which another try may help."""
MESSAGES: tuple[tuple[str, Kind], ...] = (
    # An engine, proxy or plugin that does not know or allow the question.
    ("page not found|<html|denied by plugin", Kind.OTHER),
    ("no space left on device|disk quota exceeded", Kind.DISK_FULL),
    ("verification failed for digest|failed precondition|digest mismatch|does not match digest", Kind.DIGEST),
    ("no matching manifest for|does not match the specified platform|image operating system", Kind.PLATFORM),
    ("no such host", Kind.NO_SUCH_HOST),
    ("x509:|http response to https client|certificate", Kind.NOT_TRUSTED),
    ("too ?many ?requests|unexpected (http status|status code|status)[: ]*5", Kind.REGISTRY),
    ("bad gateway|service unavailable", Kind.REGISTRY),
    (
        "access denied|denied:|unauthorized|no basic auth credentials|forbidden|incorrect username",
        Kind.DENIED,
    ),
    ("(manifest|name|blob) unknown|not found|does not exist|no such image", Kind.NOT_FOUND),
    ("connection (refused|reset)|broken pipe|no route to host|network is unreachable", Kind.NETWORK),
    ("timeout|timed out|deadline exceeded|server misbehaving|temporary failure", Kind.NETWORK),
    ("unexpected eof|: eof|use of closed network connection", Kind.NETWORK),
)
"""Parts of engines' messages in lower case, as regular expressions; the first match counts."""
STATUSES = {401: Kind.DENIED, 403: Kind.DENIED, 404: Kind.NOT_FOUND}


@dataclass(frozen=True, slots=True)
class Reason:
    """The kind of a failure, and the engine's message."""

    kind: Kind
    said: str

    @property
    def may_pass(self) -> bool:
        return self.kind in PASSING

    def words(self) -> str:
        return f"{self.kind}: {self.said}"


def reason(said: str, status: int | None = None) -> Reason:
    """Return why an image could not be fetched; ``status`` is the answer's HTTP status, if it was an error."""
    # A registry's text goes to logs, pages and the command line.
    shown = as_text(" ".join(said.split()))[:LONGEST_REASON]
    kinds = (kind for pattern, kind in MESSAGES if re.search(pattern, said.lower()))
    return Reason(next(kinds, STATUSES.get(status or 0, Kind.OTHER)), shown)
