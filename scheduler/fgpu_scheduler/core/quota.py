"""Quotas: what a user, a Hub group, an account or all users together may hold, queue, and run for how long.

Of several quotas that count a session the strictest holds. A session over a concurrent quota waits. A request over a
pending quota, or one that could never fit in a quota, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

from fgpu_scheduler.core.accounts import account_names
from fgpu_scheduler.core.lifecycle import HOLDING, WAITING, holds_shares, taken_placement
from fgpu_scheduler.core.model import Node, Placement, Quota, QuotaScope, Request, Session, Snapshot
from fgpu_scheduler.core.shares import RequestShape, is_explicit, shape, shares_of

#: The name of a quota for each user, for each Hub group, or for all users together.
ANY = "*"


class Ledger:
    """The usage of every quota: by the sessions of a snapshot, and by the sessions that started or ended since.

    The snapshot's sessions are counted when first needed; for a quota of one user only that user's sessions. Without
    quotas the ledger counts nothing and allows everything.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._quotas = snapshot.quotas
        self._counting = _Counting(snapshot.quotas)
        self._tallies: dict[tuple[int, str], _Tally] = {}
        #: The usage by the snapshot's sessions; copies share it.
        self._base: dict[tuple[int, str], _Tally] = {}
        #: The users whose sessions are counted there for quotas of one user; None for all other quotas.
        self._counted: set[str | None] = set()
        self._least: dict[RequestShape, int] = {}

    def copy(self) -> Ledger:
        """Return an independent copy."""
        other = copy(self)
        other._tallies = {key: tally.copy() for key, tally in self._tallies.items()}
        return other

    def allows(self, session: Session, where: Placement | None = None) -> bool:
        """Return whether all quotas let the session start now."""
        return not self._quotas or self.stops(session, where) is None

    def stops(self, session: Session, where: Placement | None = None) -> Quota | None:
        """Return the first quota that does not let the session start now, or None.

        It counts the fGPU of the shares in ``where`` or, without them, the least that the request could be worth.
        """
        counts = self._of(session.request)
        more = self.milli(session, where) if counts else 0
        for quota, _, tally in counts:
            most = quota.max_fgpu_milli
            if most is not None and more > 0 and tally.fgpu_milli + more > most:
                return quota
            most = quota.max_sessions
            # A session that returns to its GPU is counted as a session already.
            if most is not None and session.placement is None and tally.sessions >= most:
                return quota
        return None

    def take(self, session: Session, where: Placement | None = None) -> None:
        """Count a session that starts now."""
        self._count(session, where, 1)

    def give_back(self, session: Session, where: Placement | None = None) -> None:
        """Stop counting a session that has ended: one of the snapshot, or one that was taken with the same arguments."""
        self._count(session, where, -1)

    def left(self, request: Request, *, in_all: bool = False) -> QuotaRemaining:
        """Return what the quotas still allow the user of a request, and which quotas allow the least.

        ``in_all``: only by quotas that count all resource groups together.
        """
        fgpu: list[tuple[int, int, Quota]] = []
        sessions: list[tuple[int, int, Quota]] = []
        for at, (quota, _, tally) in enumerate(self._of(request)):
            if in_all and quota.resource_group is not None:
                continue
            if quota.max_fgpu_milli is not None:
                fgpu.append((max(0, quota.max_fgpu_milli - tally.fgpu_milli), at, quota))
            if quota.max_sessions is not None:
                sessions.append((max(0, quota.max_sessions - tally.sessions), at, quota))
        most, _, fgpu_of = min(fgpu, default=(None, 0, None))
        number, _, sessions_of = min(sessions, default=(None, 0, None))
        return QuotaRemaining(most, fgpu_of, number, sessions_of)

    def guarantees_left(self, request: Request) -> Iterator[tuple[str, int]]:
        """Yield each account of a request with a guarantee, and the fGPU x 1000 of it that is not used."""
        for quota, name, tally in self._of(request):
            if quota.guaranteed_milli is not None:
                yield name, quota.guaranteed_milli - tally.fgpu_milli

    def limit_s(self, request: Request) -> int | None:
        """Return how long a session may run by the quotas, in seconds, or None without limit."""
        return least_limit([quota.max_lifetime_s for _, quota, _ in self._counting.of(request)])

    def _count(self, session: Session, where: Placement | None, sign: int) -> None:
        counts = self._of(session.request)
        milli = self.milli(session, where) if counts else 0
        for _, _, tally in counts:
            tally.add(sign * milli, sign)

    def _of(self, request: Request) -> list[tuple[Quota, str, _Tally]]:
        """Return the quotas that count a request, the names under which they do, and their usage."""
        found = []
        for at, quota, name in self._counting.of(request):
            tally = self._tallies.get((at, name))
            if tally is None:
                user = name if quota.scope is QuotaScope.USER else None
                if user not in self._counted:
                    self._counted.add(user)
                    self._count_sessions(user)
                tally = self._tallies[at, name] = self._base.get((at, name), NO_USAGE).copy()
            found.append((quota, name, tally))
        return found

    def _count_sessions(self, user: str | None) -> None:
        """Count the snapshot's sessions of a user for the quotas of one user; all sessions for the others if None."""
        index = self._snapshot.index
        there = self._snapshot.sessions if user is None else index.of_user.get(user, {}).values()
        for session in there:
            if session.state in HOLDING:
                milli = self.milli(session, taken_placement(session))
                for at, quota, name in self._counting.of(session.request):
                    if (quota.scope is QuotaScope.USER) is (user is not None):
                        self._base.setdefault((at, name), _Tally()).add(milli)

    def milli(self, session: Session, where: Placement | None = None) -> int:
        """Return the fGPU x 1000 that a session counts: of its shares, or the least that its request could be worth.

        A session on demand counts nothing when it is placed, because it starts parked.
        """
        placement, asked = where or session.placement, session.request
        if asked.on_demand and session.placement is None:
            return 0
        if placement is not None:
            return placement.fgpu_milli
        if not is_explicit(asked):
            return asked.fgpu_milli
        own = shape(asked)
        if own not in self._least:
            self._least[own] = least_milli(asked, self._snapshot.nodes)
        return self._least[own]


