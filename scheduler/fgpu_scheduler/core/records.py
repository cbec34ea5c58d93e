"""What is kept of sessions beside the live ones: what happened, what they held, and what was measured of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fgpu_scheduler.core.model import Session, SessionState, Size


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the append-only log.

    ``reason`` is, by ``kind``:

    - "submitted": None, or which session this one replaces in the queue;
    - "moved" and "attempt", changes of state: the end cause or None;
    - "held": HELD, or None once it is let go;
    - "waits": the wait reason;
    - "promised": RESERVED, when a start was first promised;
    - "warned": the cause for which the session may be ended at once, or None (not any more);
    - "ends": the cause for which the owner was told that it will be ended, or None (it will not);
    - "idle": IDLE since it is, or None (not any more);
    - "kept": IDLE, when the owner asked to keep it all the same;
    - "extended": TIME_LIMIT, when the owner has made its time limit longer;
    - "resized": the amount that it had and the one that it has;
    - "answered": what became of a wish to resize it, DONE or REFUSED;
    - "priority": the priority that it had and the one that an administrator gave it;
    - "nodes" and "quotas", of no session: what became of which node or quota;
    - "history", of no session: how much of what ended long ago was forgotten;
    - "images", of no session: what became of which image.
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
    """What was measured of a session until ``at_s``. What could not be is None.

    ``gpu_millionths`` are millionths of a GPU that it held; ``samples`` are those with a known amount of memory, and
    ``covered_s`` for how long they speak. ``counts`` are those from which the percentiles were made, as JSON.
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
    """A session with what was measured of it; None where nothing was."""

    session: Session
    measured: SessionMeasurements | None


@dataclass(frozen=True, slots=True)
class HeldShares:
    """A session that held shares: of what it was, when, and how much, in thousandths of a GPU and of an fGPU.

    It held them from ``scheduled_at_s`` until ``ended_at_s``; None: it holds them still. ``sizes`` are what it held
    before it was resized.
    """

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
        """Yield from when until when it held how much, in thousandths of an fGPU and millionths of a GPU, until then."""
        return held_between(self.scheduled_at_s, until_s, self.sizes, self.fgpu_milli, self.gpu_millionths)


def held_between(
    since_s: int, until_s: int, sizes: Iterable[Size], fgpu_milli: int, gpu_millionths: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the periods in which a session held one amount each, the present one last; see `HeldShares.held`."""
    for size in sizes:
        to_s = min(size.until_s, until_s)
        if to_s > since_s:
            yield since_s, to_s, size.fgpu_milli, size.gpu_millionths
            since_s = to_s
    if until_s > since_s:
        yield since_s, until_s, fgpu_milli, gpu_millionths
