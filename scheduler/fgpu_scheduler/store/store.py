"""Everything that outlives the Hub process: nodes, sessions, their shares, and the log of all changes.

Every method is one transaction. A write first adds 1 to the store's version and logs an event for each change; if it
changes nothing, it is rolled back with its version.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select, update

from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.model import Node, NodeState, Quota, Session, Snapshot
from fgpu_scheduler.core.records import Event
from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store import nodes as configured
from fgpu_scheduler.store import quotas as quota_store
from fgpu_scheduler.store import statements
from fgpu_scheduler.store.history import read_experience
from fgpu_scheduler.store.rows import event_of
from fgpu_scheduler.store.schema import devices, events, nodes
from fgpu_scheduler.store.sessions import SessionStore


class Store(SessionStore):
    """The store of one installation. Thread-safe; other processes may use the same database."""

    # --- Nodes and quotas ---

    def set_nodes(self, nodes: Sequence[Node], *, now_s: int, keep_states: bool = False) -> None:
        """Replace the nodes and devices by the configured ones, but keep what sessions hold.

        A node that is no longer configured is deleted, or becomes LOST and closed while a session holds a share of it. A
        device that its node no longer has is deleted, or is no longer offered while it is held. A CORDONED node stays
        CORDONED, and a held device stays on its node. With ``keep_states`` known nodes keep their states, and only new
        nodes get the given state.

        Raises:
            BadSettings: a node or a device is configured twice.
        """
        with self.writing(now_s=now_s) as write:
            configured.replace_nodes(nodes, write, keep_states=keep_states)

    def set_node_state(
        self, node_id: str, state: NodeState, *, now_s: int, only: NodeState | None = None
    ) -> NodeState:
        """Set the state of a node, but only if it is ``only`` where that is given; return the state that it had.

        Raises:
            BadSettings: there is no such node.
        """
        with self.writing(now_s=now_s) as write:
            at = nodes.c.id == node_id
            old = write.connection.execute(select(nodes.c.state).where(at)).scalar_one_or_none()
            if old is None:
                raise BadSettings(f"there is no node {node_id!r}")
            if old != state.value and (only is None or old == only.value):
                write.connection.execute(update(nodes).where(at).values(state=state.value))
                write.event("nodes", reason=f"{node_id}: {old} -> {state}")
            return NodeState(old)

    def set_cordon(self, device_uuid: str, reason: str | None, *, now_s: int) -> str | None:
        """Cordon a device for this reason, or uncordon it if None; return the reason that it had.

        Raises:
            BadSettings: there is no such device.
        """
        with self.writing(now_s=now_s) as write:
            at = devices.c.uuid == device_uuid
            columns = devices.c.node_id, devices.c.cordon_reason
            row = write.connection.execute(select(*columns).where(at)).one_or_none()
            if row is None:
                raise BadSettings(f"there is no GPU {device_uuid!r}")
            if row.cordon_reason != reason:
                write.connection.execute(update(devices).where(at).values(cordon_reason=reason))
                became = "takes sessions again" if reason is None else "takes no new sessions"
                write.event("nodes", reason=f"{row.node_id}: {device_uuid} {became}")
            old: str | None = row.cordon_reason
            return old

    def set_quotas(self, quotas: Sequence[Quota], *, now_s: int) -> None:
        """Replace all quotas by these, with administrators' edits applied.

        Raises:
            BadSettings: one is there twice, has no limit, an impossible limit, or no name. Nothing is changed.
        """
        with self.writing(now_s=now_s) as write:
            edits = quota_store.read_quota_edits(write.connection)
            quota_store.replace_quotas(quota_store.in_force(quota_store.checked(quotas), edits), write)

    # --- Reading ---

    def version(self) -> int:
        """Return the store's version, which differs after every write."""
        with self.reading() as connection:
            return int(statements.VERSION.one(connection, {}).scalar_one())

    def snapshot(self, now_s: int) -> Snapshot:
        """Return nodes, live sessions, usage and quotas at one instant."""
        with self.reading() as connection:
            contents = self._cache.at(connection, statements.VERSION.one(connection, {}).scalar_one())
            return self._cache.snapshot(contents, now_s, self._half_life_s)

    def newest(self, now_s: int) -> Snapshot:
        """Return the newest snapshot in this process's cache, or read one if the cache is empty.

        This is enough for plans: if the snapshot is stale, the commit is refused.
        """
        contents = self._cache.contents
        if contents is None:
            return self.snapshot(now_s)
        return self._cache.snapshot(contents, now_s, self._half_life_s)

    def known_session(self, session_id: int) -> Session | None:
        """Return a live session from this process's cache, or None if it is not there."""
        contents = self._cache.contents
        return None if contents is None else contents.sessions.get(session_id)

    def newest_session_id(self) -> int | None:
        """Return the newest session's id in this process's cache (0: no session), or None if the cache is empty."""
        contents = self._cache.contents
        return None if contents is None else contents.newest_id

    def session(self, session_id: int) -> Session | None:
        """Return the session with this id, live or ended."""
        with self.reading() as connection:
            return statements.ONE_SESSION.first(connection, session_id=session_id)

    def serving(self, user: str, server_name: str) -> Session | None:
        """Return the server's current session."""
        with self.reading() as connection:
            return statements.SERVING_SESSION.first(connection, user=user, server_name=server_name)

    def ended(self, *, user: str | None, limit: int) -> tuple[Session, ...]:
        """Return the sessions that ended last, of one user or of all, newest first."""
        with self.reading() as connection:
            if user is None:
                return statements.ENDED_SESSIONS.read(connection, limit=limit)
            return statements.ENDED_OF.read(connection, limit=limit, user=user)

    def latest(self, *, user: str, limit: int) -> tuple[Session, ...]:
        """Return the sessions that one user submitted last, live and ended, newest first."""
        with self.reading() as connection:
            return statements.LATEST_OF.read(connection, limit=limit, user=user)

    def held_sessions(self) -> tuple[Session, ...]:
        """Return the held sessions in the order to resume them: first those with shares, then the queue."""
        with self.reading() as connection:
            return statements.HELD_SESSIONS.read(connection)

    def experience(self, resource_group: str) -> ForecastHistory:
        """Return the lengths of the newest runs of a group, and the errors of its forecasts."""
        with self.reading() as connection:
            return read_experience(connection, resource_group)

    def events(self, *, after_id: int = 0, limit: int = 200) -> tuple[Event, ...]:
        """Return the oldest events after an id, in commit order."""
        with self.reading() as connection:
            newer = select(events).where(events.c.id > after_id).order_by(events.c.id).limit(limit)
            return tuple(event_of(row) for row in connection.execute(newer))

    def last_event_id(self) -> int:
        """Return the newest event's id, 0 if there is none."""
        with self.reading() as connection:
            return connection.execute(select(func.max(events.c.id))).scalar_one() or 0
