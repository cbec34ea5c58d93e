"""What the meter says of a session, and the file in which the Hub tells the service.

It is no business of the database: it changes at every look, and means little once the Hub has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from fgpuspawner.meter.hub_file import HubFile

KEPT_S = 600
"""So long points are kept."""
BETWEEN_POINTS_S = 10
"""No two points are nearer, however often the meter looks: it bounds the file."""
MOST_PROCESSES = 32
"""Of one session: those that hold most."""
RECEIVED_OVER_S = 60


class Point(NamedTuple):
    """What a session held and used at one instant; None where that was not known.

    A plain tuple: with hundreds of sessions there are tens of thousands, read and written at every look.
    """

    at_s: int
    memory_used_mib: int | None
    sm_percent: float | None


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a session on its GPUs. ``pid`` is its number as the session sees it."""

    pid: int
    name: str | None
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class Meter:
    """The last look at a session, summed over its GPUs. What could not be measured is None, and ``trouble`` says why.

    ``compute_borrowed_percent`` is what of the compute received was lent to it, ``compute_lent_percent`` what others had
    of its share, over the last minute; None where compute is not lent. ``compute_entitled_percent`` is None where compute
    is not limited. ``memory_context_mib`` is what of the memory was charged for contexts and code, and so is not the
    program's; None where that is not known, or nothing is charged.
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


@dataclass(frozen=True, slots=True)
class Live:
    """All that the meter tells of a running session."""

    now: Meter
    points: tuple[Point, ...] = ()
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class MeterState:
    """What the Hub told last: how often it tells, and what was seen last of each session."""

    every_s: int = 0
    sessions: Mapping[int, Live] | None = None

    def of(self, session_id: int, now_s: int) -> Live | None:
        """Return what is known of a session now; None where nothing is known yet.

        What was seen too long ago is not what is: it becomes unknown.
        """
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
        )
        return Live(unknown, live.points)


METERS = HubFile("meters.json", MeterState)


class MeterFile:
    """Reads what is told, once for each time that it is written. Safe to use from several threads."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._last: tuple[tuple[int, int, int], MeterState] | None = None

    def read(self) -> MeterState:
        """Return what was told last."""
        try:
            found = (self._data / METERS.name).stat()
        except OSError:
            return MeterState()
        mark = (found.st_ino, found.st_mtime_ns, found.st_size)
        last = self._last
        if last is None or last[0] != mark:
            last = self._last = (mark, METERS.read(self._data))
        return last[1]
