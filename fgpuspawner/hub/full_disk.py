"""A full disk of the Hub: the reserve that it then frees, and what it stops writing.

JupyterHub records at every request when a token and a user were last seen; if it cannot, it treats a valid token as
invalid. So on a full disk activity is not recorded. The reserve leaves room for log-ins and for the ends of sessions,
which free space.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyterhub.handlers.pages import HealthCheckHandler
from jupyterhub.utils import maybe_future
from sqlalchemy.exc import SQLAlchemyError

from fgpu_scheduler import FGPUError
from fgpuspawner.concurrency.background import Background
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.settings.room import Room, room_of

log = logging.getLogger("fgpu")

EVERY_S = 2.0
SAY_AGAIN_AFTER = 150
"""Checks after which a disk that is still full is logged again."""
FILES = 16
MOST_BYTES = 32 << 20
SHARE = 16
"""On a small file system the reserve is at most a sixteenth of it."""
NEVER_S = 100 * 365 * 24 * 3600
LOOK_WITHIN_S = 5.0
LOOK_AGAIN_S = 1.0
ANNOUNCEMENT = (
    "The disk of this Hub is full. What runs goes on, but log-ins and starts can fail. Ask an administrator."
)


class Reserve:
    """Files that hold blocks and inodes until they are needed. Everything blocks."""

    def __init__(self, data: Path) -> None:
        self._folder = data / "reserve"

    def make(self, room: Room) -> None:
        """Make missing files while there is plenty of room."""
        bytes_each = min(MOST_BYTES, room.total_bytes // SHARE) // FILES
        left = room.free_bytes
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(FILES):
            path = self._folder / str(number)
            if path.exists():
                continue
            left -= bytes_each
            if Room(left, room.total_bytes, room.files).short:
                return
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, bytes_each)

    def give_up(self) -> bool:
        """Remove all files; return whether there were any."""
        there = list(self._folder.glob("*"))
        for path in there:
            path.unlink(missing_ok=True)
        return bool(there)


class HubDisk:
    """Watches the file system of the Hub's data."""

    def __init__(self, app: Any, data: Path) -> None:
        self._app = app
        self._data = data
        self._reserve = Reserve(data)
        self._looks = 0
        self._usual: tuple[Any, Any] | None = None
        self.room = room_of(data)

    def begin(self, background: Background) -> None:
        """Check at once and then periodically."""
        self._note(self._looked())
        background.every(
            EVERY_S, self.look, failed="The room on the Hub's disk cannot be looked at", foreseen=(OSError,)
        )

    async def look(self) -> None:
        self._note(await asyncio.to_thread(self._looked))

    def _looked(self) -> Room:
        room = room_of(self._data)
        if room.short:
            if self._reserve.give_up():
                log.error("%s The Hub's reserve of room was given up", room.words(self._data))
        else:
            try:
                self._reserve.make(room)
            except OSError as e:
                log.debug("The reserve of room cannot be made: %s", e)
        return room

    def _note(self, room: Room) -> None:
        self.room = room
        if not self._app.db.is_active:
            # A failed write left the session in an aborted transaction, in which nothing can be read.
            self._app.db.rollback()
        if not room.short:
            if self._looks:
                log.warning("There is room on the Hub's disk again")
            self._looks = 0
        else:
            if self._looks % SAY_AGAIN_AFTER == 0:
                log.error("%s", room.words(self._data))
            self._looks += 1
        self._let_the_hub_know(short=room.short)

    def _let_the_hub_know(self, *, short: bool) -> None:
        """While the disk is full: stop the Hub from recording activity, and announce the reason on its pages."""
        application = getattr(self._app, "tornado_application", None)
        if application is None:
            return  # The next check finds it.
        settings = application.settings
        if short and self._usual is None:
            self._usual = settings.get("activity_resolution", 0), settings.get("template_vars")
            settings["activity_resolution"] = NEVER_S
            settings["template_vars"] = {**(self._usual[1] or {}), "announcement": ANNOUNCEMENT}
        elif not short and self._usual is not None:
            settings["activity_resolution"], settings["template_vars"] = self._usual
            self._usual = None

    def give_up(self) -> None:
        """Free the reserve for what the ending Hub writes."""
        try:
            if room_of(self._data).short:
                self._reserve.give_up()
        except OSError as e:
            log.warning("The reserve of room could not be given up: %s", e)


def exit_on_full_disk(app: Any, watch: HubDisk) -> None:
    """Let the Hub end when told to, even if it cannot write to its database."""
    usual = app.cleanup

    async def cleanup() -> None:
        watch.give_up()
        try:
            await usual()
        except SQLAlchemyError as e:
            log.error("The Hub ends without having noted everything in its database: %s", e)
            app.db.rollback()
            if app.cleanup_proxy and app.proxy.should_start:
                await maybe_future(app.proxy.stop())

    app.cleanup = cleanup


class Writable:
    """Whether the scheduler's database can be written: one check for all requests of about the same time.

    Anybody may ask at any rate, and each check takes the lock that submissions, starts and ends wait for.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._look: asyncio.Future[bool] | None = None
        self._until = 0.0

    async def now(self) -> bool:
        look = self._look
        if look is None or (look.done() and asyncio.get_running_loop().time() >= self._until):
            look = self._look = asyncio.ensure_future(self._looked())
        try:
            async with asyncio.timeout(LOOK_WITHIN_S):
                return await asyncio.shield(look)
        except TimeoutError:
            return False

    async def _looked(self) -> bool:
        try:
            await asyncio.to_thread(self._check)
        except FGPUError:
            return False
        finally:
            self._until = asyncio.get_running_loop().time() + LOOK_AGAIN_S
        return True


class Health(HealthCheckHandler):  # type: ignore[misc]
    """The Hub's health for monitors, without log-in and without details."""

    watch: HubDisk
    runtime: Runtime
    writable: Writable

    async def prepare(self) -> None:
        """Skip authentication: it would query the Hub's database."""

    async def get(self) -> None:
        room = self.watch.room
        disk = "full" if room.full else "short" if room.short else "ok"
        parts = {"disk": disk, "database": "ok", "engine": "ok"}
        if not await self.writable.now():
            parts["database"] = "cannot be written"
        answering, silent = self.runtime.engine.answering()
        if silent:
            parts["engine"] = "some machines are silent" if answering else "silent"
        if why := self.runtime.why_not_all():
            parts["sessions"] = why
        works = parts["database"] == "ok" and parts["disk"] != "full" and parts["engine"] != "silent"
        works = works and self.runtime.has_begun
        fine = all(word == "ok" for word in parts.values())
        self.set_status(200 if works else 503)
        self.set_header("Cache-Control", "no-store")
        self.finish({"status": "ok" if fine else "degraded" if works else "unavailable", **parts})

    head = get


def serve_health(app: Any, watch: HubDisk, runtime: Runtime) -> None:
    """Replace the handler of the Hub's health address."""
    writable = Writable(runtime.store.check_writable)
    own = type("Health", (Health,), {"watch": watch, "runtime": runtime, "writable": writable})
    # In place: JupyterHub starts with this list object.
    app.handlers[:] = [
        (entry[0], own, *entry[2:]) if entry[1] is HealthCheckHandler else entry for entry in app.handlers
    ]
