"""Administrators' edits of quotas. An edit replaces or removes a whole quota of the settings' file, or adds one.

The table of quotas has those in force. It is rebuilt when the Hub starts with its file, and in the transaction of each
edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection

from fgpu_scheduler.core.model import Quota, QuotaScope
from fgpu_scheduler.core.quota import quota_words
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store import quotas as accounts
from fgpu_scheduler.store.audit import record
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.edits import Edit, EditKind, delete_edit, read_edits, write_edits
from fgpu_scheduler.store.rows import quota_key

MOST_EDITS = 10_000
MOST_NAME = 255


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
            if own is not None:
                found.append(ListedQuota(own, QuotaSource.FILE))
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
    found = map(_edit, read_edits(connection, EditKind.QUOTA))
    return tuple(sorted(found, key=lambda edit: quota_key(edit.quota)))


Change = tuple[str, Quota, QuotaEdit | None]
"""An action of the audit log, its quota, and the quota's edit afterwards; None: no edit."""


class QuotaEdits:
    """The quota edits of an installation. Thread-safe. ``file`` is always the quotas in the settings."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def all(self) -> tuple[QuotaEdit, ...]:
        """Return every edit, by `quota_key`."""
        with self._store.reading() as connection:
            return read_quota_edits(connection)

    def put(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Put this quota in force, instead of one for the same users and resource group.

        Raises:
            BadSettings: it has no limit, an impossible limit, or no name; one line.
        """
        self.put_all([quota], file=file, by=by, now_s=now_s)

    def remove(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Remove the quota for the same users and resource group, even if the file has it.

        Raises:
            BadSettings: there is none in force.
        """
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
            BadSettings: as in `put`; or one in ``without`` is not in force; or there are too many edits.
        """
        accounts.checked(wanted)
        given = {quota_key(quota) for quota in file}
        changes: list[Change] = []
        for quota in wanted:
            if len(quota.name) > MOST_NAME or "\0" in quota.name:
                raise BadSettings(f"the name has {len(quota.name)} characters; it may have {MOST_NAME}")
            changes.append(("quota.set", quota, QuotaEdit(quota, changed_by=by, changed_at_s=now_s)))
        for quota in without:
            gone = QuotaEdit(quota, removed=True, changed_by=by, changed_at_s=now_s)
            changes.append(("quota.remove", quota, gone if quota_key(quota) in given else None))
        self._change(changes, file=file, by=by, now_s=now_s)

    def _change(self, changes: Sequence[Change], *, file: Sequence[Quota], by: str, now_s: int) -> None:
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
                    written[name] = {**accounts.quota_values(quota), "removed": edit.removed}
                else:
                    continue
                details = accounts.limits_words(quota) if action == "quota.set" else ""
                done.append(quota_words(quota))
                record(
                    write.connection,
                    actor=by,
                    action=action,
                    target=done[-1],
                    group=quota.resource_group,
                    details=details,
                    now_s=now_s,
                )
            if len(edits) > MOST_EDITS:
                raise BadSettings(
                    f"{len(edits)} quotas would be changed from the file; at most {MOST_EDITS} can be"
                )
            write_edits(write.connection, EditKind.QUOTA, written, by=by, now_s=now_s)
            # Log an event even if no quota in force changes: without one the transaction is rolled back.
            if done and not accounts.replace_quotas(in_force(file, edits.values()), write):
                write.event(
                    "quotas", reason=f"{done[0] if len(done) == 1 else f'{len(done)} quotas'}: edited"
                )


def _edit(edit: Edit) -> QuotaEdit:
    limits = {name: edit.fields[name] for name in accounts.LARGEST}
    scope, name, resource_group = (edit.fields[key] for key in ("scope", "name", "resource_group"))
    quota = Quota(QuotaScope(scope), name, resource_group or None, **limits)
    return QuotaEdit(quota, edit.fields["removed"], edit.changed_by, edit.changed_at_s)
