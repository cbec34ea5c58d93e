"""The records about sessions beside the live ones: events, held shares, and measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fgpu_scheduler.core.model import Session, SessionState, Size


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the append-only log.

    The meaning of ``reason`` depends on ``kind``:

    - "submitted": None, or the session that this one replaces in the queue;
    - "moved" and "attempt", changes of state: the end cause or None;
    - "held": HELD, or None when a launcher waits again;
    - "waits": the wait reason;
    - "promised": RESERVED, when a start was first promised;
    - "warned": the cause for which the session may be ended at once, or None when that is over;
    - "ends": the cause of the announced end, or None when it was withdrawn;
    - "idle": IDLE since the session is idle, or None when it is used again;
    - "kept": IDLE, when the owner keeps it although it is idle, or None when that is over;
    - "extended": TIME_LIMIT, when the owner has extended its time limit;
    - "resized": the amounts before and after;
    - "renamed": None, when it has got another name;
    - "park": None, when a person asks to have it parked, and REFUSED, when it could not be parked;
    - "wanted": WANTED when a parked session wants its shares back, or None when it no longer does;
    - "answered": the result of a request to resize it, DONE or REFUSED;
    - "priority": the priorities before and after a change by an administrator;
    - "nodes", "quotas" and "images", without a session: the change of a node, quota or image;
    - "history", without a session: how much of the old history was deleted.
    """

    id: int
    at_s: int
    session_id: int | None
    kind: str
    from_state: SessionState | None
    to_state: SessionState | None
    reason: str | None
    user: str | None


@dataclass(frozen=True, slots=True)
class SessionMeasurements:
    """The measurements of a session until ``at_s``; None where a value could not be measured.

    ``gpu_millionths`` are the millionths of a GPU that it held; ``samples`` are those with a known amount of memory,
    which cover ``covered_s`` seconds. ``counts`` are the histograms of the percentiles, as JSON.
    """

    session_id: int
    at_s: int
    gpu_millionths: int
    limit_mib: int
    samples: int = 0
    covered_s: int = 0
    peak_mib: int | None = None
    p95_mib: int | None = None
    sm_p95_percent: int | None = None
    energy_mj: int | None = None
    energy_estimated: bool = False
    counts: str = "{}"


@dataclass(frozen=True, slots=True)
class PastSession:
    """A session with its measurements, if there are any."""

    session: Session
    measured: SessionMeasurements | None


@dataclass(frozen=True, slots=True)
class HeldShares:
    """What a session held from ``scheduled_at_s`` until ``ended_at_s`` (None: until now), in millionths of a GPU and
    thousandths of an fGPU; 0 while it was parked. ``sizes`` are what it held before."""

    session_id: int
    user: str
    resource_group: str
    hub_groups: tuple[str, ...]
    image: str
    waits_since_s: int
    scheduled_at_s: int
    started_at_s: int | None
    ended_at_s: int | None
    gpu_millionths: int
    fgpu_milli: int
    sizes: tuple[Size, ...] = ()

    def held(self, until_s: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each period with one amount: begin, end, thousandths of an fGPU, and millionths of a GPU."""
        since_s = self.scheduled_at_s
        for size in (*self.sizes, Size(until_s, self.fgpu_milli, self.gpu_millionths, 0, 0)):
            to_s = min(size.until_s, until_s)
            if to_s > since_s:
                yield since_s, to_s, size.fgpu_milli, size.gpu_millionths
                since_s = to_s
