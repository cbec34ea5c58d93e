"""What administrators changed of the quotas by page. It lies over the file's quotas, whole quota by whole quota.

The table of quotas holds what is in force: it is put together anew when the Hub starts with its file, and in the
transaction of each edit.
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
    """Where a quota in force comes from, or that the file's is not in force."""

    FILE = "file"
    EDITED = "edited"
    """The file has one for the same, with other limits or the same."""
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class QuotaEdit:
    """A quota in place of the file's, or beside them; ``removed``: the file's is not in force."""

    quota: Quota
    removed: bool = False
    changed_by: str = ""
    changed_at_s: int = 0


@dataclass(frozen=True, slots=True)
class ListedQuota:
    """A quota, where it comes from, and what the file says if that is something else."""

    quota: Quota
    source: QuotaSource
    file: Quota | None = None
    edit: QuotaEdit | None = None


def listed_quotas(file: Iterable[Quota], edits: Iterable[QuotaEdit]) -> tuple[ListedQuota, ...]:
    """Return the file's quotas with the edits over them, by whom and what they are for."""
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
    """Return the quotas that count."""
    return tuple(one.quota for one in listed_quotas(file, edits) if one.source is not QuotaSource.REMOVED)


def read_quota_edits(connection: Connection) -> tuple[QuotaEdit, ...]:
    """Return every edit, by whom and what it is for."""
    found = map(_edit, read_edits(connection, EditKind.QUOTA))
    return tuple(sorted(found, key=lambda edit: quota_key(edit.quota)))


Change = tuple[str, Quota, QuotaEdit | None]
"""An action of the audit log, the quota that it is done to, and its edit afterwards; None: there is none."""


class QuotaEdits:
    """The edits of one installation. Thread-safe, as its store is. ``file`` is always what the settings say."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def all(self) -> tuple[QuotaEdit, ...]:
        """Return every edit, by whom and what it is for."""
        with self._store.reading() as connection:
            return read_quota_edits(connection)

    def put(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Put this quota in force, in place of one for the same.

        Raises:
            BadSettings: it limits nothing, has an impossible limit, or is for nobody; one line.
        """
        self.put_all([quota], file=file, by=by, now_s=now_s)

    def remove(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Let no quota be in force for whom and what this one is for; also where the file has one.

        Raises:
            BadSettings: there is none.
        """
        self.put_all([], without=[quota], file=file, by=by, now_s=now_s)

    def back_to_file(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Forget what was changed of a quota: what the file says is in force again, or nothing.

        Raises:
            BadSettings: nothing was changed of it.
        """
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
        """Put quotas in force, and take those in ``without`` out of force: all of it, or nothing.

        Raises:
            BadSettings: as of `put`, one in ``without`` is not in force, or too many were changed; nothing is written.
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
            # An event even where nothing in force changes: it is what commits the transaction.
            if done and not accounts.replace_quotas(in_force(file, edits.values()), write):
                write.event(
                    "quotas", reason=f"{done[0] if len(done) == 1 else f'{len(done)} quotas'}: edited"
                )


def _edit(edit: Edit) -> QuotaEdit:
    limits = {name: edit.fields[name] for name in accounts.LARGEST}
    scope, name, resource_group = (edit.fields[key] for key in ("scope", "name", "resource_group"))
    quota = Quota(QuotaScope(scope), name, resource_group or None, **limits)
    return QuotaEdit(quota, edit.fields["removed"], edit.changed_by, edit.changed_at_s)
