"""The image worker: makes, renames and removes private images as owners and administrators ask.

It works from rows in the database, and every step can run again, so a crashed Hub loses no request. What a crash leaves
in the engine is found by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fgpu_scheduler import (
    UP,
    FGPUError,
    ImageQuota,
    ImageState,
    PrivateImage,
    PrivateImages,
    Session,
    Store,
    StoreUnavailable,
    check_size,
)
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import CannotSave, Engine, EngineSilent, SavedImage, SaveSpec
from fgpuspawner.images.model import Catalogue
from fgpuspawner.images.private import facts_of

log = logging.getLogger("fgpu.images")

LOOK_EVERY_S = 1.0
AGAIN_AFTER_S = 5.0
MOST_TRIES = 3
KEPT = (ImageState.WISHED, ImageState.COMMITTING, ImageState.READY)

Work = Callable[[PrivateImage], Coroutine[Any, Any, None]]


def kept_names(images: PrivateImages) -> set[str]:
    """Return the names of all private images that exist or are being made. Blocks."""
    rows = [row for row in images.all() if row.state in KEPT]
    return {name for row in rows for name in (row.reference, images.wanted_reference(row))}


class ImageWorker:
    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        catalogue: Callable[[], Catalogue],
        refresh: Callable[[], None],
        quota: ImageQuota,
    ) -> None:
        self._store = store
        self._images = PrivateImages(store)
        self._engine = engine
        self._catalogue = catalogue
        self._refresh = refresh
        self._quota = quota
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._tries: dict[int, int] = {}
        self._seen_version, self._look_at_s = -1, 0.0

    def begin(self, background: Background) -> None:
        background.every(LOOK_EVERY_S, self.look, failed="Private images could not be processed")

    async def look(self) -> None:
        """Start work on the rows, if any has changed or a retry is due."""
        now = time.monotonic()
        version = await asyncio.to_thread(self._store.version)
        if version == self._seen_version and now < self._look_at_s:
            return
        for row in await asyncio.to_thread(self._images.all):
            work = self._work_for(row)
            if work is not None and row.id not in self._busy:
                self._busy[row.id] = asyncio.create_task(self._guarded(row, work))
        self._seen_version, self._look_at_s = version, now + AGAIN_AFTER_S

    def _work_for(self, row: PrivateImage) -> Work | None:
        match row.state:
            case ImageState.WISHED | ImageState.COMMITTING:
                return self._make
            case ImageState.DELETING:
                return self._remove
            case ImageState.READY if row.reference != self._images.wanted_reference(row):
                return self._rename
            case _:
                return None

    async def _guarded(self, row: PrivateImage, work: Work) -> None:
        """Do one piece of work. A failure is retried at a later round, unless it is permanent."""
        try:
            await work(row)
        except Exception as e:
            foreseen = isinstance(e, StoreUnavailable | EngineSilent | CannotSave | OSError)
            said = "" if foreseen else "internal error: "
            log.warning(
                "Private image %s: %s%s. It is tried again",
                row.name,
                said,
                e,
                exc_info=None if foreseen else e,
            )
            await asyncio.sleep(AGAIN_AFTER_S)
        finally:
            del self._busy[row.id]

    # -- making one -----------------------------------------------------------------------------------

    async def _make(self, row: PrivateImage) -> None:
        try:
            await self._made(row)
        except (StoreUnavailable, EngineSilent):
            raise
        except FGPUError as e:
            if not (isinstance(e, CannotSave) and e.may_pass):
                await self._fail(row, str(e))
                return
            tries = self._one_more_try(row)
            session = await self._session_of(row)
            if session is None or session.state not in UP:
                await self._fail(row, "the session ended while it was being saved")
            elif tries >= MOST_TRIES:
                await self._fail(row, str(e))
            else:
                raise
        except OSError:
            raise
        except Exception:
            # Each try may pause the session, so the number of tries is limited.
            if self._one_more_try(row) < MOST_TRIES:
                raise
            log.exception("Private image %s: internal error", row.name)
            await self._fail(row, "internal error; the Hub's log says more")
        else:
            self._tries.pop(row.id, None)

    def _one_more_try(self, row: PrivateImage) -> int:
        tries = self._tries[row.id] = self._tries.get(row.id, 0) + 1
        return tries

    async def _made(self, row: PrivateImage) -> None:
        session = await self._session_of(row)
        if session is None or session.state not in UP:
            ended = "has ended" if session is None else f"is {session.state}"
            raise CannotSave(f"the session {ended}; only a running one can be saved")
        if self._engine.is_away(session):
            raise EngineSilent("the session's machine does not answer")
        base = self._catalogue().entry(row.base)
        facts = facts_of(base) if base is not None else ""
        begun = await self._now(self._images.begin, row.id, facts=facts)
        if begun is None:
            return
        log.info("Session %d is being saved as %s, for %s", row.session_id, row.name, row.asked_by)
        rows = await asyncio.to_thread(self._images.all)
        under = next((image for image in rows if image.name == begun.made_from), None)
        # Layers below count too: they stay when the lower image is deleted.
        inherited = (under.size_bytes or 0) if under is not None else 0
        saved = await self._engine.save_image(
            SaveSpec(
                session,
                begun,
                base,
                recipe=await asyncio.to_thread(self._images.recipe, under.id) if under is not None else None,
                under_id=under.image_id if under is not None else None,
                check=lambda written: check_size(self._images.all(), begun, inherited + written, self._quota),
                note=lambda message: self._note(begun, message),
                again=row.state is ImageState.COMMITTING,
            )
        )
        size_bytes = inherited + saved.size_bytes
        try:
            await self._note_made(row, saved, size_bytes)
        except FGPUError:
            # Too large, or deleted by its owner during the save.
            with contextlib.suppress(EngineSilent):
                await self._engine.delete_image(begun)
            raise
        await asyncio.to_thread(self._refresh)
        log.info("Session %d is saved as %s, %d bytes", row.session_id, row.name, size_bytes)

    async def _note_made(self, row: PrivateImage, saved: SavedImage, size_bytes: int) -> None:
        """Store that the image is made, even if the database is away for long: its session may end before."""
        while True:
            try:
                # The last try may have been stored and only its answer lost.
                if (await asyncio.to_thread(self._images.get, row.id)).image_id != saved.engines_id:
                    await self._now(
                        self._images.made,
                        row.id,
                        engines_id=saved.engines_id,
                        size_bytes=size_bytes,
                        recipe=saved.recipe,
                        server_kept=saved.server_kept,
                        quota=self._quota,
                    )
                return
            except StoreUnavailable as e:
                log.warning("Private image %s is made, and that cannot be noted yet: %s", row.name, e)
            await asyncio.sleep(AGAIN_AFTER_S)

    def _note(self, row: PrivateImage, message: str) -> None:
        with contextlib.suppress(StoreUnavailable):
            self._images.note(row.id, message, now_s=int(time.time()))

    async def _fail(self, row: PrivateImage, why: str) -> None:
        log.warning("Session %d is not saved as %s: %s", row.session_id, row.name, why)
        await self._now(self._images.fail, row.id, why)
        self._tries.pop(row.id, None)

    async def _session_of(self, row: PrivateImage) -> Session | None:
        return await asyncio.to_thread(self._store.session, row.session_id)

    # -- names and ends -------------------------------------------------------------------------------

    async def _rename(self, row: PrivateImage) -> None:
        wanted = self._images.wanted_reference(row)
        if await self._engine.rename_image(row, wanted):
            await self._now(self._images.tagged, row.id, wanted)
            await asyncio.to_thread(self._refresh)

    async def _remove(self, row: PrivateImage) -> None:
        await self._engine.delete_image(row)
        await self._now(self._images.removed, row.id)
        await asyncio.to_thread(self._refresh)

    async def _now(self, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(write, *args, **kwargs, now_s=int(time.time()))
