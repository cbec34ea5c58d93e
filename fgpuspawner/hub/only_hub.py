"""That no other Hub serves the same sessions."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from fgpu_scheduler import Claim, FGPUError, lock_file
from fgpuspawner.settings import FGPU

LOOKED_AT_EVERY_S = 30.0


class OnlyHub:
    """What a Hub holds for as long as it runs: its data folder, and its claim on the scheduler's database."""

    def __init__(self, app: Any) -> None:
        """Have the Hub that is being started take both before it looks at its own database, and changes it."""
        self._app = app
        self._init_db = app.init_db
        app.init_db = self._first

    def _first(self) -> None:
        try:
            self._take(FGPU.from_config(self._app.config))
        except FGPUError as e:
            sys.exit(f"fgpuspawner: {e}")
        self._init_db()

    def _take(self, settings: FGPU) -> None:
        folder = settings.data_path()
        self._folder = lock_file(
            folder / "hub.lock",
            f"c.FGPU.data_dir: another Hub is running on {folder}; end it, or give this one another folder",
        )
        self._claim = Claim(settings.database_url())
        self._claim.take()

    async def look(self) -> None:
        """Take the claim anew where the database has given it up, as at its own restart.

        Raises:
            BadSettings: another Hub has it now.
            StoreUnavailable: the database does not answer.
        """
        await asyncio.to_thread(self._claim.take)
