"""What the store holds at one version, kept in memory so that a busy scheduler need not read it again each time.

Every write adds 1 to the store's version, in whichever process: while the version is the same, so is all else. What
this process itself writes is carried on to the next version, and anything else is read anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from fgpu_scheduler.core.lifecycle import ENDED
from fgpu_scheduler.core.model import Node, Quota, Session, Snapshot, Usage
from fgpu_scheduler.core.usage import HalfLife, decayed
from fgpu_scheduler.queries import LIVE_SESSIONS, read_nodes, read_quotas, read_used
from fgpu_scheduler.rows import Used


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a snapshot is made of. The sessions are the live ones, in order of their ids."""

    version: int
    nodes: tuple[Node, ...]
    sessions: Mapping[int, Session]
    used: Used
    quotas: tuple[Quota, ...]

    @classmethod
    def read(cls, connection: Connection, version: int) -> Seen:
        """Read it all, in a transaction that sees one instant, and that version."""
        nodes, sessions = read_nodes(connection), LIVE_SESSIONS.read(connection)
        return cls(
            version, nodes, {s.id: s for s in sessions}, read_used(connection), read_quotas(connection)
        )

    def snapshot(self, now_s: int, usage: tuple[Usage, ...] = ()) -> Snapshot:
        """Return it as the scheduler's value, with what was used as it has decayed by now."""
        return Snapshot(now_s, self.version, self.nodes, tuple(self.sessions.values()), usage, self.quotas)

    def usage(self, now_s: int, half_life_s: HalfLife) -> tuple[Usage, ...]:
        """Return what is left by now of what was used, by user and resource group."""
        found = (
            Usage(user, group, int(decayed(amount, age_s=now_s - at_s, half_life_s=half_life_s(group))))
            for (user, group), (amount, at_s) in sorted(self.used.items())
        )
        return tuple(one for one in found if one.fgpu_milli_s)

    def then(self, changed: Mapping[int, Session], used: Used) -> Seen:
        """Return what is there one version later, when these sessions and this usage were written."""
        sessions = {**self.sessions, **changed}
        for session in changed.values():
            if session.state in ENDED:
                del sessions[session.id]
        # What stays the same is the same object: it need not be counted again.
        return replace(
            self,
            version=self.version + 1,
            sessions=sessions,
            used={**self.used, **used} if used else self.used,
        )
