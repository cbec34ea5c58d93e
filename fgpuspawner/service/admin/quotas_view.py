"""Quotas for administrators: which are in force, from where, and their use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fgpu_scheduler import (
    Counted,
    ListedQuota,
    Quota,
    QuotaEdit,
    QuotaScope,
    QuotaSource,
    counted_of_each,
    duration,
    format_milli,
    limits_words,
    listed_quotas,
    quota_words,
)
from fgpuspawner.service.admin import objects
from fgpuspawner.service.model import Viewer, World

MOST_HELD = 100
"""Most holders shown of a quota, the largest first."""

SOURCE_WORDS = {
    QuotaSource.FILE: "from the file",
    QuotaSource.EDITED: "from the file, changed",
    QuotaSource.ADDED: "not in the file",
    QuotaSource.REMOVED: "in the file, removed",
}


def quotas_object(file: Sequence[Quota], edits: Sequence[QuotaEdit], world: World) -> objects.Quotas:
    """Return every quota, in force or removed. For administrators only."""
    found = listed_quotas(file, edits)
    counts = counted_of_each([one.quota for one in found], world.snapshot)
    quotas = [_quota(one, own) for one, own in zip(found, counts, strict=True)]
    return objects.Quotas.of(world, quotas=quotas, simulated=world.simulated())


def spec_of(quota: Quota) -> dict[str, Any]:
    """Return this quota as a dict of ``c.FGPU.quotas``, without what is not limited."""
    given = {name: value for name, value in amounts_of(quota).items() if value is not None}
    amounts = {name: format_milli(value) if name == "max_fgpu" else value for name, value in given.items()}
    return {**key_of(quota), **amounts}


def amounts_of(quota: Quota) -> dict[str, int | None]:
    """Return a quota's limits by their names in ``c.FGPU.quotas``; fGPU in thousandths."""
    return {
        "max_fgpu": quota.max_fgpu_milli,
        "max_sessions": quota.max_sessions,
        "max_pending": quota.max_pending,
        "max_lifetime_s": quota.max_lifetime_s,
    }


def key_of(quota: Quota) -> dict[str, str]:
    """Return the user or group of a quota, as in ``c.FGPU.quotas``."""
    who = {QuotaScope.USER: "user", QuotaScope.GROUP: "hub_group"}.get(quota.scope)
    found = {who: quota.name} if who else {}
    if quota.resource_group is not None or not who:
        found["resource_group"] = quota.resource_group or ""
    return {name: value for name, value in found.items() if value}


def not_for_group(quota: Quota, viewer: Viewer, others: Iterable[Quota]) -> tuple[str, str] | None:
    """Return why an administrator of some resource groups must not write a quota, with the field; None if they may.

    They set limits of a member, or of each, in a group, up to the limits that ``others``, the quotas in force, set for
    the group as a whole.
    """
    group = quota.resource_group
    if group is None or group not in viewer.administers:
        return "resource_group", f"must be one that you administer: {' or '.join(viewer.administers)}"
    if quota.scope is QuotaScope.GROUP:
        return "hub_group", "set it for a user, or for each user (*); for a whole group you must not"
    if quota.scope is QuotaScope.ALL:
        return "user", "name a user, or each user (*); for everybody together you must not set it"
    if quota.name == viewer.user:
        return "user", "you can't set your own quota; ask an administrator"
    of_group = [q for q in others if q.resource_group == group and q.scope is not QuotaScope.USER]
    for name, asked in amounts_of(quota).items():
        of_all = [amounts_of(q)[name] for q in of_group if q.scope is QuotaScope.ALL]
        of_some = [amounts_of(q)[name] for q in of_group if q.scope is QuotaScope.GROUP]
        limits = [most for most in of_all if most is not None]
        most = min(limits, default=None)
        if most is None and of_some and None not in of_some:
            # The quota may be of a group of the Hub, and its members' resource groups are not known here.
            most = max(most for most in of_some if most is not None)
        if asked is not None and most is not None and asked > most:
            told = {"max_fgpu": format_milli, "max_lifetime_s": duration}.get(name, str)(most)
            return name, f"at most {told}, the quota of resource group {group!r}"
    return None


def _quota(one: ListedQuota, counted: Sequence[Counted]) -> objects.Quota:
    quota, edit = one.quota, one.edit
    in_force = one.source is not QuotaSource.REMOVED
    held = counted if in_force else ()
    return objects.Quota.of(
        for_=key_of(quota),
        name=quota_words(quota),
        limits={key: value for key, value in spec_of(quota).items() if key.startswith("max_")},
        text=limits_words(quota),
        source=one.source,
        source_text=SOURCE_WORDS[one.source],
        file=limits_words(one.file) if one.file is not None else None,
        changed_by=edit.changed_by if edit else None,
        changed_at_s=edit.changed_at_s if edit else None,
        in_force=in_force,
        held=[
            objects.QuotaHolder.of(who, full=_is_full(quota, who.fgpu_milli, who.sessions))
            for who in held[:MOST_HELD]
        ],
        held_by=len(held),
    )


def _is_full(quota: Quota, fgpu_milli: int, sessions: int) -> bool:
    over = quota.max_fgpu_milli is not None and fgpu_milli >= quota.max_fgpu_milli
    return over or (quota.max_sessions is not None and sessions >= quota.max_sessions)
