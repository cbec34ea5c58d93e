"""Fairness between callers: each gets a limited number of requests at a time."""

from __future__ import annotations

from asyncio import Semaphore
from dataclasses import dataclass


class TooMany(Exception):
    """The caller has too many requests in progress and waiting."""


@dataclass(slots=True)
class _Line:
    turns: Semaphore
    there: int = 0


class Turns:
    """Lets ``at_a_time`` requests of each caller run, and queues further ones up to ``most`` in all."""

    def __init__(self, *, at_a_time: int, most: int) -> None:
        self._at_a_time = at_a_time
        self._most = most
        self._lines: dict[str, _Line] = {}

    async def take(self, who: str) -> None:
        """Return when this caller may run a request; call `leave` afterwards.

        Raises:
            TooMany: the caller has ``most`` requests already.
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
        line = self._lines[who]
        line.turns.release()
        self._left(who, line)

    def _left(self, who: str, line: _Line) -> None:
        line.there -= 1
        if not line.there:
            del self._lines[who]
