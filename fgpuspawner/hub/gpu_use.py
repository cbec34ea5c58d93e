"""How long each session's GPUs have been unused, by the driver.

A device without figures does not count as idle: no session is ended for unknown use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from fgpu_scheduler import Clock, Session
from fgpuspawner.isolation.gpu_poller import LONGEST_PAUSE, LONGEST_SNAPSHOT_S, GpuSnapshot, running_on
from fgpuspawner.isolation.nvml_reader import DeviceUse


def is_idle(session: Session, snapshot: GpuSnapshot) -> bool:
    """Return whether none of a session's processes has used any of its devices. Pure.

    Simulated GPUs without a driver are always idle.
    """
    assert session.placement is not None
    own = [snapshot.devices.get(share.device_uuid) for share in session.placement.shares]
    return snapshot.source.has_no_driver or all(
        isinstance(device, DeviceUse)
        and all(p.busy_percent == 0 for p in device.processes if snapshot.owners.get(p.pid) == session.id)
        for device in own
    )


class GpuUse:
    """Keeps since when each session has not used its GPUs."""

    def __init__(self, clock: Clock, *, every_s: float) -> None:
        self._clock = clock
        self._known_for_s = (LONGEST_PAUSE + 1) * every_s + LONGEST_SNAPSHOT_S
        self._since: dict[int, tuple[int, float]] = {}

    async def observe(self, snapshot: GpuSnapshot, live: Sequence[Session]) -> None:
        there = running_on(snapshot.devices, live)
        idle = {s.id for s in live if s.id in there and is_idle(s, snapshot)}
        known = {s.id for s in live} - there | idle
        self._since = {i: since for i, since in self._since.items() if i in known}
        for session_id in idle:
            since_s = self.idle_since_s(session_id)
            self._since[session_id] = (self._clock.now_s() if since_s is None else since_s, snapshot.at_s)

    def idle_since_s(self, session_id: int) -> int | None:
        """Return since when a session's GPUs are idle; None if they are not, or were not observed lately."""
        since_s, seen_at_s = self._since.get(session_id, (None, 0.0))
        return since_s if time.monotonic() - seen_at_s <= self._known_for_s else None
