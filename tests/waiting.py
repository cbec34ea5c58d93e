"""Waiting, in tests that run on an event loop, for what another task or thread does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(true: Callable[[], object]) -> None:
    """Wait until a condition holds; fail after a minute."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - it may be of another thread
            await asyncio.sleep(0.005)
