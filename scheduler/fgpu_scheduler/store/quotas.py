"""Quotas: their limits, their table, and the refusal of submissions that exceed them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import delete, insert

from fgpu_scheduler.core.admission import Caps, quota_refusals
from fgpu_scheduler.core.model import Quota, QuotaScope, Request, SessionIndex
from fgpu_scheduler.core.quota import ANY, over_pending, quota_words
from fgpu_scheduler.core.units import LARGEST_MILLI, MILLI, duration, format_milli
from fgpu_scheduler.errors import BadSettings, OverQuota
from fgpu_scheduler.store.rows import quota_key
from fgpu_scheduler.store.schema import quotas
from fgpu_scheduler.store.snapshot_cache import Contents
from fgpu_scheduler.store.transaction import SqlWrite

LARGEST = {
    "max_fgpu_milli": LARGEST_MILLI,
    "max_sessions": 10**9,
    "max_pending": 10**9,
    "max_lifetime_s": 10**10,
}
"""The largest value of each limit, which fits its column in the database."""

LEAST = {"max_fgpu_milli": 0, "max_sessions": 0, "max_pending": 0, "max_lifetime_s": 60}


def checked(wanted: Iterable[Quota]) -> tuple[Quota, ...]:
    """Return the quotas by `quota_key`.

    Raises:
        BadSettings: one is there twice, has no limit, an impossible limit, or no name.
    """
    found = tuple(sorted(wanted, key=quota_key))
    for before, quota in zip((None, *found), found, strict=False):
        said = f"the quota of {quota_words(quota)}"
        if before is not None and quota_key(before) == quota_key(quota):
            raise BadSettings(f"{said} is there twice")
        if not quota.name or quota.resource_group == "":
            raise BadSettings(f"{said}: a name is missing; {ANY!r} stands for each")
        if quota.scope is QuotaScope.ALL and quota.name != ANY:
            raise BadSettings(f"{said}: the name is {quota.name!r}, and can only be {ANY!r}")
        limits = {name: getattr(quota, name) for name in LARGEST}
        if all(limit is None for limit in limits.values()):
            raise BadSettings(f"{said} limits nothing; give one of {', '.join(LARGEST)}")
        for name, limit in limits.items():
            if limit is not None and not LEAST[name] <= limit <= LARGEST[name]:
                raise BadSettings(f"{said}: {name} is {limit}, and may be {LEAST[name]} to {LARGEST[name]}")
    return found


def replace_quotas(wanted: Iterable[Quota], write: SqlWrite) -> bool:
    """Replace the stored quotas, with an event for each that changes; return whether any changed.

    Raises:
        BadSettings: as in `checked`.
    """
    new, old = checked(wanted), write.world.quotas
    if new == old:
        return False
    write.connection.execute(delete(quotas))
    if new:
        write.connection.execute(insert(quotas), [quota_values(quota) for quota in new])
    kept, before = {quota_key(quota) for quota in new}, set(old)
    for quota in (q for q in old if quota_key(q) not in kept):
        write.event("quotas", reason=f"{quota_words(quota)}: none")
    for quota in (q for q in new if q not in before):
        write.event("quotas", reason=f"{quota_words(quota)}: {limits_words(quota)}")
    return True


def quota_values(quota: Quota) -> dict[str, Any]:
    """Return the row of a quota."""
    scope, name, resource_group = quota_key(quota)
    limits = {name: getattr(quota, name) for name in LARGEST}
    return {"scope": scope, "name": name, "resource_group": resource_group, **limits}


def limits_words(quota: Quota) -> str:
    """Return the limits of a quota in words."""
    fgpu, sessions = quota.max_fgpu_milli, quota.max_sessions
    said = (
        None if fgpu is None else f"{format_milli(fgpu)} fGPU",
        None if sessions is None else f"{sessions} session{'' if sessions == 1 else 's'}",
        None if quota.max_pending is None else f"{quota.max_pending} waiting",
        None if quota.max_lifetime_s is None else duration(quota.max_lifetime_s),
    )
    return ", ".join(one for one in said if one is not None)


def refuse_over_quota(asked: Sequence[Request], world: Contents, groups: SessionIndex) -> None:
    """Refuse a submission that exceeds a pending quota, or could never start under a quota.

    ``groups`` are the live sessions that count.

    Raises:
        OverQuota: with the quota, its limit, and the number of pending requests or the requested amount.
    """
    if not world.quotas:
        return
    waiting = [session.request for line in groups.waiting.values() for session in line.values()]
    over = over_pending(world.quotas, waiting, asked)
    if over is not None:
        raise OverQuota(over.message)
    for one in asked:
        never = quota_refusals(one, 0, world.nodes, Caps(fgpu_step_milli=MILLI), world.quotas)
        if never:
            raise OverQuota(never[0].message)
