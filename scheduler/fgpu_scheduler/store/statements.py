"""The store's statements, built once, because building many of them takes longer than running them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Select,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.model import Node, Quota, RequestCount, Session, SessionState
from fgpu_scheduler.core.request_counts import AMOUNTS, counted_ids, in_order
from fgpu_scheduler.core.run_lengths import NEWEST_RUNS, PastRun
from fgpu_scheduler.store.prepared import Prepared
from fgpu_scheduler.store.rows import Used, models_of, nodes_of, quotas_of, sessions_of
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


class Sessions:
    """Statements that read the sessions of a condition and all their shares."""

    def __init__(self, chosen: Select[Any]) -> None:
        ids = chosen.with_only_columns(sessions.c.id)
        self.chosen = chosen
        self.shares = (
            select(shares)
            .where(shares.c.session_id.in_(ids))
            .order_by(shares.c.session_id, shares.c.position)
        )

    def read(self, connection: Connection, **values: Any) -> tuple[Session, ...]:
        rows = connection.execute(self.chosen, values).all()
        return sessions_of(rows, connection.execute(self.shares, values) if rows else ())


def _live(*states: SessionState) -> Select[Any]:
    # The first condition selects the index, the second one the states.
    return select(sessions).where(is_live, in_states(states)).order_by(sessions.c.id)


LIVE_SESSIONS = Sessions(select(sessions).where(is_live).order_by(sessions.c.id))
HELD_SESSIONS = Sessions(
    _live(S.PENDING, S.SCHEDULED, *lifecycle.LAUNCHING)
    .where(sessions.c.held)
    .order_by(None)
    .order_by(
        case((sessions.c.state == S.PENDING.value, 1), else_=0), sessions.c.submitted_at_s, sessions.c.id
    )
)
ONE_SESSION = Sessions(select(sessions).where(sessions.c.id == bindparam("session_id")))
SERVING_SESSION = Sessions(
    select(sessions).where(
        is_serving,
        sessions.c.user_name == bindparam("user"),
        sessions.c.server_name == bindparam("server_name"),
    )
)
_newest_ended = (
    select(sessions)
    .where(sessions.c.ended_at_s.is_not(None))
    .order_by(sessions.c.ended_at_s.desc(), sessions.c.id.desc())
    .limit(bindparam("limit"))
)
ENDED_SESSIONS = Sessions(_newest_ended)
ENDED_OF = Sessions(_newest_ended.where(sessions.c.user_name == bindparam("user")))
LATEST_OF = Sessions(
    select(sessions)
    .where(sessions.c.user_name == bindparam("user"))
    .order_by(sessions.c.id.desc())
    .limit(bindparam("limit"))
)
HELD_DEVICES = (
    select(sessions.c.node_id, shares.c.device_uuid)
    .join_from(sessions, shares)
    .where(is_live, in_states(lifecycle.HOLDING))
)
VERSION = Prepared(select(meta.c.version))
NEXT_VERSION = Prepared(
    update(meta).values(version=meta.c.version + literal_column("1")).returning(meta.c.version)
)
NODES = select(nodes)
QUOTAS = select(quotas)
USED = select(usage)
NEWEST_ID = select(func.max(sessions.c.id))
_amounts = [sessions.c[name] for name in AMOUNTS]
ASKED = (
    select(*_amounts, func.count())
    .where(sessions.c.id.between(bindparam("first"), bindparam("last")))
    .group_by(*_amounts)
)
OFFERED_DEVICES = select(devices).where(devices.c.retired.is_(False))
SUBMIT = Prepared(
    insert(sessions).returning(sessions.c.id),
    [column.name for column in sessions.columns if column.name != "id"],
)
LOG = Prepared(insert(events), [column.name for column in events.columns if column.name != "id"])
HOLD = Prepared(insert(shares), shares.columns.keys())
RELEASE = Prepared(delete(shares).where(shares.c.session_id == bindparam("session_id")))
_message = end_messages.c.session_id == bindparam("session_id")
MESSAGE = Prepared(select(end_messages.c.message, end_messages.c.said_at_s).where(_message))
FORGET_MESSAGE = Prepared(delete(end_messages).where(_message))


@cache
def save_session(*columns: str) -> Prepared:
    """Return the statement that sets these columns of the session ``session_id``."""
    return Prepared(update(sessions).where(sessions.c.id == bindparam("session_id")), columns)


_runs = (
    select(
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
_RUNS_OF = _runs.where(sessions.c.resource_group == bindparam("resource_group"))


def read_runs(connection: Connection, resource_groups: Iterable[str]) -> dict[str, tuple[PastRun, ...]]:
    """Return the newest runs of each resource group, newest first; groups without runs are left out."""
    found = {
        group: tuple(PastRun(*row) for row in connection.execute(_RUNS_OF, {"resource_group": group}))
        for group in resource_groups
    }
    return {group: runs for group, runs in found.items() if runs}


def read_all_runs(connection: Connection) -> tuple[PastRun, ...]:
    """Return the newest runs of all resource groups together, newest first."""
    return tuple(PastRun(*row) for row in connection.execute(_runs))


def read_nodes(connection: Connection) -> tuple[Node, ...]:
    """Return the nodes by id, with the devices that are offered."""
    return nodes_of(connection.execute(NODES), connection.execute(OFFERED_DEVICES))


def read_quotas(connection: Connection) -> tuple[Quota, ...]:
    """Return the quotas by `quota_key`."""
    return quotas_of(connection.execute(QUOTAS))


def read_used(connection: Connection) -> Used:
    """Return the usage of ended sessions."""
    return {(user, group): (amount, at_s) for user, group, amount, at_s in connection.execute(USED)}


def read_asked(connection: Connection, newest_id: int) -> tuple[RequestCount, ...]:
    """Return the counts of recently requested amounts, given the newest session's id."""
    ids = counted_ids(newest_id)
    if not ids:
        return ()
    counts = connection.execute(ASKED, {"first": ids[0], "last": ids[-1]})
    # The models are the last column of the amounts.
    return in_order((*amounts, models_of(models), count) for *amounts, models, count in counts)
