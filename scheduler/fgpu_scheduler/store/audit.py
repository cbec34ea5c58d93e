"""The audit log: what administrators did, when, and to what. Lines are added and never changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, or_, select

from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.schema import audit

MOST_ACTOR = 255
MOST_TARGET = 500
MOST_DETAILS = 2000
"""So many characters are kept of each; they are other people's words in part."""


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of the log. ``action`` is a word such as "node.cordon"; ``target`` what it was done to.

    ``resource_group`` is whose that was at the time; None of what is no group's, such as the banner.
    """

    id: int
    at_s: int
    actor: str
    action: str
    target: str
    details: str
    resource_group: str | None = None


class Audit:
    """The audit log of the installation whose store this is. Thread-safe, as its store is."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

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
        """Add a line, in a transaction of its own: after what it tells of was done.

        ``group``: the resource group whose it is, if it is one's.
        """
        with self._store.writing_unversioned() as connection:
            record(
                connection,
                actor=actor,
                action=action,
                target=target,
                group=group,
                details=details,
                now_s=now_s,
            )

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
        """Return the newest lines before an id, newest first, of this actor and this action.

        ``action`` also names all actions that begin with it and a dot; ``text`` is looked for in target and details,
        without regard to case. Lines of these resource groups only, where ``groups`` is not None.
        """
        found = select(audit).order_by(audit.c.id.desc()).limit(limit)
        if before_id is not None:
            found = found.where(audit.c.id < before_id)
        if actor:
            found = found.where(audit.c.actor == actor)
        if action:
            found = found.where(
                or_(audit.c.action == action, audit.c.action.startswith(f"{action}.", autoescape=True))
            )
        if groups is not None:
            found = found.where(audit.c.resource_group.in_(groups))
        if text:
            # SQLite lowers ASCII only: other letters are found as they were written.
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


def record(
    connection: Connection,
    *,
    actor: str,
    action: str,
    target: str,
    group: str | None = None,
    details: str = "",
    now_s: int,
) -> None:
    """Add a line in the transaction of what it tells of."""
    connection.execute(
        insert(audit).values(
            at_s=now_s,
            actor=_clean(actor, MOST_ACTOR),
            action=action,
            target=_clean(target, MOST_TARGET),
            resource_group=group,
            details=_clean(details, MOST_DETAILS),
        )
    )


def _clean(text: str, most: int) -> str:
    """Return the text in one line, cut where it is long; PostgreSQL takes no zero characters."""
    line = " ".join(text.replace("\0", " ").split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