def may_stop(session: Session, snapshot: Snapshot) -> bool:
    """Return whether a quota could stop a waiting session, now or after all others that wait have started."""
    if any(quota.guaranteed_milli is not None for quota in snapshot.quotas):
        return True
    ledger = Ledger(snapshot)
    for other in snapshot.sessions:
        if other.state in WAITING and other.id != session.id:
            ledger.take(other)
    return not ledger.allows(session)


def least_limit(limits: Iterable[int | None]) -> int | None:
    """Return the strictest of some limits, or None if none is set."""
    return min([limit for limit in limits if limit is not None], default=None)


@dataclass(frozen=True, slots=True)
class QuotaRemaining:
    """The fGPU x 1000 and sessions that quotas still allow a user, and the strictest quotas; None is no limit."""

    fgpu_milli: int | None
    fgpu_of: Quota | None
    sessions: int | None
    sessions_of: Quota | None


@dataclass(slots=True)
class _Tally:
    """The usage of one quota by one user, Hub group, or all users."""

    fgpu_milli: int = 0
    sessions: int = 0

    def add(self, fgpu_milli: int, sessions: int = 1) -> None:
        self.fgpu_milli += fgpu_milli
        self.sessions += sessions

    def copy(self) -> _Tally:
        return _Tally(self.fgpu_milli, self.sessions)


NO_USAGE = _Tally()


def counted_names(quota: Quota, request: Request) -> tuple[str, ...]:
    """Return the names under which a quota counts the sessions of a request; none if it does not apply.

    All sessions with the same name share the quota: those of a user, of a Hub group's members, or of all users.
    """
    if quota.resource_group not in (None, request.resource_group):
        return ()
    match quota.scope:
        case QuotaScope.USER:
            return (request.user,) if quota.name in (ANY, request.user) else ()
        case QuotaScope.GROUP:
            return tuple(group for group in request.groups if quota.name in (ANY, group))
        case QuotaScope.ACCOUNT:
            return tuple(name for name in account_names(request.account) if quota.name in (ANY, name))
        case QuotaScope.ALL:
            return (ANY,)


