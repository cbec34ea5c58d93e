"""Quotas: what a user, a Hub group, an account or all users together may hold, queue, and run for how long.

Of several quotas that count a session the strictest holds. A session over a concurrent quota waits. A request over a
pending quota, or one that could never fit in a quota, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
        self._nodes = snapshot.nodes
        self._tallies: dict[tuple[int, str], _Tally] = {}
        self._counts: dict[tuple[str, str, tuple[str, ...], str], tuple[_Count, ...]] = {}
        self._least: dict[RequestShape, int] = {}
        self._shared_counted = False

    def allows(self, session: Session, where: Placement | None = None) -> bool:
        """Return whether all quotas let the session start now."""
        return not self._quotas or self.stops(session, where) is None

    def stops(self, session: Session, where: Placement | None = None) -> Quota | None:
        """Return the first quota that does not let the session start now, or None.

        It counts the fGPU of the shares in ``where`` or, without them, the least that the request could be worth.
        """
        counts = self._of(session.request)
        if not counts:
            return None
        more = self.milli(session, where)
        for one in counts:
            most = one.quota.max_fgpu_milli
            if most is not None and more > 0 and one.tally.fgpu_milli + more > most:
                return one.quota
            most = one.quota.max_sessions
            # A session that returns to its GPU is counted as a session already.
            if most is not None and session.placement is None and one.tally.sessions >= most:
                return one.quota
        return None

    def take(self, session: Session, where: Placement | None = None) -> None:
        """Count a session that starts now."""
        self._count(session, where, 1)

    def give_back(self, session: Session, where: Placement | None = None) -> None:
        """Stop counting a session that has ended: one of the snapshot, or one that was taken with the same arguments."""
        self._count(session, where, -1)

    def room_milli(self, request: Request, *, in_all: bool = False) -> int | None:
        """Return how much more fGPU x 1000 the quotas allow the user of a request; None without limit.

        ``in_all``: only by quotas that count all resource groups together.
        """
        left = self.left(request, in_all=in_all)
        return 0 if left.sessions == 0 else left.fgpu_milli

    def left(self, request: Request, *, in_all: bool = False) -> QuotaRemaining:
        """Return what the quotas still allow the user of a request, and which quotas allow the least."""
        fgpu: list[tuple[int, int, Quota]] = []
        sessions: list[tuple[int, int, Quota]] = []
        for at, one in enumerate(self._of(request)):
            quota, tally = one.quota, one.tally
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
        for one in self._of(request):
            if one.quota.guaranteed_milli is not None:
                yield one.name, one.quota.guaranteed_milli - one.tally.fgpu_milli

    def limit_s(self, request: Request) -> int | None:
        """Return how long a session may run by the quotas, in seconds, or None without limit."""
        limits = [one.quota.max_lifetime_s for one in self._of(request)]
        return min((limit for limit in limits if limit is not None), default=None)

    def _count(self, session: Session, where: Placement | None, sign: int) -> None:
        counts = self._of(session.request)
        if counts:
            milli = self.milli(session, where)
            for one in counts:
                one.tally.add(sign * milli, sign)

    def _of(self, request: Request) -> tuple[_Count, ...]:
        if not self._quotas:
            return ()
        who = request.resource_group, request.user, request.groups, request.account
        found = self._counts.get(who)
        if found is None:
            found = self._counts[who] = tuple(
                _Count(quota, counted, self._tally(at, quota, counted))
                for at, quota, counted in self._counting.of(request)
            )
        return found

    def _tally(self, at: int, quota: Quota, counted: str) -> _Tally:
        if quota.scope is not QuotaScope.USER:
            self._count_shared()
            return self._tallies.setdefault((at, counted), _Tally())
        found = self._tallies.get((at, counted))
        if found is None:
            found = self._tallies[at, counted] = _Tally()
            for session in self._snapshot.index.of_user.get(counted, {}).values():
                if session.state in HOLDING and counted_names(quota, session.request):
                    found.add(self.milli(session, taken_placement(session)))
        return found

    def _count_shared(self) -> None:
        """Count the sessions for all quotas of several users, in one pass."""
        if self._shared_counted:
            return
        self._shared_counted = True
        shared: dict[tuple[str, tuple[str, ...], str], list[_Tally]] = {}
        for session in self._snapshot.sessions:
            if session.state not in HOLDING:
                continue
            who = session.request.resource_group, session.request.groups, session.request.account
            if who not in shared:
                shared[who] = [
                    self._tallies.setdefault((at, counted), _Tally())
                    for at, quota, counted in self._counting.of(session.request)
                    if quota.scope is not QuotaScope.USER
                ]
            for tally in shared[who]:
                tally.add(self.milli(session, taken_placement(session)))

    def milli(self, session: Session, where: Placement | None = None) -> int:
        """Return the fGPU x 1000 that a session counts: of its shares, or the least that its request could be worth."""
        placement = where or session.placement
        if placement is not None:
            return sum(share.fgpu_milli for share in placement.shares)
        asked = session.request
        if asked.on_demand:
            return 0
        if not is_explicit(asked):
            return asked.fgpu_milli
        own = shape(asked)
        if own not in self._least:
            self._least[own] = least_milli(asked, self._nodes)
        return self._least[own]


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


@dataclass(frozen=True, slots=True)
class _Count:
    quota: Quota
    name: str
    tally: _Tally


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
        self._quotas = quotas
        self._named: dict[tuple[QuotaScope, str], list[int]] = {}
        for at, quota in enumerate(quotas):
            self._named.setdefault((quota.scope, quota.name), []).append(at)

    def of(self, request: Request) -> Iterator[tuple[int, Quota, str]]:
        """Yield each quota that counts a request, with its index and the name, in the quotas' order."""
        wanted = {
            (QuotaScope.ALL, ANY),
            (QuotaScope.USER, ANY),
            (QuotaScope.USER, request.user),
            (QuotaScope.GROUP, ANY),
            *((QuotaScope.GROUP, group) for group in request.groups),
            (QuotaScope.ACCOUNT, ANY),
            *((QuotaScope.ACCOUNT, name) for name in account_names(request.account)),
        }
        for at in sorted(at for named in wanted for at in self._named.get(named, ())):
            quota = self._quotas[at]
            for counted in counted_names(quota, request):
                yield at, quota, counted


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
        shares = session.placement.shares if session.placement and holds_shares(session) else ()
        for at, _, name in counting.of(session.request):
            tally = found[at].setdefault(name, [0, 0, 0])
            tally[0] += sum(share.fgpu_milli for share in shares)
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
