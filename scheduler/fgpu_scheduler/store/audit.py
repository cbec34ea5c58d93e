"""The audit log: what administrators did, when and to what. Lines are added and never changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import func, or_, select

from fgpu_scheduler.store.schema import audit
from fgpu_scheduler.store.transaction import StorePart, add_audit_line


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of the log. ``action`` is a word such as "node.cordon"; ``target`` is what it was done to.

    ``resource_group`` is the target's group at that time, None if it had none, such as the banner.
    """

    id: int
    at_s: int
    actor: str
    action: str
    target: str
    details: str
    resource_group: str | None = None


class Audit(StorePart):
    """The audit log of an installation."""

    def add(
        self,
        *,
        actor: str,
        action: str,
        target: str,
        group: str | None = None,
        details: str = "",
        now_s: int,
    ) -> None:
        """Add a line in its own transaction, after the action. ``group`` is the target's resource group."""
        with self._store.writing_unversioned() as connection:
            add_audit_line(connection, actor, action, target, details, group, now_s=now_s)

    def lines(
        self,
        *,
        limit: int,
        before_id: int | None = None,
        actor: str = "",
        action: str = "",
        text: str = "",
        groups: Collection[str] | None = None,
    ) -> tuple[AuditLine, ...]:
        """Return the newest lines before an id, newest first, filtered by each argument that is given.

        ``action`` also matches actions that begin with it and a dot; ``text`` is searched in target and details, ignoring
        case.
        """
        found = select(audit).order_by(audit.c.id.desc()).limit(limit)
        if before_id is not None:
            found = found.where(audit.c.id < before_id)
        if actor:
            found = found.where(audit.c.actor == actor)
        if action:
            of_kind = audit.c.action.startswith(f"{action}.", autoescape=True)
            found = found.where(or_(audit.c.action == action, of_kind))
        if groups is not None:
            found = found.where(audit.c.resource_group.in_(groups))
        if text:
            # SQLite lowers only ASCII letters, so others are also searched as they were written.
            found = found.where(
                or_(
                    *(
                        column.contains(given, autoescape=True)
                        for c in (audit.c.target, audit.c.details)
                        for column, given in ((func.lower(c), text.lower()), (c, text))
                    )
                )
            )
        with self._store.reading() as connection:
            return tuple(AuditLine(*row) for row in connection.execute(found))