class _Counting:
    """Finds the quotas that count a request, among many that name a single user."""

    def __init__(self, quotas: Sequence[Quota]) -> None:
        self._named: dict[tuple[QuotaScope, str], list[tuple[int, Quota]]] = {}
        for at, quota in enumerate(quotas):
            self._named.setdefault((quota.scope, quota.name), []).append((at, quota))
        self._found: dict[tuple[str, str, tuple[str, ...], str], list[tuple[int, Quota, str]]] = {}

    def of(self, request: Request) -> list[tuple[int, Quota, str]]:
        """Return each quota that counts a request, with its index and the name, in the quotas' order."""
        who = request.resource_group, request.user, request.groups, request.account
        if who not in self._found:
            names = {
                QuotaScope.ALL: (),
                QuotaScope.USER: (request.user,),
                QuotaScope.GROUP: request.groups,
                QuotaScope.ACCOUNT: account_names(request.account),
            }
            wanted = {(scope, name) for scope, own in names.items() for name in (ANY, *own)}
            own = sorted((at, quota) for named in wanted for at, quota in self._named.get(named, ()))
            self._found[who] = [(at, q, name) for at, q in own for name in counted_names(q, request)]
        return self._found[who]


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """The usage of a quota by one name: fGPU x 1000 and sessions that hold shares, and sessions that wait."""

    name: str
    fgpu_milli: int
    sessions: int
    waiting: int


def usage_of_quotas(quotas: Sequence[Quota], snapshot: Snapshot) -> tuple[tuple[QuotaUsage, ...], ...]:
    """Return the current usage of each quota, in one pass over the sessions.

    The largest usage comes first; names without any are left out.
    """
    found: list[dict[str, list[int]]] = [{} for _ in quotas]
    counting = _Counting(quotas)
    for session in snapshot.sessions:
        holds = session.state in HOLDING and session.placement is not None
        if not holds and session.state not in WAITING:
            continue
        held_milli = session.placement.fgpu_milli if session.placement and holds_shares(session) else 0
        for at, _, name in counting.of(session.request):
            tally = found[at].setdefault(name, [0, 0, 0])
            tally[0] += held_milli
            tally[1 if holds else 2] += 1
    counts = ([QuotaUsage(name, *tally) for name, tally in one.items()] for one in found)
    return tuple(
        tuple(sorted(one, key=lambda who: (-who.fgpu_milli, -who.sessions, -who.waiting, who.name)))
        for one in counts
    )


def quota_words(quota: Quota) -> str:
    """Return a phrase that names a quota after "the quota of"."""
    match quota.scope:
        case QuotaScope.USER:
            who = "each user" if quota.name == ANY else f"user {quota.name!r}"
        case QuotaScope.GROUP:
            who = "each group" if quota.name == ANY else f"group {quota.name!r}"
        case QuotaScope.ACCOUNT:
            who = "each account" if quota.name == ANY else f"account {quota.name!r}"
        case QuotaScope.ALL:
            who = "everybody together"
    return who if quota.resource_group is None else f"{who} in resource group {quota.resource_group!r}"


@dataclass(frozen=True, slots=True)
class OverPending:
    """A pending quota that a submission would go over."""

    quota: Quota
    counted: str
    limit: int
    waiting: int
    more: int

    @property
    def message(self) -> str:
        """The message to the user."""
        return (
            f"the quota of {quota_words(self.quota)} is {self.limit} requests waiting: "
            f"{self.waiting} wait already, and this would add {self.more}"
        )


def over_pending(
    quotas: Iterable[Quota], waiting: Iterable[Request], asked: Sequence[Request]
) -> OverPending | None:
    """Return the first pending quota that ``asked`` would exceed beside the waiting requests, or None."""
    others = tuple(waiting)
    for quota in quotas:
        if quota.max_pending is None:
            continue
        there = Counter(name for other in others for name in counted_names(quota, other))
        more = Counter(name for one in asked for name in counted_names(quota, one))
        for counted in sorted(more):
            if there[counted] + more[counted] > quota.max_pending:
                return OverPending(quota, counted, quota.max_pending, there[counted], more[counted])
    return None


def least_milli(request: Request, nodes: Iterable[Node]) -> int:
    """Return the smallest fGPU x 1000 that a request could be worth on any device of its resource group.

    It is 0 if no device there could hold it.
    """
    if not is_explicit(request):
        return request.fgpu_milli
    found = (
        shares_of(request, (device,))
        for node in nodes
        if node.resource_group == request.resource_group
        for device in node.devices
    )
    return min((sum(share.fgpu_milli for share in shares) for shares in found if shares), default=0)
