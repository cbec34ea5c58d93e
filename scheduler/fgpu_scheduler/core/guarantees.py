"""Guarantees: the fGPU of an account that others only borrow while it is idle.

A waiting request is *guaranteed* if its account holds no more than its guarantee with it. It comes first in the queue,
and sessions that borrow may be ended for it. The sessions of an account that have held their shares longest are
within its guarantee; the others borrow. Accounts are in each other, and each may have a guarantee: between two sessions
only those accounts count that do not have both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fgpu_scheduler.core.accounts import DEFAULT, Accounts, account_names
from fgpu_scheduler.core.lifecycle import holds_shares
from fgpu_scheduler.core.model import Quota, Session, Snapshot
from fgpu_scheduler.core.quota import ANY, Ledger, counted_names
from fgpu_scheduler.core.units import format_milli
from fgpu_scheduler.core.usage import taken_milli

#: By session id the accounts in whose guarantee a session is.
Within = Mapping[int, frozenset[str]]


@dataclass(frozen=True, slots=True)
class PreemptionRights:
    """What a blocked request may end sessions by: its priority, and the accounts whose guarantee covers it."""

    priority: int
    account: str = ""
    guaranteed: frozenset[str] = frozenset()

    def may_end(self, session: Session, within: Within) -> bool:
        """Return whether a running session may be ended for the request."""
        own, others = account_names(self.account), account_names(session.request.account)
        while own and others and own[0] == others[0]:
            own, others = own[1:], others[1:]
        if not within.get(session.id, frozenset()).isdisjoint(others):
            return False
        return session.request.priority < self.priority or not self.guaranteed.isdisjoint(own)


def rights_of(session: Session, ledger: Ledger) -> PreemptionRights:
    """Return what a waiting session may end others by, with the present usage of the ledger."""
    covering = (
        name for name, left in ledger.guarantees_left(session.request) if 0 < ledger.milli(session) <= left
    )
    return PreemptionRights(session.request.priority, session.request.account, frozenset(covering))


def guaranteed_first(waiting: Iterable[Session], ledger: Ledger) -> list[Session]:
    """Return waiting sessions in their order, but the guaranteed ones first; each counts for those behind it."""
    first, rest = list[Session](), list[Session]()
    for session in waiting:
        if not session.held and rights_of(session, ledger).guaranteed:
            first.append(session)
            ledger.take(session)
        else:
            rest.append(session)
    for session in first:
        ledger.give_back(session)
    return [*first, *rest]


def within_guarantees(snapshot: Snapshot) -> Within:
    """Return the accounts in whose guarantee each session is: those that fit into it, the longest held first."""
    guarantees = [quota for quota in snapshot.quotas if quota.guaranteed_milli is not None]
    found: dict[int, frozenset[str]] = {}
    kept: dict[tuple[Quota, str], int] = {}
    held = (s for s in snapshot.sessions if guarantees and holds_shares(s))
    for session in sorted(held, key=lambda s: (s.scheduled_at_s or 0, s.id)):
        for quota, name in ((q, name) for q in guarantees for name in counted_names(q, session.request)):
            total = kept.get((quota, name), 0) + taken_milli(session)
            if total <= (quota.guaranteed_milli or 0):
                kept[quota, name] = total
                found[session.id] = found.get(session.id, frozenset()) | {name}
    return found


def beyond_capacity(snapshot: Snapshot, accounts: Accounts) -> list[str]:
    """Return a sentence for each resource group, and for all together, with guarantees above the fGPU of its GPUs."""
    found = []
    given = [(q.resource_group, q.name, q.guaranteed_milli) for q in snapshot.quotas if q.guaranteed_milli]
    for group in dict.fromkeys(group for group, _, _ in given):
        own = {name: milli for of, name, milli in given if of == group}
        needs: dict[str, int] = {}
        # The guarantee of an account covers the accounts below it.
        for path in sorted(map(accounts.path, {*accounts.by_name, DEFAULT}), key=lambda p: -p.count("/")):
            above, _, name = path.rpartition("/")
            needs[path] = max(needs.get(path, 0), own.get(name, own.get(ANY, 0)))
            needs[above] = needs.get(above, 0) + needs[path]
        nodes = (node for node in snapshot.nodes if group in (None, node.resource_group))
        there = sum(device.capacity_milli for node in nodes for device in node.devices)
        if needs[""] > there:
            where = "" if group is None else f" in resource group {group!r}"
            found.append(
                f"accounts are guaranteed {format_milli(needs[''])} fGPU{where}, and there is {format_milli(there)}: "
                "lower guaranteed_fgpu in c.FGPU.quotas or on the page Quotas"
            )
    return found
