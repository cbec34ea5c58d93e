"""Quotas: their limits, their table, administrators' edits, and the refusal of submissions that exceed them.

An edit replaces or removes a whole quota of the settings' file, or adds one. The table of quotas has those in force. It
is rebuilt when the Hub starts with its file, and in the transaction of each edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, delete, insert

from fgpu_scheduler.core.admission import Caps, quota_refusals
from fgpu_scheduler.core.model import Quota, QuotaScope, Request, SessionIndex
from fgpu_scheduler.core.quota import ANY, over_pending, quota_words
from fgpu_scheduler.core.units import LARGEST_MILLI, MILLI, duration, format_milli
from fgpu_scheduler.errors import BadSettings, OverQuota
from fgpu_scheduler.store.administration import EditKind, delete_edit, read_edits, write_edits
from fgpu_scheduler.store.rows import quota_key, quota_of
from fgpu_scheduler.store.schema import quotas
from fgpu_scheduler.store.snapshot_cache import Contents
from fgpu_scheduler.store.transaction import StorePart, Write

LIMITS = {
    "max_fgpu_milli": (0, LARGEST_MILLI),
    "max_sessions": (0, 10**9),
    "max_pending": (0, 10**9),
    "max_lifetime_s": (60, 10**10),
    "guaranteed_milli": (0, LARGEST_MILLI),
}
"""The least and the largest value of each limit; the largest fits its column in the database."""
MOST_EDITS = 10_000
MOST_NAME = 255


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
        guaranteed, most = quota.guaranteed_milli, quota.max_fgpu_milli
        if guaranteed is not None and quota.scope is not QuotaScope.ACCOUNT:
            raise BadSettings(f"{said}: guaranteed_milli is for accounts only; leave it out")
        if guaranteed is not None and most is not None and guaranteed > most:
            raise BadSettings(f"{said}: guaranteed_milli is {guaranteed}, above max_fgpu_milli of {most}")
        limits = {name: getattr(quota, name) for name in LIMITS}
        if all(limit is None for limit in limits.values()):
            raise BadSettings(f"{said} limits nothing; give one of {', '.join(LIMITS)}")
        for name, limit in limits.items():
            least, largest = LIMITS[name]
            if limit is not None and not least <= limit <= largest:
                raise BadSettings(f"{said}: {name} is {limit}, and may be {least} to {largest}")
    return found


def replace_quotas(wanted: Iterable[Quota], write: Write) -> bool:
    """Replace the stored quotas, with an event for each that changes; return whether any changed."""
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
    limits = {name: getattr(quota, name) for name in LIMITS}
    return {"scope": scope, "name": name, "resource_group": resource_group, **limits}


def limits_words(quota: Quota) -> str:
    """Return the limits of a quota in words."""
    fgpu, sessions, guaranteed = quota.max_fgpu_milli, quota.max_sessions, quota.guaranteed_milli
    said = (
        None if guaranteed is None else f"{format_milli(guaranteed)} fGPU guaranteed",
        None if fgpu is None else f"{'' if guaranteed is None else 'at most '}{format_milli(fgpu)} fGPU",
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


# --- Edits ---


class QuotaSource(StrEnum):
    """Where a listed quota comes from."""

    FILE = "file"
    EDITED = "edited"
    """It replaces the file's quota for the same users and resource group."""
    ADDED = "added"
    REMOVED = "removed"
    """It is in the file, but not in force."""


@dataclass(frozen=True, slots=True)
class QuotaEdit:
    """A quota that replaces the file's or adds to it; ``removed``: the file's quota is not in force."""

    quota: Quota
    removed: bool = False
    changed_by: str = ""
    changed_at_s: int = 0


@dataclass(frozen=True, slots=True)
class ListedQuota:
    """A quota with its source, the file's quota for the same, and the edit."""

    quota: Quota
    source: QuotaSource
    file: Quota | None = None
    edit: QuotaEdit | None = None


def listed_quotas(file: Iterable[Quota], edits: Iterable[QuotaEdit]) -> tuple[ListedQuota, ...]:
    """Return the file's quotas with the edits applied, by `quota_key`."""
    given, changed = {quota_key(q): q for q in file}, {quota_key(e.quota): e for e in edits}
    found: list[ListedQuota] = []
    for key in sorted({*given, *changed}):
        own, edit = given.get(key), changed.get(key)
        if edit is None:
            found.append(ListedQuota(given[key], QuotaSource.FILE))
        elif not edit.removed:
            source = QuotaSource.ADDED if own is None else QuotaSource.EDITED
            found.append(ListedQuota(edit.quota, source, own, edit))
        elif own is not None:
            found.append(ListedQuota(own, QuotaSource.REMOVED, own, edit))
    return tuple(found)


