"""Whether the database answers, as far as those who need it now can tell."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("fgpu.scheduler")


class Away:
    """True while somebody waits for the database in vain. Tells of both turns, once each."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._waiting: set[object] = set()
        self._changed = changed

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def lacks(self, who: object) -> None:
        """Note that ``who`` needs the database and gets no answer. Idempotent."""
        before = bool(self)
        self._waiting.add(who)
        if not before:
            log.warning("The scheduler's database does not answer; what needs it waits, and nothing is lost")
            self._changed()

    def has(self, who: object) -> None:
        """Note that ``who`` has had an answer, or waits for none any more. Idempotent."""
        before = bool(self)
        self._waiting.discard(who)
        if before and not self:
            log.info("The scheduler's database answers again")
            self._changed()
