"""How much longer a session runs, estimated from ended sessions that ran for at least as long.

The longer a session has run, the longer it usually still runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

#: The least number of past runs, at least as long as the session's, that make an estimate.
LEAST = 5
#: A session that ran for more than this many times the longest past run is a fault of the clock.
BELIEVED = 10
#: The number of the newest runs of a resource group that count.
NEWEST_RUNS = 500


class LengthSource(StrEnum):
    """The past runs that an estimate rests on, the narrowest first; AGE if too few ran for as long."""

    USER_IMAGE = "user and image"
    USER = "user"
    IMAGE = "image"
    GROUP = "resource group"
    ALL = "all"
    AGE = "age"


class PastRun(NamedTuple):
    """A session that has run and ended; ``length_s`` in seconds. A later end is newer, then a higher id."""

    resource_group: str
    user: str
    image: str
    length_s: int
    ended_at_s: int = 0
    session_id: int = 0


@dataclass(frozen=True, slots=True)
class RemainingTime:
    """The remaining time of a session that has run for ``ran_s``: the ``lengths_s`` of past runs, ascending.

    All are at least ``ran_s``. If there are none, the estimate rests on its age alone.
    """

    source: LengthSource
    ran_s: int
    lengths_s: Sequence[int] = ()

    def at_s(self, parts: Iterable[float]) -> list[int]:
        """Return the seconds after which each of these parts of such sessions has ended; a part is from 0 to below 1."""
        lengths_s, number, ran_s = self.lengths_s, len(self.lengths_s), self.ran_s
        if not lengths_s:
            # The tail of a Pareto distribution with exponent 2, as the lengths of sessions usually have.
            return [round(ran_s * (1 / math.sqrt(1 - part) - 1)) for part in parts]
        return [lengths_s[int(part * number)] - ran_s for part in parts]

    def mean_s(self) -> float | None:
        """Return the mean remaining seconds; None if the estimate rests on the age alone."""
        return sum(self.lengths_s) / len(self.lengths_s) - self.ran_s if self.lengths_s else None


class RunLengths:
    """The lengths of past runs in one resource group, and in all groups if it has too few."""

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
        """Whether there are enough past runs for any estimate."""
        return len(self._found.get((LengthSource.ALL, "", ""), ())) >= LEAST

    def rest(self, user: str, image: str, ran_s: int) -> RemainingTime | None:
        """Return the remaining time of a session, or None without any estimate.

        It rests on the narrowest source with at least `LEAST` runs that lasted for ``ran_s``.
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
        # A session so much older than all others is a fault of the clock.
        return RemainingTime(LengthSource.AGE, ran_s if ran_s <= BELIEVED * longest_s else longest_s)


@dataclass(frozen=True, slots=True)
class PastRuns:
    """The newest runs of each resource group, newest first: at most `NEWEST_RUNS` of each."""

    of_group: Mapping[str, tuple[PastRun, ...]] = field(default_factory=dict)
    _lengths: dict[str, RunLengths] = field(default_factory=dict, init=False, compare=False, repr=False)

    def then(self, runs: Iterable[PastRun]) -> PastRuns:
        """Return these runs and others."""
        found = dict(self.of_group)
        for run in runs:
            own = [run, *found.get(run.resource_group, ())]
            own.sort(key=lambda one: (one.ended_at_s, one.session_id), reverse=True)
            found[run.resource_group] = tuple(own[:NEWEST_RUNS])
        return PastRuns(found)

    def lengths(self, resource_group: str) -> RunLengths:
        """Return the lengths of past runs in a resource group; in all groups, if it has too few."""
        known = self._lengths.get(resource_group)
        if known is None:
            own = self.of_group.get(resource_group, ())
            runs = own if len(own) >= LEAST else [run for runs in self.of_group.values() for run in runs]
            known = self._lengths[resource_group] = RunLengths(resource_group, runs)
        return known
