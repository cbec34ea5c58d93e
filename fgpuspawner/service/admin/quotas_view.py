"""Quotas as administrators see them: what is in force, where it comes from, and who has how much of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fgpu_scheduler import (
    Counted,
    ListedQuota,
    Quota,
    QuotaEdit,
    QuotaScope,
    QuotaSource,
    counted_of_each,
    format_milli,
    limits_words,
    listed_quotas,
    quota_words,
)
from fgpuspawner.service.model import Json, World

MOST_HELD = 100
"""So many of those whom a quota counts are told, who holds most first."""

SOURCE_WORDS = {
    QuotaSource.FILE: "from the file",
    QuotaSource.EDITED: "from the file, changed",
    QuotaSource.ADDED: "not in the file",
    QuotaSource.REMOVED: "in the file, removed",
}


def quotas_object(file: Sequence[Quota], edits: Sequence[QuotaEdit], world: World) -> Json:
    """Return every quota, in force or taken out of force. For administrators only."""
    found = listed_quotas(file, edits)
    counts = counted_of_each([one.quota for one in found], world.snapshot)
    return {
        "quotas": [_quota(one, own) for one, own in zip(found, counts, strict=True)],
        "groups": list(world.groups),
        "simulated": world.simulated(),
    }


def spec_of(quota: Quota) -> dict[str, Any]:
    """Return the dict of ``c.FGPU.quotas`` that means this quota; what is not limited is left out."""
    amounts = {
        "max_fgpu": None if quota.max_fgpu_milli is None else format_milli(quota.max_fgpu_milli),
        "max_sessions": quota.max_sessions,
        "max_pending": quota.max_pending,
        "max_lifetime_s": quota.max_lifetime_s,
    }
    return {**key_of(quota), **{name: value for name, value in amounts.items() if value is not None}}


def key_of(quota: Quota) -> dict[str, str]:
    """Return whom and what a quota is for, as in ``c.FGPU.quotas``."""
    who = {QuotaScope.USER: "user", QuotaScope.GROUP: "hub_group"}.get(quota.scope)
    found = {who: quota.name} if who else {}
    if quota.resource_group is not None or not who:
        found["resource_group"] = quota.resource_group or ""
    return {name: value for name, value in found.items() if value}


def _quota(one: ListedQuota, counted: Sequence[Counted]) -> Json:
    quota, edit = one.quota, one.edit
    in_force = one.source is not QuotaSource.REMOVED
    held = counted if in_force else ()
    return {
        "for": key_of(quota),
        "name": quota_words(quota),
        "limits": {key: value for key, value in spec_of(quota).items() if key.startswith("max_")},
        "text": limits_words(quota),
        "source": one.source.value,
        "source_text": SOURCE_WORDS[one.source],
        "file": limits_words(one.file) if one.file is not None else None,
        "changed_by": edit.changed_by if edit else None,
        "changed_at_s": edit.changed_at_s if edit else None,
        "in_force": in_force,
        "held": [
            {
                "name": who.name,
                "fgpu": format_milli(who.fgpu_milli),
                "sessions": who.sessions,
                "waiting": who.waiting,
                "full": _is_full(quota, who.fgpu_milli, who.sessions),
            }
            for who in held[:MOST_HELD]
        ],
        "held_by": len(held),
    }


def _is_full(quota: Quota, fgpu_milli: int, sessions: int) -> bool:
    over = quota.max_fgpu_milli is not None and fgpu_milli >= quota.max_fgpu_milli
    return over or (quota.max_sessions is not None and sessions >= quota.max_sessions)
