"""The store's statements, built once, because building many of them takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.model import Node, Quota, RequestCount, Session, SessionState
from fgpu_scheduler.core.request_counts import counted_ids, in_order
from fgpu_scheduler.core.run_lengths import NEWEST_RUNS, PastRun
from fgpu_scheduler.core.shares import RequestShape
from fgpu_scheduler.store.rows import Used, nodes_of, quota_key, quota_of, sessions_of, texts_of
from fgpu_scheduler.store.schema import (
    devices,
    end_messages,
    events,
    has_run,
    in_states,
    is_live,
    is_serving,
    meta,
    nodes,
    quotas,
    sessions,
    shares,
    usage,
)

S = SessionState


class CompiledStatement:
    """A statement that is compiled once for each driver: compiling is most of the time of a small write in SQLAlchemy.

    Values go to the driver unchanged: numbers, texts, booleans, None.
    """

    def __init__(
        self, statement: sa.Insert | sa.Update | sa.Delete | sa.Select[Any], names: Iterable[str] = ()
    ) -> None:
        """``names`` are the columns that an INSERT or UPDATE sets."""
        self._statement = statement
        self._names = tuple(names)
        #: By dialect: the SQL, and a function from a row to the values that the driver takes.
        self._compiled: dict[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {}

    def one(self, connection: sa.Connection, row: Mapping[str, Any]) -> sa.CursorResult[Any]:
        """Run the statement for one row."""
        sql, values_of = self._compiled_for(connection.dialect)
        return connection.exec_driver_sql(sql, values_of(row))

    def all(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run the statement for each of the rows."""
        if len(rows) == 1:
            self.one(connection, rows[0])
        elif rows:
            sql, values_of = self._compiled_for(connection.dialect)
            connection.exec_driver_sql(sql, [values_of(row) for row in rows])

    def _compiled_for(self, dialect: sa.Dialect) -> tuple[str, Callable[[Mapping[str, Any]], Any]]:
        found = self._compiled.get(dialect.name)
        if found is None:
            # None: the columns in the statement itself.
            made = self._statement.compile(dialect=dialect, column_keys=self._names or None)
            order = made.positiontup
            values_of: Callable[[Mapping[str, Any]], Any]
            if order is None:
                values_of = dict  # Placeholders have names.
            elif len(order) > 1:
                values_of = itemgetter(*order)
            else:
                values_of = lambda row: tuple(row[name] for name in order)  # noqa: E731
            found = self._compiled[dialect.name] = str(made), values_of
        return found


class SessionQuery:
    """Statements that read the sessions of a condition and all their shares."""

    def __init__(self, chosen: sa.Select[Any]) -> None:
        ids = chosen.with_only_columns(sessions.c.id)
        self.chosen = chosen
        self.shares = (
            sa.select(shares)
            .where(shares.c.session_id.in_(ids))
            .order_by(shares.c.session_id, shares.c.position)
        )

    def first(self, connection: sa.Connection, **values: Any) -> Session | None:
        return next(iter(self.read(connection, **values)), None)

    def read(self, connection: sa.Connection, **values: Any) -> tuple[Session, ...]:
        rows = connection.execute(self.chosen, values).all()
        return sessions_of(rows, connection.execute(self.shares, values) if rows else ())


