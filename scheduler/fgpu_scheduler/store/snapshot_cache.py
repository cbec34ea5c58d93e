"""A cache of the store's contents at one version, so that a busy scheduler does not read them before each plan.

Every write of any process adds 1 to the store's version, so equal versions mean equal contents. A write of this process
is applied to the cached contents; after a write of another process they are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection

from fgpu_scheduler.core.lifecycle import ENDED, past_runs
from fgpu_scheduler.core.model import Node, Quota, RequestCount, Session, SessionIndex, Snapshot, Usage
from fgpu_scheduler.core.request_counts import counted_ids
from fgpu_scheduler.core.run_lengths import PastRuns
from fgpu_scheduler.core.shares import shape
from fgpu_scheduler.core.usage import HalfLife, decayed
from fgpu_scheduler.store.rows import Used
from fgpu_scheduler.store.statements import (
    LIVE_SESSIONS,
    NEWEST_ID,
    read_asked,
    read_nodes,
    read_quotas,
    read_runs,
    read_used,
)

CountAsked = Callable[[int], tuple[RequestCount, ...]]


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a snapshot. ``sessions`` are the live ones, by id."""

    version: int
    nodes: tuple[Node, ...]
    sessions: Mapping[int, Session]
    used: Used
    quotas: tuple[Quota, ...]
    asked: tuple[RequestCount, ...]
    newest_id: int
    """The newest session's id when requested amounts were counted, or a later id that changes no count."""
    groups: SessionIndex
    runs: PastRuns = field(default_factory=PastRuns)
    in_order: tuple[Session, ...] | None = field(default=None, compare=False, repr=False)
    """The sessions as a tuple, cached because a plan and its commit use the same version."""

    @classmethod
    def read(cls, connection: Connection, version: int) -> Contents:
        """Read the contents in a transaction that sees this version."""
        sessions = {s.id: s for s in LIVE_SESSIONS.read(connection)}
        newest_id = connection.execute(NEWEST_ID).scalar_one() or 0
        nodes = read_nodes(connection)
        return cls(
            version,
            nodes,
            sessions,
            read_used(connection),
            read_quotas(connection),
            read_asked(connection, newest_id),
            newest_id,
            SessionIndex.of(sessions.values()),
            PastRuns(read_runs(connection, sorted({node.resource_group for node in nodes}))),
        )

    def snapshot(self, now_s: int, usage: tuple[Usage, ...] = ()) -> Snapshot:
        """Return the contents as a snapshot with this usage."""
        if self.in_order is None:
            object.__setattr__(self, "in_order", tuple(self.sessions.values()))
        sessions = self.in_order or ()
        known = sessions, self.groups
        return Snapshot(
            now_s, self.version, self.nodes, sessions, usage, self.quotas, self.asked, self.runs, known
        )

    def usage(self, now_s: int, half_life_s: HalfLife) -> tuple[Usage, ...]:
        """Return the usage decayed to now, by user, resource group and account."""
        found = (
            Usage(
                user, group, int(decayed(amount, age_s=now_s - at_s, half_life_s=half_life_s(group))), account
            )
            for (user, group, account), (amount, at_s) in sorted(self.used.items())
        )
        return tuple(one for one in found if one.fgpu_milli_s)

    def then(self, changed: Mapping[int, Session], used: Used, count_asked: CountAsked) -> Contents:
        """Return the contents one version later, after a write of these sessions and this usage.

        ``count_asked`` counts the requested amounts again, given the newest session's id.
        """
        changes = [(self.sessions.get(n), None if s.state in ENDED else s) for n, s in changed.items()]
        # New sessions have the highest ids, so the order stays.
        sessions = {**self.sessions, **changed}
        for number in [n for n, s in changed.items() if s.state in ENDED]:
            del sessions[number]
        runs = past_runs(changed.values())
        newest_id = max(self.newest_id, *changed) if changed else self.newest_id
        again = counted_ids(newest_id) != counted_ids(self.newest_id) or any(
            old is not None and new is not None and shape(old.request) != shape(new.request)
            for old, new in changes
        )
        # Unchanged parts stay the same objects, so that caches keyed by them stay valid.
        return replace(
            self,
            version=self.version + 1,
            sessions=sessions,
            used={**self.used, **used} if used else self.used,
            asked=count_asked(newest_id) if again else self.asked,
            newest_id=newest_id,
            groups=self.groups.then(changes),
            in_order=None,
            runs=self.runs.then(runs) if runs else self.runs,
        )


class ContentsCache:
    """The newest contents that this process has seen."""

    def __init__(self) -> None:
        self.contents: Contents | None = None
        #: The usage before its decay, the time to which it was decayed, and the result.
        self._usage: tuple[Used, int, tuple[Usage, ...]] = ({}, 0, ())

    def put(self, contents: Contents) -> None:
        """Keep these contents unless newer ones are known: threads may call this in any order."""
        if self.contents is None or self.contents.version < contents.version:
            self.contents = contents

    def at(self, connection: Connection, version: int) -> Contents:
        """Return the contents at a version, which the transaction must see."""
        contents = self.contents
        if contents is None or contents.version != version:
            contents = Contents.read(connection, version)
            self.put(contents)
        return contents

    def snapshot(self, contents: Contents, now_s: int, half_life_s: HalfLife) -> Snapshot:
        """Return the contents as a snapshot, with the usage decayed to now; that is cached for one second."""
        used, at_s, usage = self._usage
        if used is not contents.used or at_s != now_s:
            usage = contents.usage(now_s, half_life_s)
            self._usage = contents.used, now_s, usage
        return contents.snapshot(now_s, usage)
