"""That no other Hub serves the same sessions, and that this one knows whose they are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Any

from jupyterhub import orm

from fgpu_scheduler import BadSettings, Claim, FGPUError, Session, SessionState, lock_file
from fgpuspawner.settings import FGPU

LOOKED_AT_EVERY_S = 30.0
MOST_NAMED = 5
"""So many sessions a refusal names."""


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
        # The next step may remove users (`delete_invalid_users`).
        self._owners = {name for (name,) in self._app.db.query(orm.User.name)}

    def _take(self, settings: FGPU) -> None:
        folder = settings.data_path()
        self._folder = lock_file(
            folder / "hub.lock",
            f"c.FGPU.data_dir: another Hub is running on {folder}; end it, or give this one another folder",
        )
        self._claim = Claim(settings.database_url())
        self._claim.take()

    def check_owners(self, sessions: Iterable[Session], *, end_unknown: bool) -> None:
        """Return if the Hub's database had the owners of all sessions that run.

        Who is not in it would lose the session: a Hub ends at its start what it does not know. Users are removed only
        after their servers have ended, so such a database is new, or older than the sessions are.

        Raises:
            BadSettings: it lacks some, and ``end_unknown`` does not say that theirs are to be ended.
        """
        unknown = [
            f"{session.request.user}/{session.request.server_name}"
            for session in sessions
            if session.state is SessionState.RUNNING and session.request.user not in self._owners
        ]
        if unknown and not end_unknown:
            named = ", ".join(unknown[:MOST_NAMED]) + (", ..." if len(unknown) > MOST_NAMED else "")
            raise BadSettings(
                "c.JupyterHub.db_url: the Hub's own database is new, or older than what runs: it does not know the "
                f"owners of {len(unknown)} running sessions ({named}); restore it, or have them ended by one start "
                "with c.FGPU.end_unknown_sessions = True"
            )

    async def look(self) -> None:
        """Take the claim anew where the database has given it up, as at its own restart.

        Raises:
            BadSettings: another Hub has it now.
            StoreUnavailable: the database does not answer.
        """
        await asyncio.to_thread(self._claim.take)
