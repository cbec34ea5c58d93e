"""The queue of a pass: sets of identical requests, of which only the first one that waits is tried."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from operator import attrgetter

from fgpu_scheduler.core.model import Session, WaitReason
from fgpu_scheduler.core.shares import RequestShape, shape

_KEY = attrgetter(*RequestShape._fields, "time_limit_s")
_KEY_WITH_USER = attrgetter(*RequestShape._fields, "time_limit_s", "user", "groups", "account")


class EquivalentRequests:
    """The sessions of a queue with identical requests, in queue order. A pass tries only the first that waits."""

    __slots__ = ("first", "positions", "reason", "shape")

    def __init__(self, asked: RequestShape) -> None:
        self.shape = asked
        #: The position of each session in the queue.
        self.positions: list[int] = []
        #: The index in ``positions`` of the first session that still waits; those before it have started.
        self.first = 0
        #: Why the sessions from ``first`` on wait.
        self.reason = WaitReason.RESOURCES

    @property
    def waits(self) -> bool:
        """Whether a session still waits."""
        return self.first < len(self.positions)

    def copy(self) -> EquivalentRequests:
        """Return a copy with the same positions, which never change."""
        other = EquivalentRequests(self.shape)
        other.positions, other.first, other.reason = self.positions, self.first, self.reason
        return other


class PendingQueue:
    """The sorted queue of a resource group, split into sets of identical requests. Held sessions are in no set.

    Two sessions are in one set if the planner must decide the same for both; with quotas the user and groups count too.
    """

    __slots__ = ("heads", "promised", "sessions", "set_of", "sets")

    def __init__(self, sessions: Sequence[Session], *, by_user: bool, held: bool = False) -> None:
        self.sessions = sessions
        key_of = _KEY_WITH_USER if by_user else _KEY
        found: dict[object, EquivalentRequests] = {}
        #: The sessions with a promised start, in queue order, each with its own set.
        self.promised: list[tuple[Session, EquivalentRequests]] = []
        #: The set of each session, by its position in the queue; None where it is held.
        self.set_of = set_of = list[EquivalentRequests | None]()
        for position, session in enumerate(sessions):
            if session.held and not held:
                set_of.append(None)
                continue
            # A session that a node refused has its own set: equal requests may still start on that node. So has a
            # session with a promised start: its reservation is not for the others.
            alone = session.refused or session.promised_at_s is not None
            key = session.id if alone else key_of(session.request)
            same = found.get(key)
            if same is None:
                same = found[key] = EquivalentRequests(shape(session.request))
            if session.promised_at_s is not None:
                self.promised.append((session, same))
            same.positions.append(position)
            set_of.append(same)
        self.sets = list(found.values())
        #: For the first waiting session of each set, its position in the queue and the number of the set.
        self.heads = sorted((same.positions[0], n) for n, same in enumerate(self.sets))

    def copy(self) -> PendingQueue:
        """Return an independent copy."""
        other = copy(self)
        other.sets, other.heads = [same.copy() for same in self.sets], list(self.heads)
        new = {id(old): same for old, same in zip(self.sets, other.sets, strict=True)}
        other.promised = [(session, new[id(same)]) for session, same in self.promised]
        return other

    def drop_started(self) -> None:
        """Remove sessions that have started from ``heads``."""
        sets = self.sets
        self.heads = [
            (at, n) for at, n in self.heads if sets[n].waits and sets[n].positions[sets[n].first] == at
        ]
