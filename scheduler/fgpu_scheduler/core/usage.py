"""The past usage of sessions and its decay. Amounts are fGPU x 1000 x seconds."""

from __future__ import annotations

from collections.abc import Callable

from fgpu_scheduler.core.accounts import Accounts, AccountShare, Member
from fgpu_scheduler.core.model import Holding, Session, Snapshot

#: The default time after which usage counts half.
HALF_LIFE_S = 7 * 24 * 3600

#: Returns the half-life of usage in a resource group, in seconds.
HalfLife = Callable[[str], int]


def fgpu_seconds(session: Session, now_s: int) -> int:
    """Return the usage of a session until now, or until its end: the fGPU x 1000 of its shares x seconds.

    It holds its shares from its placement on, except while it is parked. After a clock that was set back the usage is
    0, never less.
    """
    until_s = now_s if session.ended_at_s is None else session.ended_at_s
    return Holding().then(session, 1).used(until_s)


def taken_milli(session: Session) -> int:
    """Return the fGPU x 1000 that a session holds or, while it waits or is parked, requests."""
    return (session.placement or session.request).fgpu_milli


def member_of(session: Session) -> Member:
    """Return the account and the user whose usage a session adds to."""
    return session.request.account, session.request.user


def decayed(amount: float, *, age_s: int, half_life_s: int) -> float:
    """Return the rest of an amount after ``age_s`` seconds; all of it after a clock that was set back."""
    half_lives: float = max(0, age_s) / half_life_s
    return amount * float(0.5**half_lives)


def used_by_account(snapshot: Snapshot, resource_group: str) -> dict[str, dict[str, int]]:
    """Return the usage in a resource group by account and user: decayed, with sessions that hold shares."""
    found: dict[str, dict[str, int]] = {}
    for (group, account), users in snapshot.index.holdings.items():
        if group == resource_group:
            holdings = zip(users, users.values(), strict=True)
            found[account] = {user: one.used(snapshot.now_s) for user, one in holdings}
    for ended in snapshot.usage:
        if ended.resource_group == resource_group:
            used = found.setdefault(ended.account, {})
            used[ended.user] = used.get(ended.user, 0) + ended.fgpu_milli_s
    return found


def taken_by_account(snapshot: Snapshot, resource_group: str) -> dict[str, dict[str, int]]:
    """Return the fGPU x 1000 held in a resource group by account and user, without users and accounts with none."""
    found = {}
    for (group, account), users in snapshot.index.holdings.items():
        holdings = zip(users, users.values(), strict=True)
        if group == resource_group and (own := {u: one.fgpu_milli for u, one in holdings if one.fgpu_milli}):
            found[account] = own
    return found


def account_shares(snapshot: Snapshot, resource_group: str, accounts: Accounts) -> dict[str, AccountShare]:
    """Return the share and the usage of each account in a resource group, by name."""
    return accounts.shares(used_by_account(snapshot, resource_group))
