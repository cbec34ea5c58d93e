"""The administrators' announcement, for the Hub's own pages: `banner_of_hub` is what they ask."""

from __future__ import annotations

import asyncio

from fgpu_scheduler import StoreUnavailable
from fgpu_scheduler.banner import Notice
from fgpu_scheduler.service import Scheduler

PATIENCE_S = 1.0
"""No page waits longer for it."""


async def banner_of_hub(scheduler: Scheduler) -> Notice | None:
    """Return what pages of the Hub show above all else, or None: also where the database does not answer in time.

    Its ``text`` is plain, and to be escaped; ``level`` is "info" or "warning".
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await scheduler.banner()
    except (StoreUnavailable, TimeoutError):
        return None
