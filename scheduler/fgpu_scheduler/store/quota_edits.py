"""What administrators changed of the quotas by page. It lies over the file's quotas, whole quota by whole quota.

The table of quotas holds what is in force: it is put together anew when the Hub starts with its file, and in the
transaction of each edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, insert, select

from fgpu_scheduler.core.model import Quota, QuotaScope
from fgpu_scheduler.core.quota import quota_words
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store import quotas as accounts
from fgpu_scheduler.store.audit import record
from fgpu_scheduler.store.durable import Durable
from fgpu_scheduler.store.rows import quota_key
from fgpu_scheduler.store.schema import quota_edits as table
from fgpu_scheduler.store.upsert import put

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


def read_edits(connection: Connection) -> tuple[QuotaEdit, ...]:
    """Return every edit, by whom and what it is for."""
    found = (_edit(row) for row in connection.execute(select(table)))
    return tuple(sorted(found, key=lambda edit: quota_key(edit.quota)))


class QuotaEdits:
    """The edits of one installation. Thread-safe, as its store is. ``file`` is always what the settings say."""

    def __init__(self, store: Durable) -> None:
        self._store = store

    def all(self) -> tuple[QuotaEdit, ...]:
        """Return every edit, by whom and what it is for."""
        with self._store.reading() as connection:
            return read_edits(connection)

    def put(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Put this quota in force, in place of one for the same.

        Raises:
            BadSettings: it limits nothing, has an impossible limit, or is for nobody; one line.
        """
        accounts.checked([quota])
        _check_name(quota)
        self._write(
            QuotaEdit(quota), "quota.set", accounts.limits_words(quota), file=file, by=by, now_s=now_s
        )

    def remove(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Let no quota be in force for whom and what this one is for; also where the file has one.

        Raises:
            BadSettings: there is none.
        """
        if quota_key(quota) in {quota_key(own) for own in file}:
            self._write(QuotaEdit(quota, removed=True), "quota.remove", "", file=file, by=by, now_s=now_s)
        else:
            self._forget(quota, "quota.remove", file=file, by=by, now_s=now_s)

    def back_to_file(self, quota: Quota, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        """Forget what was changed of a quota: what the file says is in force again, or nothing.

        Raises:
            BadSettings: nothing was changed of it.
        """
        self._forget(quota, "quota.back", file=file, by=by, now_s=now_s)

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
            BadSettings: as of `put`, or too many were changed; nothing is written.
        """
        accounts.checked(wanted)
        with self._store.writing(now_s=now_s) as write:
            edits = {quota_key(edit.quota): edit for edit in read_edits(write.connection)}
            given = {quota_key(quota) for quota in file}
            for quota in wanted:
                _check_name(quota)
                edits[quota_key(quota)] = QuotaEdit(quota, changed_by=by, changed_at_s=now_s)
            for quota in without:
                edits.pop(quota_key(quota), None)
                if quota_key(quota) in given:
                    edits[quota_key(quota)] = QuotaEdit(
                        quota, removed=True, changed_by=by, changed_at_s=now_s
                    )
            if len(edits) > MOST_EDITS:
                raise BadSettings(
                    f"{len(edits)} quotas would be changed from the file; at most {MOST_EDITS} can be"
                )
            write.connection.execute(delete(table))
            if edits:
                write.connection.execute(insert(table), [_row(edit) for edit in edits.values()])
            if not accounts.become(in_force(file, edits.values()), write):
                write.event("quotas", reason=f"{len(wanted) + len(without)} quotas: edited")
            for action, quotas in (("quota.set", wanted), ("quota.remove", without)):
                for quota in quotas:
                    details = accounts.limits_words(quota) if action == "quota.set" else ""
                    target = quota_words(quota)
                    record(
                        write.connection,
                        actor=by,
                        action=action,
                        target=target,
                        group=quota.resource_group,
                        details=details,
                        now_s=now_s,
                    )

    def _write(
        self, edit: QuotaEdit, action: str, details: str, *, file: Sequence[Quota], by: str, now_s: int
    ) -> None:
        with self._store.writing(now_s=now_s) as write:
            before = read_edits(write.connection)
            own = next((e for e in before if quota_key(e.quota) == quota_key(edit.quota)), None)
            if own is not None and (own.quota, own.removed) == (edit.quota, edit.removed):
                return
            if own is None and len(before) >= MOST_EDITS:
                raise BadSettings(f"{MOST_EDITS} quotas were changed already; put some back to the file")
            new = replace(edit, changed_by=by, changed_at_s=now_s)
            put(write.connection, table, [_row(new)])
            edits = (*(e for e in before if e is not own), new)
            # An event even where nothing in force changes: it is what commits the transaction.
            if not accounts.become(in_force(file, edits), write):
                write.event("quotas", reason=f"{quota_words(edit.quota)}: edited")
            record(
                write.connection,
                actor=by,
                action=action,
                target=quota_words(edit.quota),
                group=edit.quota.resource_group,
                details=details,
                now_s=now_s,
            )

    def _forget(self, quota: Quota, action: str, *, file: Sequence[Quota], by: str, now_s: int) -> None:
        with self._store.writing(now_s=now_s) as write:
            before = read_edits(write.connection)
            own = next((e for e in before if quota_key(e.quota) == quota_key(quota)), None)
            if own is None:
                raise BadSettings(f"nothing was changed of the quota of {quota_words(quota)}")
            write.connection.execute(delete(table).where(_at(quota)))
            if not accounts.become(in_force(file, [e for e in before if e is not own]), write):
                write.event("quotas", reason=f"{quota_words(quota)}: back to the file")
            record(
                write.connection,
                actor=by,
                action=action,
                target=quota_words(quota),
                group=quota.resource_group,
                now_s=now_s,
            )


def _check_name(quota: Quota) -> None:
    if len(quota.name) > MOST_NAME or "\0" in quota.name:
        raise BadSettings(f"the name has {len(quota.name)} characters; it may have {MOST_NAME}")


def _row(edit: QuotaEdit) -> dict[str, Any]:
    how = {"removed": edit.removed, "changed_by": edit.changed_by, "changed_at_s": edit.changed_at_s}
    return {**accounts.quota_values(edit.quota), **how}


def _at(quota: Quota) -> ColumnElement[bool]:
    scope, name, resource_group = quota_key(quota)
    return and_(table.c.scope == scope, table.c.name == name, table.c.resource_group == resource_group)


def _edit(row: Row[tuple[object, ...]]) -> QuotaEdit:
    limits = {name: getattr(row, name) for name in accounts.LARGEST}
    quota = Quota(QuotaScope(row.scope), row.name, row.resource_group or None, **limits)
    return QuotaEdit(quota, row.removed, row.changed_by, row.changed_at_s)
