"""What the meter reports of a session, and the file in which the Hub publishes it.

Not in the database: it changes at every snapshot and means little after the Hub's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from fgpuspawner.isolation.files import HubFile

KEPT_S = 600
"""How long points are kept."""
BETWEEN_POINTS_S = 10
"""Shortest time between two points, to bound the file."""
MOST_PROCESSES = 32
"""Processes of one session that are listed: those that hold most."""
RECEIVED_OVER_S = 60


class Point(NamedTuple):
    """What a session held and used at one time; None if unknown.

    A plain tuple: hundreds of sessions have tens of thousands, read and written at every snapshot.
    """

    at_s: int
    memory_used_mib: int | None
    sm_percent: float | None


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a session on its GPUs. ``pid`` is its number inside the session."""

    pid: int
    name: str | None
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class Meter:
    """The last reading of a session, summed over its GPUs. Unknown values are None, and ``trouble`` says why.

    ``compute_borrowed_percent`` and ``compute_lent_percent`` are what it received above its share and what others used
    of its share in the last minute; None without lending. ``compute_entitled_percent`` is None without a compute limit.
    ``memory_context_mib`` is the memory charged for contexts and code, which the program cannot use; None if unknown or
    not charged. ``parks_at_s`` is when it is parked if its GPU stays idle; None: not soon.
    """

    at_s: int
    memory_used_mib: int | None
    memory_limit_mib: int
    sm_percent: float | None
    compute_entitled_percent: int | None
    compute_received_percent: float | None
    trouble: str | None
    compute_borrowed_percent: float | None = None
    compute_lent_percent: float | None = None
    memory_context_mib: int | None = None
    parks_at_s: int | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """Everything that the meter reports of a running session."""

    now: Meter
    points: tuple[Point, ...] = ()
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class MeterState:
    """What the Hub published last: its interval, and the last reading of each session."""

    every_s: int = 0
    sessions: Mapping[int, Live] | None = None

    def of(self, session_id: int, now_s: int) -> Live | None:
        """Return what is known of a session now; None if it was never read. Values that are too old become unknown."""
        live = (self.sessions or {}).get(session_id)
        if live is None or abs(now_s - live.now.at_s) <= max(30, 6 * self.every_s):
            return live
        at = datetime.fromtimestamp(live.now.at_s, UTC)
        trouble = f"nothing has been measured since {at:%Y-%m-%d %H:%M:%S} UTC"
        unknown = replace(
            live.now,
            memory_used_mib=None,
            sm_percent=None,
            compute_received_percent=None,
            trouble=trouble,
            compute_borrowed_percent=None,
            compute_lent_percent=None,
            memory_context_mib=None,
            parks_at_s=None,
        )
        return Live(unknown, live.points)


METERS = HubFile("meters.json", MeterState)


class MeterFile:
    """Reads the meter's file only when it has changed; thread-safe."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._last: tuple[tuple[int, int, int], MeterState] | None = None

    def read(self) -> MeterState:
        try:
            found = (self._data / METERS.name).stat()
        except OSError:
            return MeterState()
        mark = (found.st_ino, found.st_mtime_ns, found.st_size)
        last = self._last
        if last is None or last[0] != mark:
            last = self._last = (mark, METERS.read(self._data))
        return last[1]
