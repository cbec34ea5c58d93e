"""Makes sure that no other Hub serves the same sessions, and that running sessions still reach this one."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fgpu_scheduler import (
    UP,
    BadSettings,
    Claim,
    FGPUError,
    Session,
    lock_file,
)
from fgpuspawner.isolation.files import HubFile, write_whole
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu")

CHECK_EVERY_S = 30.0
NOTE = "installation"
"""File in the data folder with the id of the installation that it serves."""
URLS = HubFile("hub-urls.json", list[str])
"""File in the data folder with the addresses at which sessions reach the Hub and its service."""


class HubLock:
    """The locks of a running Hub: on its data folder, and the claim on the scheduler's database."""

    def __init__(self, app: Any) -> None:
        """Make the starting Hub take both before it opens, and possibly upgrades, its own database."""
        self._app = app
        self._init_db = app.init_db
        app.init_db = self._lock_and_init_db

    def _lock_and_init_db(self) -> None:
        try:
            settings = FGPU.from_config(self._app.config)
            self._data = settings.data_path()
            self._folder = lock_file(
                self._data / "hub.lock",
                f"c.FGPU.data_dir: another Hub is running on {self._data}; end it, or give this one another folder",
            )
            self._claim = Claim(settings.database_url())
            self._claim.take()
        except FGPUError as e:
            sys.exit(f"fgpuspawner: {e}")
        # Database files that this creates are readable by their owner only.
        usual = os.umask(0o077)
        try:
            self._init_db()
        finally:
            os.umask(usual)

    def serve(self, installation: str) -> None:
        """Take an installation on this machine, and record in the data folder that it is served from there.

        Raises:
            BadSettings: another Hub serves it from a copy of the database, or the folder has files of sessions of
                another installation.
        """
        # The kernel frees this name when the process ends; no file is left behind.
        self._name, name = socket.socket(socket.AF_UNIX), f"\0fgpu-hub-{installation}"
        try:
            self._name.bind(name)
            self._name.listen(0)
        except OSError:
            # Any account can take the name. Only a process of root or of this Hub's account is another Hub.
            if _account_of(name) in (0, os.geteuid()):
                raise BadSettings(
                    f"c.FGPU.db_url: another Hub on this machine serves installation {installation}, and this database "
                    "is a copy of that Hub's; end that Hub (ss -xap | grep fgpu-hub names its process), or give this "
                    "one another database"
                ) from None
            log.warning(
                "Another account has the name @%s (see ss -xap): copies of this database are not refused",
                name[1:],
            )
        note, files = self._data / NOTE, self._data / "limits"
        before = note.read_text() if note.exists() else ""
        if before == installation:
            return
        sessions = [path for path in files.glob("*") if path.name.isdigit()]
        if before and sessions:
            raise BadSettings(
                f"c.FGPU.db_url: this database is of installation {installation}, and {files} has files of "
                f"{len(sessions)} sessions of installation {before}; set it back, or end those and remove {files}"
            )
        write_whole(note, installation.encode(), mode=0o600)

    async def look(self) -> None:
        """Take the claim again if the database lost it, for example at its restart.

        Raises:
            BadSettings: another Hub has it now.
            StoreUnavailable: the database does not answer.
        """
        await asyncio.to_thread(self._claim.take)


def _account_of(name: str) -> int | None:
    """Return the user id of the process that listens on a Unix socket, from the kernel; None if there is none."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(1)
        try:
            asking.connect(name)
        except OSError:
            return None
        _, user_id, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(user_id)


def check_not_moved(data: Path, urls: Sequence[str], sessions: Iterable[Session]) -> None:
    """Store the ``urls`` at which sessions reach the Hub and its service.

    Raises:
        BadSettings: running sessions know others. Their log-ins and their pages' requests would fail.
        OSError: they cannot be stored.
    """
    known, wanted = URLS.read(data), list(urls)
    if known == wanted:
        return
    running = sum(session.state in UP for session in sessions)
    if known and running:
        before, after = next(((a, b) for a, b in zip(known, wanted, strict=False) if a != b), (known, wanted))
        raise BadSettings(
            f"c.FGPU.hub_address, c.JupyterHub.hub_ip or a port: {running} running sessions reach this Hub at {before}, "
            f"and it would be at {after}; set it back and let them end first (a drain), or remove {data / URLS.name} to "
            "cut them off"
        )
    URLS.write(data, wanted)
