"""Turns: of each caller so many requests are worked on at a time, so that no one's many keep everybody else waiting."""

from __future__ import annotations

from asyncio import Semaphore
from dataclasses import dataclass


class TooMany(Exception):
    """So many of one caller are there already that another is not let in."""


@dataclass(slots=True)
class _Line:
    turns: Semaphore
    there: int = 0


class Turns:
    """``at_a_time`` requests of each caller have a turn, and the others wait for theirs, in order; ``most`` in all."""

    def __init__(self, *, at_a_time: int, most: int) -> None:
        self._at_a_time = at_a_time
        self._most = most
        self._lines: dict[str, _Line] = {}

    async def take(self, who: str) -> None:
        """Return when it is this caller's turn, which is to be given back with `leave`.

        Raises:
            TooMany: too many of theirs are there.
        """
        line = self._lines.setdefault(who, _Line(Semaphore(self._at_a_time)))
        if line.there >= self._most:
            raise TooMany
        line.there += 1
        try:
            await line.turns.acquire()
        except BaseException:
            self._left(who, line)
            raise

    def leave(self, who: str) -> None:
        """Give a turn back."""
        line = self._lines[who]
        line.turns.release()
        self._left(who, line)

    def _left(self, who: str, line: _Line) -> None:
        line.there -= 1
        if not line.there:
            del self._lines[who]