def in_force(file: Iterable[Quota], edits: Iterable[QuotaEdit]) -> tuple[Quota, ...]:
    """Return the quotas in force."""
    return tuple(one.quota for one in listed_quotas(file, edits) if one.source is not QuotaSource.REMOVED)


def read_quota_edits(connection: Connection) -> tuple[QuotaEdit, ...]:
    """Return every edit, by `quota_key`."""
    found = []
    for edit in read_edits(connection, EditKind.QUOTA):
        quota = quota_of(edit.fields[key] for key in ("scope", "name", "resource_group", *LIMITS))
        found.append(QuotaEdit(quota, edit.fields["removed"], edit.changed_by, edit.changed_at_s))
    return tuple(sorted(found, key=lambda edit: quota_key(edit.quota)))


QuotaChange = tuple[str, Quota, QuotaEdit | None]
"""An action of the audit log, its quota, and the quota's edit afterwards; None: no edit."""


class QuotaEdits(StorePart):
    """The quota edits of an installation. ``file`` is always the quotas in the settings."""

    def all(self) -> tuple[QuotaEdit, ...]:
        """Return every edit, by `quota_key`."""
        with self._store.reading() as connection:
            return read_quota_edits(connection)

    def put(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Put this quota in force, instead of one for the same users and resource group; raises as `put_all` does."""
        self.put_all([quota], file=file, by=by, now_s=now_s)

    def remove(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Remove the quota for the same users and resource group, even if the file has it; raises as `put_all` does."""
        self.put_all([], without=[quota], file=file, by=by, now_s=now_s)

    def back_to_file(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Delete the edit of a quota (`BadSettings` if it has none), so that the file's is in force again, if any."""
        self._change([("quota.back", quota, None)], file=file, by=by, now_s=now_s)

    def put_all(
        self,
        wanted: Sequence[Quota],
        *,
        without: Sequence[Quota] = (),
        file: Sequence[Quota],
        by: str,
        now_s: int,
    ) -> None:
        """Put quotas in force and remove those in ``without``, all or nothing.

        Raises:
            BadSettings: one has no limit, an impossible limit, or no name; one in ``without`` is not in force; or there
                are too many edits.
        """
        checked(wanted)
        given = {quota_key(quota) for quota in file}
        changes: list[QuotaChange] = []
        for quota in wanted:
            if len(quota.name) > MOST_NAME or "\0" in quota.name:
                raise BadSettings(f"the name has {len(quota.name)} characters; it may have {MOST_NAME}")
            changes.append(("quota.set", quota, QuotaEdit(quota)))
        for quota in without:
            gone = QuotaEdit(quota, removed=True)
            changes.append(("quota.remove", quota, gone if quota_key(quota) in given else None))
        self._change(changes, file=file, by=by, now_s=now_s)

    def _change(self, changes: Sequence[QuotaChange], *, file: Sequence[Quota], by: str, now_s: int) -> None:
        with self._store.writing(now_s=now_s) as write:
            edits = {quota_key(edit.quota): edit for edit in read_quota_edits(write.connection)}
            done, written = [], {}
            for action, quota, edit in changes:
                key, name = quota_key(quota), json.dumps(quota_key(quota))
                old = edits.get(key)
                if edit is None:
                    if edits.pop(key, None) is None:
                        raise BadSettings(f"nothing was changed of the quota of {quota_words(quota)}")
                    delete_edit(write.connection, EditKind.QUOTA, name)
                elif old is None or (old.quota, old.removed) != (edit.quota, edit.removed):
                    edits[key] = edit
                    written[name] = {**quota_values(quota), "removed": edit.removed}
                else:
                    continue
                details = limits_words(quota) if action == "quota.set" else ""
                done.append(quota_words(quota))
                write.audit(by, action, done[-1], details, quota.resource_group)
            if len(edits) > MOST_EDITS:
                raise BadSettings(
                    f"{len(edits)} quotas would be changed from the file; at most {MOST_EDITS} can be"
                )
            write_edits(write.connection, EditKind.QUOTA, written, by=by, now_s=now_s)
            # Log an event even if no quota in force changes: without one the transaction is rolled back.
            if done and not replace_quotas(in_force(file, edits.values()), write):
                write.event(
                    "quotas", reason=f"{done[0] if len(done) == 1 else f'{len(done)} quotas'}: edited"
                )
