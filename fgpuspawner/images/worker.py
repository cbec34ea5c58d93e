"""The Hub's image worker: acts on what owners and administrators wish of private images.

It alone makes, names and removes them, and everything that it does can be begun anew: it goes by the rows of the
database, so a Hub that dies in between loses no wish. What a crash leaves on an engine is known by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import docker
from docker.errors import APIError, DockerException

from fgpu_scheduler import FGPUError, Session, SessionState, StoreUnavailable
from fgpu_scheduler.private_image import ImageQuota, ImageState, PrivateImage, check_size
from fgpu_scheduler.private_images import PrivateImages
from fgpu_scheduler.store import Store
from fgpuspawner.containers import GONE, EngineSilent
from fgpuspawner.engines import Engine, Engines
from fgpuspawner.images import committing, recipe
from fgpuspawner.images.committing import CannotCommit, Committed
from fgpuspawner.images.model import Catalogue
from fgpuspawner.images.private import facts_of
from fgpuspawner.waiting import in_a_thread_of_its_own

log = logging.getLogger("fgpu.images")

LOOK_EVERY_S = 1.0
AGAIN_AFTER_S = 5.0
SWEEP_EVERY_S = 600.0
MOST_TRIES = 3
SILENT_S = 7200
"""An engine whose machine is there may say nothing for so long: it copies all that a session has written."""
UNFORESEEN = "it failed in a way that was not foreseen; an administrator finds more in the log of the Hub"
NO_CONTAINERS = "sessions here are local processes; only containers can be saved as images"
AFTER_SILENCE = "the machine that the session was on is not configured any more"


class ImageWorker:
    """One for the Hub. ``engines`` is None where sessions are no containers: then every wish fails, and says so."""

    def __init__(
        self,
        store: Store,
        engines: Engines | None,
        *,
        catalogue: Callable[[], Catalogue],
        refresh: Callable[[], None],
        quota: ImageQuota,
    ) -> None:
        self._store = store
        self._images = PrivateImages(store)
        self._engines = engines
        self._catalogue = catalogue
        self._refresh = refresh
        self._quota = quota
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._tries: dict[int, int] = {}
        self._locks: dict[Engine, asyncio.Lock] = {}
        self._unswept: set[Engine] = set()

    async def run(self) -> None:
        """Work for as long as this is not cancelled."""
        await asyncio.gather(self._look_always(), self._sweep_always())

    async def _look_always(self) -> None:
        version, again_at = -1, 0.0
        while True:
            try:
                now = time.monotonic()
                newest = await asyncio.to_thread(self._store.version)
                if newest != version or now >= again_at:
                    self._begin(await asyncio.to_thread(self._images.all))
                    version, again_at = newest, now + AGAIN_AFTER_S
            except FGPUError as e:
                log.warning("Private images are not looked after now: %s", e)
            except Exception:
                # Nobody waits for this task: without it no wish would be heard until the Hub is started again.
                log.exception("Private images are not looked after now")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _sweep_always(self) -> None:
        """Sweep every engine, each for itself: one that is silent delays no other."""
        engines = self._engines.engines if self._engines is not None else ()
        await asyncio.gather(*(self._sweep_one_always(engine) for engine in engines))

    async def _sweep_one_always(self, engine: Engine) -> None:
        sweep_at = 0.0
        while True:
            if time.monotonic() >= sweep_at:
                sweep_at = time.monotonic() + SWEEP_EVERY_S
                self._unswept.add(engine)
            if engine in self._unswept and engine.answers:
                await self._sweep(engine)
            await asyncio.sleep(LOOK_EVERY_S)

    def _begin(self, rows: tuple[PrivateImage, ...]) -> None:
        for row in rows:
            work = self._work_for(row)
            if work is None or row.id in self._busy:
                continue
            self._busy[row.id] = asyncio.create_task(self._guarded(row, work))

    def _work_for(self, row: PrivateImage) -> Callable[[PrivateImage], Coroutine[Any, Any, None]] | None:
        match row.state:
            case ImageState.WISHED | ImageState.COMMITTING:
                return self._make
            case ImageState.DELETING:
                return self._remove
            case ImageState.READY if row.reference != self._images.wanted_reference(row):
                return self._tag_anew
            case _:
                return None

    async def _guarded(
        self, row: PrivateImage, work: Callable[[PrivateImage], Coroutine[Any, Any, None]]
    ) -> None:
        """Do some work; what fails is tried again at the next look, unless it says that it never can."""
        try:
            await work(row)
        except (StoreUnavailable, EngineSilent, DockerException, OSError, *GONE) as e:
            log.warning("Private image %s: %s. It is tried again", row.name, e)
            await asyncio.sleep(AGAIN_AFTER_S)
        except Exception:
            log.exception("Private image %s: this was not foreseen. It is tried again", row.name)
            await asyncio.sleep(AGAIN_AFTER_S)
        finally:
            del self._busy[row.id]

    # -- making one -----------------------------------------------------------------------------------

    async def _make(self, row: PrivateImage) -> None:
        try:
            await self._made(row)
        except FGPUError as e:
            if isinstance(e, StoreUnavailable | EngineSilent):
                raise
            await self._fail(row, str(e))
        except APIError as e:
            tries = self._one_more_try(row)
            session = await self._session_of(row)
            if session is None or session.state is not SessionState.RUNNING:
                await self._fail(row, "the session ended while it was being saved")
            elif tries >= MOST_TRIES or "no space left" in str(e.explanation):
                await self._fail(row, _in_words(e))
            else:
                raise
        except (DockerException, OSError, *GONE):
            raise
        except Exception:
            # Each try may pause the session: there is an end to them.
            if self._one_more_try(row) < MOST_TRIES:
                raise
            log.exception("Private image %s: this was not foreseen", row.name)
            await self._fail(row, UNFORESEEN)
        else:
            self._tries.pop(row.id, None)

    def _one_more_try(self, row: PrivateImage) -> int:
        tries = self._tries[row.id] = self._tries.get(row.id, 0) + 1
        return tries

    async def _made(self, row: PrivateImage) -> None:
        if self._engines is None:
            raise CannotCommit(NO_CONTAINERS)
        session = await self._session_of(row)
        if session is None or session.state is not SessionState.RUNNING:
            ended = "has ended" if session is None else f"is {session.state}"
            raise CannotCommit(f"the session {ended}; only one that runs can be saved")
        if not self._engines.has_node(row.node_id):
            raise CannotCommit(AFTER_SILENCE)
        engine = self._engines.of_node(row.node_id)
        if not engine.answers:
            raise EngineSilent(f"{engine.address} does not answer")
        async with self._lock(engine):
            base = self._catalogue().entry(row.base)
            facts = facts_of(base) if base is not None else ""
            begun = await self._now(self._images.begin, row.id, facts=facts)
            if begun is None:
                return
            log.info("Session %d is being saved as %s, for %s", row.session_id, row.name, row.asked_by)
            made, text = await in_a_thread_of_its_own(self._commit, engine, begun, session)
            try:
                await self._note_made(row, made, text)
            except FGPUError:
                # Too large, or not wished any more.
                with contextlib.suppress(DockerException, *GONE):
                    await engine.containers.call(committing.remove, engine.containers.client, row.reference)
                raise
        await asyncio.to_thread(self._refresh)
        log.info("Session %d is saved as %s, %d bytes", row.session_id, row.name, made.size_bytes)

    async def _note_made(self, row: PrivateImage, made: Committed, recipe_text: str) -> None:
        """Keep that it is made, however long the database is away: its session may have ended by then."""
        while True:
            try:
                # The last try may have been kept, and only its answer lost.
                if (await asyncio.to_thread(self._images.get, row.id)).image_id != made.engines_id:
                    await self._now(
                        self._images.made,
                        row.id,
                        engines_id=made.engines_id,
                        size_bytes=made.size_bytes,
                        recipe=recipe_text,
                        quota=self._quota,
                    )
                return
            except StoreUnavailable as e:
                log.warning("Private image %s is made, and that cannot be noted yet: %s", row.name, e)
            await asyncio.sleep(AGAIN_AFTER_S)

    def _commit(self, engine: Engine, row: PrivateImage, session: Session) -> tuple[Committed, str]:
        """Make the image and its recipe. Blocks for as long as the engine takes."""
        rows = self._images.all()
        under = next((i for i in rows if i.name == row.made_from), None)
        # What is under it counts for it, too: it stays when that is deleted.
        inherited = (under.size_bytes or 0) if under is not None else 0
        name = engine.containers.name(session)
        with _patient(engine) as client:
            found = client.inspect_container(name)
            committing.refuse_what_cannot_be_saved(found)
            check_size(rows, row, inherited + committing.written_bytes(client, found["Id"]), self._quota)
            self._note(row, "what was installed is being recorded")
            text = self._recipe(client, found, row, under)
            made = committing.commit(
                client,
                name,
                row,
                installation=self._store.installation_id,
                note=lambda message: self._note(row, message),
                made_at_s=int(time.time()),
            )
        return Committed(made.engines_id, inherited + made.size_bytes), text

    def _recipe(
        self, client: Any, container: dict[str, Any], row: PrivateImage, under: PrivateImage | None
    ) -> str:
        image = self._catalogue().entry(row.base)
        reference = image.reference if image is not None else str(container["Config"]["Image"])
        base = recipe.base_of(client.inspect_image(container["Image"]), reference)
        before = self._images.recipe(under.id) if under is not None else None
        helper = committing.helper_of(self._store.installation_id, row.id)
        return recipe.recorded(client, container["Id"], base, name=row.name, helper=helper, before=before)

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

    async def _tag_anew(self, row: PrivateImage) -> None:
        if self._engines is None:
            return
        wanted = self._images.wanted_reference(row)
        has = False
        for engine in self._engines.engines:
            if engine.answers:
                async with self._lock(engine):
                    client = engine.containers.client
                    has |= await engine.containers.call(committing.tag_anew, client, row, wanted)
        # Where it is known only by its old name, it is copied to when it is needed.
        home = self._home_of(row)
        if has and (home is None or home.answers):
            await self._now(self._images.tagged, row.id, wanted)
            await asyncio.to_thread(self._refresh)
            self._unswept = set(self._engines.engines)

    async def _remove(self, row: PrivateImage) -> None:
        home = self._home_of(row)
        if home is not None and not home.answers:
            raise EngineSilent(f"{home.address} does not answer")
        if self._engines is not None:
            for engine in self._engines.engines:
                if engine.answers:
                    async with self._lock(engine):
                        client = engine.containers.client
                        if not await engine.containers.call(committing.remove, client, row.reference):
                            raise EngineSilent(f"{engine.address} does not remove it yet")
        await self._now(self._images.removed, row.id)
        await asyncio.to_thread(self._refresh)

    def _home_of(self, row: PrivateImage) -> Engine | None:
        if self._engines is None or not self._engines.has_node(row.node_id):
            return None
        return self._engines.of_node(row.node_id)

    async def _sweep(self, engine: Engine) -> None:
        """Remove what a crash has left, and what was deleted while its engine was away."""
        async with self._lock(engine):
            # Before: what is renamed meanwhile asks for another sweep.
            self._unswept.discard(engine)
            try:
                await engine.containers.call(self._swept, engine.containers.client)
                return
            except (FGPUError, DockerException, *GONE) as e:
                log.warning("Private images that nobody has any more stay on %s: %s", engine.address, e)
            except Exception:
                log.exception("Private images that nobody has any more stay on %s", engine.address)
            self._unswept.add(engine)

    def _swept(self, client: docker.APIClient) -> None:
        # First, because no image that they were made from can be removed before. None is in use while the lock is held.
        committing.remove_helpers(client, self._store.installation_id)

        def known() -> set[str]:
            kept = (ImageState.WISHED, ImageState.COMMITTING, ImageState.READY)
            rows = [row for row in self._images.all() if row.state in kept]
            return {name for row in rows for name in (row.reference, self._images.wanted_reference(row))}

        for name in committing.left_behind(client, self._store.installation_id, known):
            log.info("Image %s belongs to nobody any more, and is removed", name)
            committing.remove(client, name)

    # -- helpers --------------------------------------------------------------------------------------

    def _lock(self, engine: Engine) -> asyncio.Lock:
        """Return what is held while images of an engine are made, named or removed: one at a time."""
        return self._locks.setdefault(engine, asyncio.Lock())

    async def _now(self, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(write, *args, **kwargs, now_s=int(time.time()))


@contextlib.contextmanager
def _patient(engine: Engine) -> Iterator[Any]:
    """Give a client that waits for as long as a commit takes."""
    client = engine.another_client(timeout_s=SILENT_S)
    try:
        yield client
    finally:
        client.close()


def _in_words(error: APIError) -> str:
    text = " ".join(str(error.explanation or error).split())
    if "no space left" in text:
        return "the disk of the session's machine is full; ask an administrator"
    return f"the Docker engine did not save it: {text[:200]}"


__all__ = ["ImageWorker"]
