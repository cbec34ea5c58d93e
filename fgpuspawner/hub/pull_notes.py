"""Writes the progress of pulls that sessions wait for, for the service, every second while there are any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fgpuspawner.concurrency.background import Background
from fgpuspawner.images.pull_state import STALE_AFTER_S, PullState, write_pulls

WRITE_EVERY_S = 1.0


class PullNotes:
    """Writes the result of ``states``, by session, into ``data``."""

    def __init__(self, data: Path, states: Callable[[], Mapping[int, PullState]]) -> None:
        self._data = data
        self._states = states
        # Pulls of the last run ended with it.
        write_pulls(data, {}, now_s=0)
        self._told: Mapping[int, PullState] = {}
        self._told_at_s = 0.0

    def begin(self, background: Background) -> None:
        background.every(
            WRITE_EVERY_S, self._tell, failed="How far the pulls are cannot be told", foreseen=(OSError,)
        )

    async def _tell(self) -> None:
        states = self._states()
        old = time.monotonic() - self._told_at_s >= STALE_AFTER_S / 2
        if states != self._told or (states and old):
            await asyncio.to_thread(write_pulls, self._data, states, now_s=time.time())
            self._told, self._told_at_s = states, time.monotonic()
