"""Everything that outlives the Hub process: nodes, sessions, their shares, and the log of all changes.

Every method is one transaction. A write first adds 1 to the store's version and logs an event for each change; if it
changes nothing, it is rolled back with its version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import func, select, update

from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.model import Node, NodeState, Quota, Session, SessionState, Snapshot
from fgpu_scheduler.core.records import Event
from fgpu_scheduler.core.usage import HALF_LIFE_S, HalfLife
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store import quotas as accounts
from fgpu_scheduler.store.audit import record
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.first_forecasts import read_experience
from fgpu_scheduler.store.nodes import replace_nodes
from fgpu_scheduler.store.quota_edits import in_force, read_quota_edits
from fgpu_scheduler.store.rows import event_of
from fgpu_scheduler.store.schema import devices as device_rows
from fgpu_scheduler.store.schema import events
from fgpu_scheduler.store.schema import nodes as node_rows
from fgpu_scheduler.store.schema import sessions as session_rows
from fgpu_scheduler.store.sessions import SessionStore, expected
from fgpu_scheduler.store.statements import (
    ENDED_OF,
    ENDED_SESSIONS,
    HELD_SESSIONS,
    LATEST_OF,
    ONE_SESSION,
    SERVING_SESSION,
    VERSION,
)


class Store(StoreConnection, SessionStore):
    """The store of one installation. Thread-safe; other processes may use the same database."""

    def __init__(self, url: str, *, half_life_s: HalfLife = lambda _: HALF_LIFE_S) -> None:
        """See `StoreConnection` for the URL and `SessionStore` for the half-life."""
        StoreConnection.__init__(self, url)
        SessionStore.__init__(self, half_life_s=half_life_s)

    # --- Nodes ---

    def set_nodes(self, nodes: Sequence[Node], *, now_s: int, keep_states: bool = False) -> None:
        with self.writing(now_s=now_s) as write:
            replace_nodes(nodes, write, keep_states=keep_states)

    def set_node_state(
        self, node_id: str, state: NodeState, *, now_s: int, only: NodeState | None = None
    ) -> NodeState:
        with self.writing(now_s=now_s) as write:
            at = node_rows.c.id == node_id
            old = write.connection.execute(select(node_rows.c.state).where(at)).scalar_one_or_none()
            if old is None:
                raise BadSettings(f"there is no node {node_id!r}")
            if old != state.value and (only is None or old == only.value):
                write.connection.execute(update(node_rows).where(at).values(state=state.value))
                write.event("nodes", reason=f"{node_id}: {old} -> {state}")
            return NodeState(old)

    def set_cordon(self, device_uuid: str, reason: str | None, *, now_s: int) -> str | None:
        with self.writing(now_s=now_s) as write:
            at = device_rows.c.uuid == device_uuid
            columns = device_rows.c.node_id, device_rows.c.cordon_reason
            row = write.connection.execute(select(*columns).where(at)).one_or_none()
            if row is None:
                raise BadSettings(f"there is no GPU {device_uuid!r}")
            if row.cordon_reason != reason:
                write.connection.execute(update(device_rows).where(at).values(cordon_reason=reason))
                became = "takes sessions again" if reason is None else "takes no new sessions"
                write.event("nodes", reason=f"{row.node_id}: {device_uuid} {became}")
            old: str | None = row.cordon_reason
            return old

    def snapshot(self, now_s: int) -> Snapshot:
        with self._database.reading() as connection:
            contents = self._newest.at(connection, VERSION.one(connection, {}).scalar_one())
            return contents.snapshot(now_s, self._newest.usage(contents, now_s, self._half_life_s))

    def newest(self, now_s: int) -> Snapshot:
        """Return the newest snapshot in this process's cache, or read one if the cache is empty.

        This is enough for plans: if the snapshot is stale, the commit is refused.
        """
        contents = self._newest.contents
        if contents is None:
            return self.snapshot(now_s)
        return contents.snapshot(now_s, self._newest.usage(contents, now_s, self._half_life_s))

    def known_session(self, session_id: int) -> Session | None:
        """Return a live session from this process's cache, or None if it is not there."""
        contents = self._newest.contents
        return None if contents is None else contents.sessions.get(session_id)

    def newest_session_id(self) -> int | None:
        """Return the newest session's id in this process's cache (0: no session), or None if the cache is empty."""
        contents = self._newest.contents
        return None if contents is None else contents.newest_id

    def set_quotas(self, quotas: Sequence[Quota], *, now_s: int) -> None:
        with self.writing(now_s=now_s) as write:
            given = accounts.checked(quotas)
            accounts.replace_quotas(in_force(given, read_quota_edits(write.connection)), write)

    def set_priority(self, session_id: int, priority: int, *, by: str, now_s: int) -> Session:
        """Change the priority of a pending session for an administrator.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: the session is not pending.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), (SessionState.PENDING,))
            asked = old.request
            if asked.priority == priority:
                return old
            own = old.own_request.priority
            new = replace(
                old,
                request=replace(asked, priority=priority),
                asked_priority=None if priority == own else own,
            )
            at = session_rows.c.id == session_id
            write.connection.execute(update(session_rows).where(at).values(priority=priority))
            write.save([new])
            write.event("priority", new, reason=f"{asked.priority} -> {priority}")
            record(
                write.connection,
                actor=by,
                action="session.priority",
                target=f"session {session_id} of {asked.user}",
                group=asked.resource_group,
                details=f"{asked.priority} -> {priority}",
                now_s=now_s,
            )
            return new

    # --- Reading ---

    def session(self, session_id: int) -> Session | None:
        with self._database.reading() as connection:
            return next(iter(ONE_SESSION.read(connection, session_id=session_id)), None)

    def serving(self, user: str, server_name: str) -> Session | None:
        with self._database.reading() as connection:
            return next(iter(SERVING_SESSION.read(connection, user=user, server_name=server_name)), None)

    def ended(self, *, user: str | None, limit: int) -> tuple[Session, ...]:
        """Return the sessions that ended last, of one user or of all, newest first."""
        with self._database.reading() as connection:
            if user is None:
                return ENDED_SESSIONS.read(connection, limit=limit)
            return ENDED_OF.read(connection, limit=limit, user=user)

    def latest(self, *, user: str, limit: int) -> tuple[Session, ...]:
        """Return the sessions that one user submitted last, live and ended, newest first."""
        with self._database.reading() as connection:
            return LATEST_OF.read(connection, limit=limit, user=user)

    def held_sessions(self) -> tuple[Session, ...]:
        with self._database.reading() as connection:
            return HELD_SESSIONS.read(connection)

    def experience(self, resource_group: str) -> ForecastHistory:
        with self._database.reading() as connection:
            return read_experience(connection, resource_group)

    def version(self) -> int:
        with self._database.reading() as connection:
            return int(VERSION.one(connection, {}).scalar_one())

    def events(self, *, after_id: int = 0, limit: int = 200) -> tuple[Event, ...]:
        """Return the oldest events after an id, in commit order."""
        with self._database.reading() as connection:
            newer = select(events).where(events.c.id > after_id).order_by(events.c.id).limit(limit)
            return tuple(event_of(row) for row in connection.execute(newer))

    def last_event_id(self) -> int:
        """Return the newest event's id, 0 if there is none."""
        with self._database.reading() as connection:
            return connection.execute(select(func.max(events.c.id))).scalar_one() or 0
