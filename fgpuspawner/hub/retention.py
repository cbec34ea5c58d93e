"""Deletes what ended more than ``history_days`` ago: once an hour, in small steps with pauses."""

from __future__ import annotations

import asyncio
import logging

from fgpu_scheduler import Clock, Retention
from fgpuspawner.concurrency.background import Background

log = logging.getLogger("fgpu")

EVERY_S = 3600.0
FIRST_AFTER_S = 900.0
"""A machine that has just booted may have a wrong clock, and deleted history does not come back."""
PAUSE_S = 0.2
"""Between two steps, to let other transactions go first."""
DAY_S = 24 * 3600


def begin_retention(
    background: Background,
    retention: Retention,
    clock: Clock,
    *,
    days: int,
    first_after_s: float = FIRST_AFTER_S,
) -> None:
    """Delete periodically what is older than ``days``; 0 keeps everything."""
    if days:
        background.every(
            EVERY_S,
            lambda: forget(retention, clock, days=days),
            failed="What ended long ago is not forgotten yet",
            first_after_s=first_after_s,
        )


async def forget(
    retention: Retention, clock: Clock, *, days: int, pause_s: float = PAUSE_S
) -> tuple[int, int]:
    """Delete all that is older than ``days`` and may go; return the numbers of sessions and events."""
    now_s = clock.now_s()
    before_s = now_s - days * DAY_S
    sessions = events = 0
    while some := await asyncio.to_thread(retention.delete_old_sessions, before_s, now_s=now_s):
        sessions += some
        await asyncio.sleep(pause_s)
    while some := await asyncio.to_thread(retention.delete_old_events, before_s):
        events += some
        await asyncio.sleep(pause_s)
    if sessions or events:
        log.info("Forgot %d sessions that ended long ago, and %d events", sessions, events)
    return sessions, events
