"""Disk use of running sessions, and a full disk of the Hub.

`SessionDisks` warns the owner of a session above its limit, and then ends the session.

JupyterHub records at every request when a token and a user were last seen; if it cannot, it treats a valid token as
invalid. So `HubDisk` stops that recording on a full disk. It also frees a reserve, which leaves room for log-ins and for
the ends of sessions, which free space.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from jupyterhub.utils import maybe_future
from sqlalchemy.exc import SQLAlchemyError

from fgpu_scheduler import (
    MIB,
    UP,
    EndCause,
    FGPUError,
    NodeAction,
    Queue,
    Session,
    Store,
    SystemClock,
    act_on_gpu,
    duration,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import Engine, EngineSilent
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.meter.disk import (
    DISK,
    DiskHistory,
    DiskLimits,
    DiskUse,
    above_words,
    amounts,
    judged,
)
from fgpuspawner.meter.file_system import LEAST, counted, used_bytes
from fgpuspawner.settings.room import Room, room_of

log = logging.getLogger("fgpu.disk")

CHECK_EVERY_S = 2.0
SAY_AGAIN_AFTER = 150
"""Checks after which a disk that is still full is logged again."""
FILES = 16
MOST_BYTES = 32 << 20
SHARE = 16
"""On a small file system the reserve is at most a sixteenth of it."""
NEVER_S = 100 * 365 * 24 * 3600
ANNOUNCEMENT = (
    "The disk of this Hub is full. What runs goes on, but log-ins and starts can fail. Ask an administrator."
)
FIRST_COUNT_S = 600
"""The first count reads all folders, which may take minutes: not right after the start."""
REMOVED = "taken by removed files that are still open"


def close_machine(store: Store, isolation: Isolation, reason: str | None) -> None:
    """Cordon this machine's GPUs with the disk watch's reason; with None uncordon those that it cordoned. Blocks.

    Raises:
        FGPUError: the database could not be written.
    """
    now_s = SystemClock().now_s()
    action = NodeAction.UNCORDON if reason is None else NodeAction.CORDON
    for node in store.snapshot(now_s).nodes:
        for device in () if isolation.is_elsewhere(node.id) else node.devices:
            if REMOVED in (device.cordon_reason or "") if reason is None else not device.cordoned:
                act_on_gpu(
                    store, node.id, device.uuid, action, reason=reason or "", by="the disk watch", now_s=now_s
                )


class SessionDisks:
    """Checks the disk use of sessions. ``close(reason)`` stops starts on this machine, ``close(None)`` allows them."""

    def __init__(
        self,
        engine: Engine,
        queue: Queue,
        limits: DiskLimits,
        *,
        data: Path,
        every_s: int,
        close: Callable[[str | None], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._limits = limits
        self._data = data
        self._every_s = every_s
        self._histories: dict[int, DiskHistory] = {}
        self._warned: dict[int, str] = {}
        self._close = close
        #: Bytes used of each file system that sessions write to, when its files were last counted; -1: never.
        self._used = dict.fromkeys(filter(os.path.ismount, LEAST.read(data)), -1)
        #: Bytes in removed files, by file system with too many; None: not counted yet.
        self._closed_for: dict[str, int] | None = None

    def begin(self, background: Background) -> None:
        """Check periodically; a long check delays the next one."""
        background.every(
            self._every_s,
            self.look,
            failed="The disk use of sessions could not be read",
            foreseen=(OSError,),
        )
        background.every(
            self._every_s,
            self.compare,
            failed="The disk use of removed files could not be read",
            first_after_s=FIRST_COUNT_S,
            foreseen=(OSError, FGPUError),
        )

    async def look(self) -> None:
        """Check every running session, one after another: reading folders keeps a disk busy."""
        running = [s for s in await self._queue.live() if s.state in UP]
        ids = {s.id for s in running}
        self._histories = {i: history for i, history in self._histories.items() if i in ids}
        self._warned = {i: words for i, words in self._warned.items() if i in ids}
        use_words: dict[int, str] = {}
        for session in running:
            try:
                use = await self._engine.disk_use(session)
            except EngineSilent as e:
                log.debug("Session %d: %s", session.id, e)
                continue
            except Exception:
                # A failure for this session alone: the others are still checked.
                log.exception("The disk use of session %d could not be read", session.id)
                continue
            for mount in use.mounts:
                self._used.setdefault(mount, -1)
            if use != DiskUse():
                use_words[session.id] = amounts(use, self._limits)
                try:
                    await self._judge(session, use)
                except FGPUError as e:
                    log.error("Session %d takes too much of the disk, and cannot be told: %s", session.id, e)
        await asyncio.to_thread(DISK.write, self._data, use_words)

    async def compare(self) -> None:
        """Close this machine while removed files that are still open take more of a file system than a session may.

        Counting reads all its files, so it is done only when the used bytes have changed by half of that.
        """
        most = self._limits.session.mib * MIB
        found = dict(self._closed_for or {})
        for top in tuple(self._used) if most else ():
            used = used_bytes(top)
            if self._used[top] >= 0 and top not in found and abs(used - self._used[top]) <= most / 2:
                continue
            amount = await self._nameless(top)
            # Files come and go during a count, so the lower of two counts is used.
            amount = amount if amount <= most else min(amount, await self._nameless(top))
            self._used[top] = used
            found.pop(top, None)
            if amount > most:
                found[top] = amount
        if self._closed_for is None or found.keys() != self._closed_for.keys():
            words = " and ".join(f"{amount / 2**30:.1f} GiB of {top}" for top, amount in found.items())
            if found:
                log.error("%s are %s: no session starts on this machine", words, REMOVED)
            await self._close(f"{words} are {REMOVED}" if found else None)
        self._closed_for = found

    async def _nameless(self, top: str) -> int:
        """Return what files without a name take, beyond the lowest amount ever seen.

        Raises:
            OSError: they cannot be counted.
        """
        found, at_most = await in_a_thread_of_its_own(counted, top, self._data)
        least = LEAST.read(self._data)
        if at_most < least.setdefault(top, at_most + 1):
            LEAST.write(self._data, {**least, top: at_most})
        return max(0, found - least[top])

    async def _judge(self, session: Session, use: DiskUse) -> None:
        history, ends = judged(self._histories.get(session.id), use, self._limits, time.monotonic())
        words = above_words(use, self._limits)
        if ends:
            log.error("Session %d: %s: it is ended", session.id, words)
            message = f"your session was ended: {words}, also after a warning. Make room in your next session"
            await self._queue.end(session.id, EndCause.DISK_LIMIT, message)
        elif history.above_since_s is not None and session.id not in self._warned:
            log.warning("Session %d: %s: its owner is warned", session.id, words)
            grace_s, or_else = self._limits.grace_s, ""
            if grace_s is not None:
                or_else = (
                    f" within {duration(grace_s)}, or the session is ended; sooner if it takes much more"
                )
            warning = f"{words}. Remove files that you do not need{or_else}"
            await self._queue.warn(session.id, warning, EndCause.DISK_LIMIT)
            self._warned[session.id] = warning
        elif history.above_since_s is None and (said := self._warned.get(session.id)) is not None:
            log.info("Session %d is within its limit of the disk again", session.id)
            if session.message == said:
                await self._queue.warn(session.id, None)
            del self._warned[session.id]
        self._histories[session.id] = history


class HubDisk:
    """Watches the file system of the Hub's data. It keeps a reserve: files that hold blocks and inodes until needed."""

    def __init__(self, app: Any, data: Path) -> None:
        self._app = app
        self._data = data
        self._reserve = data / "reserve"
        #: Checks since the disk has been full.
        self._full_checks = 0
        #: The Hub's settings of activity and templates, while they are replaced.
        self._usual: tuple[Any, Any] | None = None
        self.room = room_of(data)

    def begin(self, background: Background) -> None:
        """Check at once and then periodically."""
        self._apply(self._checked())
        background.every(
            CHECK_EVERY_S,
            self.look,
            failed="The room on the Hub's disk could not be checked",
            foreseen=(OSError,),
        )

    async def look(self) -> None:
        self._apply(await asyncio.to_thread(self._checked))

    def _checked(self) -> Room:
        """Return the room on the disk, once the reserve is filled, or freed where room is short. Blocks."""
        room = room_of(self._data)
        if room.short:
            if self._free_reserve():
                log.error("%s The Hub's reserve of room was given up", room.words(self._data))
        else:
            try:
                self._fill_reserve(room)
            except OSError as e:
                log.debug("The reserve of room cannot be made: %s", e)
        return room

    def _fill_reserve(self, room: Room) -> None:
        """Make missing files while there is plenty of room."""
        bytes_each = min(MOST_BYTES, room.total_bytes // SHARE) // FILES
        left = room.free_bytes
        self._reserve.mkdir(mode=0o700, exist_ok=True)
        for number in range(FILES):
            path = self._reserve / str(number)
            if path.exists():
                continue
            left -= bytes_each
            if Room(left, room.total_bytes, room.files).short:
                return
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, bytes_each)

    def _free_reserve(self) -> bool:
        there = list(self._reserve.glob("*"))
        for path in there:
            path.unlink(missing_ok=True)
        return bool(there)

    def _apply(self, room: Room) -> None:
        """Log a full disk. While it is full, stop the Hub from recording activity, and say so on its pages."""
        self.room = room
        if not self._app.db.is_active:
            # A failed write left the session in an aborted transaction, in which nothing can be read.
            self._app.db.rollback()
        if room.short and self._full_checks % SAY_AGAIN_AFTER == 0:
            log.error("%s", room.words(self._data))
        elif not room.short and self._full_checks:
            log.warning("There is room on the Hub's disk again")
        self._full_checks = self._full_checks + 1 if room.short else 0
        application = getattr(self._app, "tornado_application", None)
        if application is None:
            return  # The next check finds it.
        settings = application.settings
        if room.short and self._usual is None:
            self._usual = settings.get("activity_resolution", 0), settings.get("template_vars")
            settings["activity_resolution"] = NEVER_S
            settings["template_vars"] = {**(self._usual[1] or {}), "announcement": ANNOUNCEMENT}
        elif not room.short and self._usual is not None:
            settings["activity_resolution"], settings["template_vars"] = self._usual
            self._usual = None

    def exit_on_full_disk(self) -> None:
        """Let the Hub end when told to, even if it cannot write to its database."""
        app, usual = self._app, self._app.cleanup

        async def cleanup() -> None:
            try:
                # What the ending Hub writes needs the reserve.
                if room_of(self._data).short:
                    self._free_reserve()
            except OSError as e:
                log.warning("The reserve of room could not be given up: %s", e)
            try:
                await usual()
            except SQLAlchemyError as e:
                log.error("The Hub ends without having noted everything in its database: %s", e)
                app.db.rollback()
                if app.cleanup_proxy and app.proxy.should_start:
                    await maybe_future(app.proxy.stop())

        app.cleanup = cleanup
