"""The catalogue as it is now: file and database, read again while the Hub and the service run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from fgpu_scheduler import ImageEdits, PrivateImage, PrivateImages, Store, StoreUnavailable
from fgpuspawner.images.catalogue import CatalogueError, parse_catalogue, read_file
from fgpuspawner.images.edits import Merged, merge
from fgpuspawner.images.model import Catalogue
from fgpuspawner.images.private import private_entries

log = logging.getLogger("fgpu.images")

REFRESH_EVERY_S = 2.0
SETTLED_AFTER_S = 0.1
"""A file that changes within this time is still being written."""


class Images:
    """The last good catalogue. Thread-safe: what is read is replaced as a whole, never changed.

    ``catalogue`` is what is in force: the last good file, with the edits of the database, and private images. It is
    empty until the database was read once, so that no user starts what an administrator has disabled. ``problem`` is
    the one line that says what is wrong with the file now, or None; ``trouble`` what is wrong with the database.
    ``listed`` says of each image where it comes from. ``names`` are the images' names by slug, also of those that were
    removed while this process ran: sessions may still be of them.
    """

    def __init__(self, path: Path | str, store: Store, *, must_be_good: bool = True) -> None:
        """Read the file."""
        self.path = Path(path)
        self.problem: str | None = None
        self.trouble: str | None = None
        self.listed = Merged(())
        self.catalogue = Catalogue(())
        self.names: dict[str, str] = {}
        self._edits = ImageEdits(store)
        self._private = PrivateImages(store)
        self._lock = threading.Lock()
        self._raw: bytes | None = None
        self._file: Catalogue | None = None
        self._file_is_new(settled=True)
        if self.problem is not None:
            if must_be_good:
                raise CatalogueError(self.problem)
            log.error("The catalogue cannot be used: %s", self.problem)

    @property
    def file(self) -> Catalogue:
        """What the last good file alone says."""
        return self._file or Catalogue(())

    def refresh(self) -> None:
        """Read file and database again if they changed. Blocks; a failure keeps what there is."""
        with self._lock:
            before = self.problem
            if self._file_is_new() and self.problem is None and before is not None:
                log.info("The catalogue can be used again")
            elif self.problem not in (None, before):
                kept = "; the last good one stays in force" if self._file is not None else ""
                log.error("The catalogue cannot be used%s: %s", kept, self.problem)
            try:
                edits, private = self._edits.all(), self._private.all()
            except (StoreUnavailable, SQLAlchemyError) as e:
                said = " ".join(str(getattr(e, "orig", None) or e).split())[:300]
                if said != self.trouble:
                    log.warning("The catalogue's changes in the database cannot be read: %s", said)
                self.trouble = said
                return
            self.trouble = None
            if self._file is not None:
                self._put_together(merge(self._file, edits), private)

    def _file_is_new(self, *, settled: bool = False) -> bool:
        """Read the file where it has changed, and say whether anything is different now."""
        try:
            raw = self._bytes()
            if raw == self._raw:
                return False
            if not settled:
                time.sleep(SETTLED_AFTER_S)
                if self._bytes() != raw:
                    return False
            self._raw = raw
            self._file = parse_catalogue(raw, name=self.path.name)
        except CatalogueError as e:
            self.problem = str(e)
        except Exception as e:
            # Whatever it is, it is told as any other problem: the same bytes are not looked at again.
            log.exception("The catalogue's file could not be read")
            self.problem = f"{self.path.name}: cannot be read: {type(e).__name__}"
        else:
            self.problem = None
        return True

    def _bytes(self) -> bytes:
        try:
            return read_file(self.path)
        except CatalogueError:
            # What comes back may be what was there before.
            self._raw = None
            raise

    def _put_together(self, listed: Merged, private: Sequence[PrivateImage]) -> None:
        shared = listed.catalogue
        catalogue = Catalogue((*shared.images, *private_entries(private, shared)))
        for problem in listed.problems:
            if problem not in self.listed.problems:
                log.warning("The catalogue: %s", problem)
        if catalogue != self.catalogue and self.catalogue.images:
            log.info("The catalogue has changed: %s", told(self.catalogue, catalogue))
        self.names.update((image.slug, image.name) for image in catalogue.images)
        self.listed, self.catalogue = listed, catalogue


def told(before: Catalogue, after: Catalogue) -> str:
    """Return in words what became of the images."""
    old, new = ({image.slug: image for image in one.images} for one in (before, after))
    parts = {
        "new": [slug for slug in new if slug not in old],
        "changed": [slug for slug in new if slug in old and new[slug] != old[slug]],
        "gone": [slug for slug in old if slug not in new],
    }
    return "; ".join(f"{what}: {', '.join(slugs)}" for what, slugs in parts.items() if slugs) or "its order"