def put(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert these complete rows, replacing rows with the same primary key.

    One statement does it, so that two concurrent writers both succeed.
    """
    if not rows:
        return
    new: postgresql.Insert | sqlite.Insert
    new = postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)
    keys = [column.name for column in table.primary_key]
    rest = {c.name: new.excluded[c.name] for c in table.columns if c.name not in keys}
    connection.execute(new.on_conflict_do_update(index_elements=keys, set_=rest), rows)


_of_user = sessions.c.user_name == sa.bindparam("user")
_ended = sa.select(sessions).where(sessions.c.ended_at_s.is_not(None)).limit(sa.bindparam("limit"))
_ended_last = _ended.order_by(sessions.c.ended_at_s.desc(), sessions.c.id.desc())
#: Ended sessions, those that were submitted last first.
ENDED_BY_ID = _ended.order_by(sessions.c.id.desc())

LIVE_SESSIONS = SessionQuery(sa.select(sessions).where(is_live).order_by(sessions.c.id))
HELD_SESSIONS = SessionQuery(
    # The first condition selects the index, the second one the states.
    sa.select(sessions)
    .where(is_live, in_states((S.PENDING, S.SCHEDULED, *lifecycle.LAUNCHING)), sessions.c.held)
    .order_by(
        sa.case((sessions.c.state == S.PENDING.value, 1), else_=0), sessions.c.submitted_at_s, sessions.c.id
    )
)
ONE_SESSION = SessionQuery(sa.select(sessions).where(sessions.c.id == sa.bindparam("session_id")))
SERVING_SESSION = SessionQuery(
    sa.select(sessions).where(is_serving, _of_user, sessions.c.server_name == sa.bindparam("server_name"))
)
ENDED_SESSIONS = SessionQuery(_ended_last)
ENDED_OF = SessionQuery(_ended_last.where(_of_user))
LATEST_OF = SessionQuery(
    sa.select(sessions).where(_of_user).order_by(sessions.c.id.desc()).limit(sa.bindparam("limit"))
)
HELD_DEVICES = (
    sa.select(sessions.c.node_id, shares.c.device_uuid)
    .join_from(sessions, shares)
    .where(is_live, in_states(lifecycle.HOLDING))
)
VERSION = CompiledStatement(sa.select(meta.c.version))
NEXT_VERSION = CompiledStatement(
    sa.update(meta).values(version=meta.c.version + sa.literal_column("1")).returning(meta.c.version)
)
NEWEST_ID = sa.select(sa.func.max(sessions.c.id))
_amounts = [sessions.c[name] for name in RequestShape._fields]
_ASKED = (
    sa.select(*_amounts, sa.func.count())
    .where(sessions.c.id.between(sa.bindparam("first"), sa.bindparam("last")))
    .group_by(*_amounts)
)
SUBMIT = CompiledStatement(
    sa.insert(sessions).returning(sessions.c.id),
    [column.name for column in sessions.columns if column.name != "id"],
)
LOG = CompiledStatement(sa.insert(events), [column.name for column in events.columns if column.name != "id"])
HOLD = CompiledStatement(sa.insert(shares), shares.columns.keys())
RELEASE = CompiledStatement(sa.delete(shares).where(shares.c.session_id == sa.bindparam("session_id")))
_message = end_messages.c.session_id == sa.bindparam("session_id")
MESSAGE = CompiledStatement(sa.select(end_messages.c.message, end_messages.c.said_at_s).where(_message))
FORGET_MESSAGE = CompiledStatement(sa.delete(end_messages).where(_message))
_RUNS = (
    sa.select(
        sessions.c.resource_group,
        sessions.c.user_name,
        sessions.c.image,
        sessions.c.ended_at_s - sessions.c.started_at_s,
        sessions.c.ended_at_s,
        sessions.c.id,
    )
    .where(sessions.c.ended_at_s.is_not(None))
    .where(has_run)
    .order_by(sessions.c.ended_at_s.desc(), sessions.c.id.desc())
    .limit(NEWEST_RUNS)
)
_RUNS_OF = _RUNS.where(sessions.c.resource_group == sa.bindparam("resource_group"))


@cache
def save_session(*columns: str) -> CompiledStatement:
    """Return the statement that sets these columns of the session ``session_id``."""
    return CompiledStatement(sa.update(sessions).where(sessions.c.id == sa.bindparam("session_id")), columns)


def read_runs(connection: sa.Connection, resource_groups: Iterable[str]) -> dict[str, tuple[PastRun, ...]]:
    """Return the newest runs of each resource group, newest first; groups without runs are left out."""
    found = {
        group: tuple(PastRun(*row) for row in connection.execute(_RUNS_OF, {"resource_group": group}))
        for group in resource_groups
    }
    return {group: runs for group, runs in found.items() if runs}


def read_all_runs(connection: sa.Connection) -> tuple[PastRun, ...]:
    """Return the newest runs of all resource groups together, newest first."""
    return tuple(PastRun(*row) for row in connection.execute(_RUNS))


def read_nodes(connection: sa.Connection) -> tuple[Node, ...]:
    """Return the nodes by id, with the devices that are offered."""
    offered = sa.select(devices).where(devices.c.retired.is_(False))
    return nodes_of(connection.execute(sa.select(nodes)), connection.execute(offered))


def read_quotas(connection: sa.Connection) -> tuple[Quota, ...]:
    """Return the quotas by `quota_key`."""
    # Sorted here: the order of texts depends on a PostgreSQL database's collation.
    return tuple(sorted(map(quota_of, connection.execute(sa.select(quotas))), key=quota_key))


def read_used(connection: sa.Connection) -> Used:
    """Return the usage of ended sessions."""
    rows = connection.execute(sa.select(usage))
    return {(user, group, account): (amount, at_s) for user, group, account, amount, at_s in rows}


def read_asked(connection: sa.Connection, newest_id: int) -> tuple[RequestCount, ...]:
    """Return the counts of recently requested amounts, given the newest session's id."""
    ids = counted_ids(newest_id)
    if not ids:
        return ()
    counts = connection.execute(_ASKED, {"first": ids[0], "last": ids[-1]})
    # The models are the last column of the amounts.
    return in_order((*amounts, texts_of(models), count) for *amounts, models, count in counts)
