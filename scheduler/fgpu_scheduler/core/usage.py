"""The past usage of sessions and its decay. Amounts are fGPU x 1000 x seconds."""

from __future__ import annotations

from collections.abc import Callable

from fgpu_scheduler.core.accounts import Accounts, AccountShare, Member
from fgpu_scheduler.core.lifecycle import holds_shares
from fgpu_scheduler.core.model import Session, Snapshot

#: The default time after which usage counts half.
HALF_LIFE_S = 7 * 24 * 3600

#: Returns the half-life of usage in a resource group, in seconds.
HalfLife = Callable[[str], int]


def fgpu_seconds(session: Session, now_s: int) -> int:
    """Return the usage of a session until now, or until its end: the fGPU x 1000 of its shares x seconds.

    It holds its shares from its placement on, except while it is parked. After a clock that was set back the usage is
    0, never less.
    """
    if session.placement is None or session.scheduled_at_s is None:
        return 0
    until_s = now_s if session.ended_at_s is None else session.ended_at_s
    now_milli = taken_milli(session) if session.parked_at_s is None else 0
    if not session.sizes:
        return now_milli * max(0, until_s - session.scheduled_at_s)
    used, since_s = 0, session.scheduled_at_s
    for size in session.sizes:
        used += size.fgpu_milli * max(0, size.until_s - since_s)
        since_s = max(since_s, size.until_s)
    return used + now_milli * max(0, until_s - since_s)


def taken_milli(session: Session) -> int:
    """Return the fGPU x 1000 that a session holds or, while it waits or is parked, requests."""
    if session.placement is None:
        return session.request.fgpu_milli
    shares = session.placement.shares
    # Most sessions hold one share, and this runs for every session in each pass.
    return shares[0].fgpu_milli if len(shares) == 1 else sum(share.fgpu_milli for share in shares)


def member_of(session: Session) -> Member:
    """Return the account and the user whose usage a session adds to."""
    return session.request.account, session.request.user


def decayed(amount: float, *, age_s: int, half_life_s: int) -> float:
    """Return the rest of an amount after ``age_s`` seconds; all of it after a clock that was set back."""
    half_lives: float = max(0, age_s) / half_life_s
    return amount * float(0.5**half_lives)


def used_by_member(snapshot: Snapshot, resource_group: str) -> dict[Member, int]:
    """Return the usage of each user and account in a resource group: decayed, with sessions that hold shares."""
    used: dict[Member, int] = {}
    for ended in snapshot.usage:
        if ended.resource_group == resource_group:
            member = ended.account, ended.user
            used[member] = used.get(member, 0) + ended.fgpu_milli_s
    for session in snapshot.sessions:
        if session.placement is not None and session.request.resource_group == resource_group:
            member = member_of(session)
            used[member] = used.get(member, 0) + fgpu_seconds(session, snapshot.now_s)
    return used


def taken_by_member(snapshot: Snapshot, resource_group: str) -> dict[Member, int]:
    """Return the fGPU x 1000 that each user of an account holds in a resource group, without those who hold none."""
    taken: dict[Member, int] = {}
    for session in snapshot.sessions:
        asked = session.request
        if holds_shares(session) and asked.resource_group == resource_group:
            member = member_of(session)
            taken[member] = taken.get(member, 0) + taken_milli(session)
    return taken


def account_shares(snapshot: Snapshot, resource_group: str, accounts: Accounts) -> dict[str, AccountShare]:
    """Return the share and the usage of each account in a resource group, by name."""
    return accounts.shares(used_by_member(snapshot, resource_group))
