"""How much longer a session runs, from those that have ended and had run for at least as long.

Whoever has outlived most is expected to go on: the longer something has run, the longer it mostly still does.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

LEAST = 5
"""Fewer runs say nothing: so many must have lasted at least as long as the session has."""
BELIEVED = 10
"""A session is believed to have run for so many times as long as the longest of all."""
NEWEST_RUNS = 500
"""So many of the newest runs of a resource group tell."""


class LengthSource(StrEnum):
    """Whose runs tell how long a session goes on, the narrowest first; AGE where too few ever ran for as long."""

    USER_IMAGE = "user and image"
    USER = "user"
    IMAGE = "image"
    GROUP = "resource group"
    ALL = "all"
    AGE = "age"


class PastRun(NamedTuple):
    """A session that has run and ended; ``length_s`` in seconds. Later ends, and of one instant higher ids, are newer."""

    resource_group: str
    user: str
    image: str
    length_s: int
    ended_at_s: int = 0
    session_id: int = 0


@dataclass(frozen=True, slots=True)
class RemainingTime:
    """What is known of the rest of a session that has run for ``ran_s``: the ``lengths_s`` of others, ascending.

    All are at least ``ran_s``. Where there are none, its age alone tells.
    """

    source: LengthSource
    ran_s: int
    lengths_s: Sequence[int] = ()

    def at_s(self, part: float) -> int:
        """Return in how many seconds it has ended in that part of the cases, from 0 to below 1."""
        if not self.lengths_s:
            # A tail as that of Pareto's law with exponent 2: what lengths of sessions mostly have far out.
            return round(self.ran_s * (1 / math.sqrt(1 - part) - 1))
        return self.lengths_s[int(part * len(self.lengths_s))] - self.ran_s

    def mean_s(self) -> float | None:
        """Return in how many seconds it ends in the mean; None where its age alone tells."""
        return sum(self.lengths_s) / len(self.lengths_s) - self.ran_s if self.lengths_s else None


class RunLengths:
    """The lengths of what ran in one resource group, and of all for where it has too few."""

    def __init__(self, resource_group: str, runs: Iterable[PastRun] = ()) -> None:
        self._found: dict[tuple[LengthSource, str, str], list[int]] = {}
        for run in runs:
            self._note((LengthSource.ALL, "", ""), run)
            if run.resource_group == resource_group:
                self._note((LengthSource.GROUP, "", ""), run)
                self._note((LengthSource.IMAGE, "", run.image), run)
                self._note((LengthSource.USER, run.user, ""), run)
                self._note((LengthSource.USER_IMAGE, run.user, run.image), run)
        for lengths_s in self._found.values():
            lengths_s.sort()

    def _note(self, key: tuple[LengthSource, str, str], run: PastRun) -> None:
        self._found.setdefault(key, []).append(max(0, run.length_s))

    def __bool__(self) -> bool:
        """Whether enough has ended to tell anything."""
        return len(self._found.get((LengthSource.ALL, "", ""), ())) >= LEAST

    def rest(self, user: str, image: str, ran_s: int) -> RemainingTime | None:
        """Return what is known of the rest of a session that has run for so long; None where nothing is.

        The narrowest source counts of which at least `LEAST` have run for as long.
        """
        keys = (
            (LengthSource.USER_IMAGE, user, image),
            (LengthSource.USER, user, ""),
            (LengthSource.IMAGE, "", image),
            (LengthSource.GROUP, "", ""),
            (LengthSource.ALL, "", ""),
        )
        for key in keys:
            lengths_s = self._found.get(key, ())
            first = bisect_left(lengths_s, ran_s)
            if len(lengths_s) - first >= LEAST:
                return RemainingTime(key[0], ran_s, lengths_s[first:])
        if not self:
            return None
        longest_s = self._found[LengthSource.ALL, "", ""][-1]
        # A clock that was set, and no session, is that far beyond all that ever was.
        return RemainingTime(LengthSource.AGE, ran_s if ran_s <= BELIEVED * longest_s else longest_s)


@dataclass(frozen=True, slots=True)
class PastRuns:
    """The newest runs of each resource group, newest first: at most `NEWEST_RUNS` of each."""

    of_group: Mapping[str, tuple[PastRun, ...]] = field(default_factory=dict)
    _lengths: dict[str, RunLengths] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Once somebody asked for them."""

    def then(self, runs: Iterable[PastRun]) -> PastRuns:
        """Return these and others."""
        found = dict(self.of_group)
        for run in runs:
            own = [run, *found.get(run.resource_group, ())]
            own.sort(key=lambda one: (one.ended_at_s, one.session_id), reverse=True)
            found[run.resource_group] = tuple(own[:NEWEST_RUNS])
        return PastRuns(found)

    def lengths(self, resource_group: str) -> RunLengths:
        """Return the lengths of what ran in a resource group; of all groups, where that has too few."""
        known = self._lengths.get(resource_group)
        if known is None:
            own = self.of_group.get(resource_group, ())
            runs = own if len(own) >= LEAST else [run for runs in self.of_group.values() for run in runs]
            known = self._lengths[resource_group] = RunLengths(resource_group, runs)
        return known
