"""Counts what every running session uses of its GPUs, and publishes it for the service.

1. `observe` adds each snapshot of the GPUs to a tally for each session.
2. `publish` writes the latest readings into the meter's file every ``every_s``.
3. `save` stores the tallies in the database every `SAVED_EVERY_S` and when a session ends; a restarted Hub continues
   them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fgpu_scheduler import (
    UP,
    Clock,
    Meters,
    Queue,
    Session,
    SessionMeasurements,
    compute_of,
    holds_shares,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.gpu_poller import LONGEST_PAUSE, LONGEST_SNAPSHOT_S, GpuSnapshot, running_on
from fgpuspawner.isolation.limits import BadLimits, DeviceLimit
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import DeviceUse
from fgpuspawner.meter.model import (
    BETWEEN_POINTS_S,
    KEPT_S,
    METERS,
    RECEIVED_OVER_S,
    Live,
    Meter,
    MeterState,
    Point,
)
from fgpuspawner.meter.reading import (
    DeviceReading,
    Lent,
    SessionReading,
    computed_by_session,
    lent_on,
    read,
    shares_of,
)
from fgpuspawner.meter.tally import Tally, restored

log = logging.getLogger("fgpu.meter")

SAVED_EVERY_S = 60
"""At most this much of the count is lost when the Hub is killed."""


class Sampler:
    """``every_s`` is the interval of publishing, ``poll_every_s`` the mean interval of snapshots. One for the Hub.

    ``parks_at_s`` returns when a session will be parked if its GPU stays idle.
    """

    def __init__(
        self,
        isolation: Isolation,
        queue: Queue,
        meters: Meters,
        clock: Clock,
        *,
        data: Path,
        every_s: int,
        poll_every_s: int,
        parks_at_s: Callable[[int], int | None] = lambda session_id: None,
    ) -> None:
        self._isolation = isolation
        self._queue = queue
        self._meters = meters
        self._clock = clock
        self._data = data
        self._every_s = every_s
        self._poll_every_s = poll_every_s
        self._parks_at_s = parks_at_s
        self._longest_gap_s = int(LONGEST_PAUSE * poll_every_s + LONGEST_SNAPSHOT_S)
        self._energy: dict[str, tuple[int, int]] = {}
        self._tallies: dict[int, Tally] = {}
        self._unsaved: dict[int, SessionMeasurements] = {}
        self._live: dict[int, Live] = {}
        self._recent: dict[int, tuple[tuple[int, float | None, Lent | None], ...]] = {}
        #: Limits by session and device, from the limits files.
        self._held_to: dict[int, Mapping[str, DeviceLimit]] = {}
        self._saved_at_s = 0

    def begin(self, background: Background) -> None:
        """Continue from the last run's file, and publish every ``every_s`` seconds."""
        self._live = dict(METERS.read(self._data).sessions or {})
        background.every(
            self._every_s, self.publish, failed="The meter's file could not be written", level=logging.ERROR
        )

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        """Add a snapshot to the tallies of the sessions that run there."""
        there = running_on(snapshot.devices, live)
        running = [s for s in live if s.id in there]
        await self._begin_tallies(running)
        seen = {
            uuid: self._device_reading(uuid, use, snapshot.owners) for uuid, use in snapshot.devices.items()
        }
        devices = {d.uuid: d for node in self._isolation.nodes for d in node.devices}
        now_s = self._clock.now_s()
        lent = self._lent(live, seen)
        self._live |= {
            s.id: self._with_reading(
                s,
                read(s, seen, devices, self._charged(s.id), self._isolation.code_mib.get(s.id, {})),
                now_s,
                lent.get(s.id),
            )
            for s in running
        }

    async def publish(self) -> None:
        running = {s.id for s in await self._queue.live() if s.state in UP and holds_shares(s)}
        now_s = self._clock.now_s()
        ended = sorted(set(self._tallies) - running)
        self._unsaved |= {i: self._tallies.pop(i).measured() for i in ended}
        self._live = {
            i: replace(live, now=replace(live.now, parks_at_s=self._parks_at_s(i)))
            for i, live in self._live.items()
            if i in running
        }
        self._recent = {i: points for i, points in self._recent.items() if i in running}
        self._held_to = {i: own for i, own in self._held_to.items() if i in running}
        await asyncio.to_thread(METERS.write, self._data, MeterState(self._every_s, self._live))
        if ended or abs(now_s - self._saved_at_s) >= SAVED_EVERY_S:
            await self.save(now_s)

    async def save(self, now_s: int) -> None:
        """Save what was counted so far; raises StoreUnavailable if nothing was saved; the next call saves all."""
        unsaved = {**self._unsaved, **{i: tally.measured() for i, tally in self._tallies.items()}}
        await asyncio.to_thread(self._meters.save, list(unsaved.values()))
        self._unsaved = {}
        self._saved_at_s = now_s

    # -- one snapshot -------------------------------------------------------------------------------------

    def _device_reading(
        self, uuid: str, use: DeviceUse | str, owners: Mapping[int, int]
    ) -> DeviceReading | str:
        if isinstance(use, str):
            self._energy.pop(uuid, None)
            return use
        now_s, spent = self._clock.now_s(), None
        if use.energy_mj is not None:
            before_mj, before_s = self._energy.get(uuid, (use.energy_mj, -1))
            # After a gap the sessions in it are unknown; a reloaded driver counts from 0.
            if 0 <= now_s - before_s <= self._longest_gap_s and use.energy_mj >= before_mj:
                spent = use.energy_mj - before_mj
            self._energy[uuid] = use.energy_mj, now_s
        return DeviceReading(use, owners, spent)

    async def _begin_tallies(self, running: Sequence[Session]) -> None:
        """Continue tallies from before a restart, and begin those of new sessions."""
        new = [s for s in running if s.id not in self._tallies]
        resized = [s for s in running if s not in new and self._is_resized(s)]
        if new or resized:
            self._held_to |= await asyncio.to_thread(self._limits_of, [s.id for s in (*new, *resized)])
        known = await asyncio.to_thread(self._meters.of, [s.id for s in new]) if new else {}
        for session in new:
            saved = known.get(session.id)
            self._tallies[session.id] = restored(saved) if saved else self._empty_tally(session)
            if self._is_resized(session):
                # Resized while no Hub counted.
                resized.append(session)
        for session in resized:
            now = self._empty_tally(session)
            self._tallies[session.id] = self._tallies[session.id].resized(now.gpu_millionths, now.limit_mib)

    def _is_resized(self, session: Session) -> bool:
        limit_mib = sum(s.memory_mib for s in session.placement.shares) if session.placement else 0
        return bool(session.sizes) and self._tallies[session.id].limit_mib != limit_mib

    def _limits_of(self, session_ids: Sequence[int]) -> dict[int, Mapping[str, DeviceLimit]]:
        found: dict[int, Mapping[str, DeviceLimit]] = {}
        for session_id in session_ids:
            with contextlib.suppress(BadLimits):
                own = limits.read(self._isolation.folder(session_id)).devices
                found[session_id] = {d.uuid: d for d in own}
        return found

    def _charged(self, session_id: int) -> dict[str, int]:
        return {uuid: own.context_mib for uuid, own in self._held_to.get(session_id, {}).items()}

    def _lent(self, live: Sequence[Session], seen: Mapping[str, DeviceReading | str]) -> dict[int, Lent]:
        """Return what lending sessions received and gave, summed over their devices; nothing for unknown ones."""
        found: dict[int, Lent] = {}
        unknown: set[int] = set()
        for uuid, one in seen.items():
            shares = shares_of(live, uuid)
            lend = {i: share for i, share in shares.items() if self._lends(i, uuid)}
            if not lend:
                continue
            computed = None if isinstance(one, str) else computed_by_session(one)
            if computed is None:
                unknown |= set(lend)
                continue
            for session_id, lent in lent_on(shares, lend, computed).items():
                found[session_id] = found[session_id] + lent if session_id in found else lent
        return {i: lent for i, lent in found.items() if i not in unknown}

    def _lends(self, session_id: int, uuid: str) -> bool:
        own = self._held_to.get(session_id, {}).get(uuid)
        return own is not None and own.lending > 0

    def _empty_tally(self, session: Session) -> Tally:
        assert session.placement is not None
        capacity = {d.uuid: d.capacity_milli for n in self._isolation.nodes for d in n.devices}
        shares = session.placement.shares
        gpu_millionths = sum(
            round(1_000_000 * s.fgpu_milli / capacity[s.device_uuid])
            for s in shares
            if s.device_uuid in capacity
        )
        return Tally(session.id, gpu_millionths, sum(s.memory_mib for s in shares))

    def _with_reading(self, session: Session, reading: SessionReading, now_s: int, lent: Lent | None) -> Live:
        """Add one reading to a session's tally, and return what is published of it."""
        assert session.placement is not None
        tally = self._tallies[session.id]
        gap_s = now_s - tally.at_s
        covers_s = gap_s if 0 < gap_s <= self._longest_gap_s else self._poll_every_s
        # At the first snapshot it is unknown since when the session was there.
        counted = reading if tally.at_s else replace(reading, energy_mj=None)
        self._tallies[session.id] = tally.with_reading(now_s, covers_s, counted, lent)
        recent = (*self._recent.get(session.id, ()), (now_s, reading.sm_percent, lent))
        self._recent[session.id] = tuple(p for p in recent if 0 <= now_s - p[0] < RECEIVED_OVER_S)
        loans = [one for *_, one in self._recent[session.id] if one is not None]
        before, shares = self._live.get(session.id), session.placement.shares
        point = Point(now_s, reading.memory_mib, reading.sm_percent)
        return Live(
            Meter(
                now_s,
                reading.memory_mib,
                sum(share.memory_mib for share in shares),
                reading.sm_percent,
                compute_of(shares),
                _mean([sm for _, sm, _ in self._recent[session.id] if sm is not None]),
                reading.trouble,
                _mean([one.borrowed for one in loans]),
                _mean([one.lent for one in loans]),
                reading.context_mib,
            ),
            points_with(before.points if before else (), point),
            reading.processes,
        )


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None


def points_with(points: Sequence[Point], new: Point) -> tuple[Point, ...]:
    """Return the points of the last minutes with a new one, which replaces a newest one that was taken too early."""
    kept = [p for p in points if new.at_s - KEPT_S < p.at_s <= new.at_s]
    if len(kept) > 1 and kept[-1].at_s - kept[-2].at_s < BETWEEN_POINTS_S:
        kept.pop()
    return (*kept, new)
