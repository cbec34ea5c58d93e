"""Everything that outlives the Hub process: nodes, sessions, their shares, and the log of all changes.

Every method is one transaction. One that writes first adds 1 to the store's version, and logs an event
for each change it makes; one that turns out to change nothing is rolled back, version and all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median

from sqlalchemy import Connection, func, select, update

from fgpu_scheduler.core import lifecycle, reclaim
from fgpu_scheduler.core.commit import committed
from fgpu_scheduler.core.model import (
    EndCause,
    Node,
    NodeState,
    Quota,
    Request,
    Session,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.reclaim import End, Reclaim
from fgpu_scheduler.core.usage import HALF_LIFE_S, HalfLife
from fgpu_scheduler.errors import BadSettings, InvalidTransition, SessionExists, StaleVersion, TooManyPending
from fgpu_scheduler.store import end_messages
from fgpu_scheduler.store import quotas as accounts
from fgpu_scheduler.store.audit import record
from fgpu_scheduler.store.database import Database
from fgpu_scheduler.store.nodes import become
from fgpu_scheduler.store.quota_edits import in_force, read_edits
from fgpu_scheduler.store.rows import Event, event_of, life_values, request_values, share_values
from fgpu_scheduler.store.schema import events
from fgpu_scheduler.store.schema import nodes as node_rows
from fgpu_scheduler.store.schema import sessions as session_rows
from fgpu_scheduler.store.statements import (
    ENDED_OF,
    ENDED_SESSIONS,
    HELD_SESSIONS,
    HOLD,
    LATEST_OF,
    LENGTHS,
    ONE_SESSION,
    RELEASE,
    SERVING_SESSION,
    SUBMIT,
    VERSION,
)
from fgpu_scheduler.store.transaction import Kept, Write, writing

__all__ = ["Event", "Store"]

S = SessionState


class Store:
    """The store of one installation. Thread-safe; other processes may use the same database."""

    def __init__(self, url: str, *, half_life_s: HalfLife = lambda _: HALF_LIFE_S) -> None:
        """Take the database's URL: ``sqlite:///path``, ``sqlite://`` (in memory) or ``postgresql://...``.

        ``half_life_s`` tells of a resource group how fast what was used there is forgotten.

        Raises:
            BadSettings: the URL cannot be read, or names another kind of database. No I/O happens here.
        """
        self._database = Database(url)
        self._half_life_s = half_life_s
        self._kept = Kept()
        self._installation_id = ""

    def open(self) -> None:
        """Connect and bring the schema up to date.

        Raises:
            StoreUnavailable: unreachable, or of a newer version; one line, without the password.
        """
        self._installation_id = self._database.open(migrate=True)

    def connect_readonly(self) -> None:
        """Connect for reading, without migrating. What writes then raises `StoreUnavailable`.

        Raises:
            StoreUnavailable: unreachable, or not (yet) of this version; one line, without the password.
        """
        self._installation_id = self._database.open(migrate=False)

    def connect(self) -> None:
        """Connect for reading and writing, without migrating: for others than the process that schedules.

        Raises:
            StoreUnavailable: unreachable, or not (yet) of this version; one line, without the password.
        """
        self._installation_id = self._database.open(migrate=False, write=True)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._database.close()
        self._kept = Kept()

    @property
    def installation_id(self) -> str:
        """Twelve random hex digits, made with the database: they mark what this installation launches."""
        return self._installation_id

    def reading(self) -> AbstractContextManager[Connection]:
        """Begin a transaction that sees one instant: for tables that are not the scheduler's own."""
        return self._database.reading()

    def writing(self, *, now_s: int) -> AbstractContextManager[Write]:
        """Begin a write transaction, as this store's own are: for the same tables. One that logs nothing is undone."""
        return self._writing(now_s=now_s)

    def writing_beside(self) -> AbstractContextManager[Connection]:
        """Begin a write transaction on what no plan is made of: the store's version stays, and nothing is logged."""
        return self._database.writing()

    def _writing(self, *, now_s: int) -> AbstractContextManager[Write]:
        return writing(self._database, self._kept, now_s=now_s)

    # --- Nodes ---

    def set_nodes(self, nodes: Sequence[Node], *, now_s: int) -> None:
        """Make the nodes and devices those that are configured, and forget nothing that is held.

        A node that is no longer configured is deleted, or becomes LOST while a session holds a share of
        it. A device that its node no longer has is deleted, or is no longer offered while it is held.
        A CORDONED node stays so, and a held device stays on its node, whatever is configured.

        Raises:
            BadSettings: a node or a device is configured twice.
        """
        with self._writing(now_s=now_s) as write:
            become(nodes, write)

    def set_node_state(
        self, node_id: str, state: NodeState, *, now_s: int, only: NodeState | None = None
    ) -> NodeState:
        """Set the state of a node, and return the one that it had. With ``only`` nothing is done in any other state.

        Raises:
            BadSettings: there is no such node.
        """
        with self._writing(now_s=now_s) as write:
            at = node_rows.c.id == node_id
            old = write.connection.execute(select(node_rows.c.state).where(at)).scalar_one_or_none()
            if old is None:
                raise BadSettings(f"there is no node {node_id!r}")
            if old != state.value and (only is None or old == only.value):
                write.connection.execute(update(node_rows).where(at).values(state=state.value))
                write.event("nodes", reason=f"{node_id}: {old} -> {state}")
            return NodeState(old)

    def snapshot(self, now_s: int) -> Snapshot:
        """Return nodes, live sessions, usage and quotas as they are at one instant."""
        with self._database.reading() as connection:
            seen = self._kept.at(connection, connection.execute(VERSION).scalar_one())
            return seen.snapshot(now_s, self._kept.usage(seen, now_s, self._half_life_s))

    def set_quotas(self, quotas: Sequence[Quota], *, now_s: int) -> None:
        """Make these the quotas, all together, with what administrators changed of them over it.

        Raises:
            BadSettings: one is there twice, has no limit or an impossible one, or is for nobody. None is changed.
        """
        with self._writing(now_s=now_s) as write:
            given = accounts.checked(quotas)
            accounts.become(in_force(given, read_edits(write.connection)), write)

    # --- The queue ---

    def submit(
        self,
        requests: Sequence[Request],
        *,
        now_s: int,
        max_pending_per_user: int | None = None,
        held: bool = False,
    ) -> tuple[Session, ...]:
        """Queue all of the requests, or none.

        Raises:
            SessionExists: a request's server has a session that is not ending.
            TooManyPending: a user would have more than ``max_pending_per_user`` waiting.
            OverQuota: it is over a pending quota, or could never be inside a quota.
        """
        with self._writing(now_s=now_s) as write:
            live = write.world.sessions.values()
            servers = {_server(session.request) for session in live if session.state in lifecycle.SERVING}
            for request in requests:
                if _server(request) in servers:
                    raise SessionExists(f"the server {request.server_name!r} of {request.user} has a session")
                servers.add(_server(request))
            waiting = [session.request for session in live if session.state is S.PENDING]
            if max_pending_per_user is not None:
                for user in sorted({request.user for request in requests}):
                    already, more = (sum(1 for r in found if r.user == user) for found in (waiting, requests))
                    if already + more > max_pending_per_user:
                        raise TooManyPending(
                            f"{user} may have {max_pending_per_user} requests waiting: "
                            f"{already} wait already, and this would add {more}"
                        )
            accounts.refuse_over_quota(write.world.snapshot(now_s), requests)
            return tuple(
                _submitted(write, Session(0, request, S.PENDING, now_s, held)) for request in requests
            )

    def commit(self, plan: Plan, *, now_s: int) -> tuple[Session, ...]:
        """Write a plan's decisions, after checking again that they fit; return who got their shares.

        Raises:
            StaleVersion: the store has changed since, or a decision does not hold. Nothing is written.
        """
        with self._writing(now_s=now_s) as write:
            _check_version(write, plan.version)
            changes = committed(plan, write.world.snapshot(now_s), now_s=now_s)
            placed = [new for _, new in changes if new.state is S.SCHEDULED]
            write.save([new for _, new in changes])
            rows = [row for session in placed for row in share_values(session)]
            if rows:
                write.connection.execute(HOLD, rows)
            for old, new in changes:
                if new.state is S.SCHEDULED:
                    write.event("moved", new, was=old.state)
                    continue
                if new.wait_reason is not old.wait_reason:
                    write.event("waits", new, reason=new.wait_reason.value if new.wait_reason else None)
                if new.promised_at_s != old.promised_at_s:
                    write.event("promised", new, reason=WaitReason.RESERVED.value)
            return tuple(placed)

    # --- A session's life ---

    def move(
        self,
        session_id: int,
        to: SessionState,
        *,
        now_s: int,
        cause: EndCause | None = None,
        message: str | None = None,
        launched: str | None = None,
        expect: Collection[SessionState] | None = None,
        attempt: int | None = None,
    ) -> Session:
        """Move a session to another state, if it is in one of ``expect`` and at ``attempt``.

        To PREPARING is a new attempt; back to PENDING gives up the shares. ``launched`` replaces the
        launcher's note unless None.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: the life cycle has no such change, the session is elsewhere than expected,
                or ``to`` is SCHEDULED, which only `commit` gives.
        """
        with self._writing(now_s=now_s) as write:
            old = _expected(write.one(session_id), expect, attempt)
            if to is S.SCHEDULED:
                raise InvalidTransition(f"session {session_id}: only a committed plan makes it {to}")
            if cause is EndCause.USER and message is None:
                message = end_messages.take(write.connection, session_id, now_s=now_s)
            new = lifecycle.moved(old, to, now_s=now_s, cause=cause, message=message)
            new = replace(
                new,
                attempt=old.attempt + 1 if to is S.PREPARING else old.attempt,
                launched=old.launched if launched is None else launched,
            )
            return _move(write, old, new, self._half_life_s)

    def reclaim(self, decisions: Sequence[Reclaim], version: int, *, now_s: int) -> tuple[Session, ...]:
        """Write who is warned, spared and ended, as decided on the snapshot of ``version``; return who has changed.

        What is queued again is a new session, after the one that it replaces: it has its place, and is held until
        somebody waits to launch it.

        Raises:
            StaleVersion: the store has changed since, or a session is ended that was not warned of it, or not yet of
                that instant. Nothing is written.
        """
        with self._writing(now_s=now_s) as write:
            _check_version(write, version)
            changed: list[Session] = []
            for decision in decisions:
                old = write.one(decision.session_id)
                if isinstance(decision, End):
                    new = reclaim.ended(old, decision, now_s=now_s)
                    changed.append(_move(write, old, new, self._half_life_s))
                    if decision.requeue:
                        changed.append(_submitted(write, reclaim.again(new, now_s=now_s)))
                else:
                    changed.append(reclaim.told(old, decision))
                    write.save(changed[-1:])
                    write.event("ends", changed[-1], reason=_cause(changed[-1].ends_cause))
            return tuple(changed)

    def keep(self, session_id: int, until_s: int, *, now_s: int) -> Session:
        """Let a session be idle until then, as its owner asks, and take a warning for being idle back.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is not RUNNING.
        """
        with self._writing(now_s=now_s) as write:
            old = _expected(write.one(session_id), (S.RUNNING,), None)
            new = reclaim.kept(old, until_s)
            if new != old:
                write.save([new])
                write.event("kept", new, reason=EndCause.IDLE.value)
            if new.ends_cause is not old.ends_cause:
                write.event("ends", new)
            return new

    def note_idle(self, session_id: int, since_s: int | None, *, now_s: int) -> Session:
        """Keep since when both the GPU and the kernels of a session are idle; None: they are not.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is not RUNNING.
        """
        with self._writing(now_s=now_s) as write:
            old = _expected(write.one(session_id), (S.RUNNING,), None)
            if old.idle_since_s == since_s:
                return old
            new = replace(old, idle_since_s=since_s)
            write.save([new])
            if (old.idle_since_s is None) is not (since_s is None):
                write.event("idle", new, reason=None if since_s is None else EndCause.IDLE.value)
            return new

    def set_priority(self, session_id: int, priority: int, *, by: str, now_s: int) -> Session:
        """Give a waiting session another priority, as an administrator wishes; the next plan goes by it.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it does not wait any more.
        """
        with self._writing(now_s=now_s) as write:
            old = _expected(write.one(session_id), (S.PENDING,), None)
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
                details=f"{asked.priority} -> {priority}",
                now_s=now_s,
            )
            return new

    def new_attempt(self, session_id: int, *, now_s: int) -> Session:
        """Begin to launch a session anew, its share held throughout.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is neither PREPARING nor PULLING.
        """
        with self._writing(now_s=now_s) as write:
            old = _expected(write.one(session_id), lifecycle.LAUNCHING, None)
            new = replace(old, state=S.PREPARING, attempt=old.attempt + 1, launched=None)
            write.save([new])
            write.event("attempt", new, was=old.state)
            return new

    def warn(self, session_id: int, message: str | None, *, now_s: int) -> Session:
        """Keep what the owner of a running session is warned of; None: of nothing any more.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is not RUNNING.
        """
        with self._writing(now_s=now_s) as write:
            old = _expected(write.one(session_id), (S.RUNNING,), None)
            if old.message == message:
                return old
            new = replace(old, message=message)
            write.save([new])
            write.event("warned", new, reason=None if message is None else EndCause.ISOLATION_FAILED.value)
            return new

    def note_launched(self, session_id: int, launched: str, *, attempt: int) -> None:
        """Keep the launcher's note on what it started for this attempt.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is neither PREPARING nor PULLING, or at another attempt.
        """
        with self._writing(now_s=0) as write:
            old = _expected(write.one(session_id), lifecycle.LAUNCHING, attempt)
            write.save([replace(old, launched=launched)])

    def hold_waiting(self, *, now_s: int) -> int:
        """Hold every session that has not started, since nobody waits to launch it now.

        Return how many are held then, with those that were before.
        """
        with self._writing(now_s=now_s) as write:
            found = [
                session
                for session in write.world.sessions.values()
                if session.state in (S.PENDING, S.SCHEDULED, *lifecycle.LAUNCHING)
            ]
            _hold(write, [session for session in found if not session.held], True)
            return len(found)

    def set_held(self, session_id: int, held: bool, *, now_s: int) -> Session:
        """Hold a session or let it go.

        Raises:
            UnknownSession: no session has this id.
        """
        with self._writing(now_s=now_s) as write:
            session = write.one(session_id)
            return session if session.held is held else _hold(write, [session], held)[0]

    # --- Reading ---

    def session(self, session_id: int) -> Session | None:
        """Return the session with this id, live or ended."""
        with self._database.reading() as connection:
            return next(iter(ONE_SESSION.read(connection, session_id=session_id)), None)

    def serving(self, user: str, server_name: str) -> Session | None:
        """Return the server's current session."""
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
        """Return what is held, in the order to resume it: what has its share first, then the queue."""
        with self._database.reading() as connection:
            return HELD_SESSIONS.read(connection)

    def typical_length_s(self, resource_group: str, *, least: int = 5, newest: int = 50) -> int | None:
        """Return the median length of the sessions that ran and ended last, or None below ``least``."""
        with self._database.reading() as connection:
            values = {"resource_group": resource_group, "limit": newest}
            lengths = connection.execute(LENGTHS, values).scalars().all()
        # Below nothing where the clock was set back in between.
        return (
            int(median(max(0, length) for length in lengths)) if lengths and len(lengths) >= least else None
        )

    def version(self) -> int:
        """Return the store's version: another one after every write."""
        with self._database.reading() as connection:
            return int(connection.execute(VERSION).scalar_one())

    def events(self, *, after_id: int = 0, limit: int = 200) -> tuple[Event, ...]:
        """Return the oldest events after an id, in the order in which they were committed."""
        with self._database.reading() as connection:
            newer = select(events).where(events.c.id > after_id).order_by(events.c.id).limit(limit)
            return tuple(event_of(row) for row in connection.execute(newer))

    def last_event_id(self) -> int:
        """Return the newest event's id, 0 where there is none."""
        with self._database.reading() as connection:
            return connection.execute(select(func.max(events.c.id))).scalar_one() or 0


def _server(request: Request) -> tuple[str, str]:
    return request.user, request.server_name


def _submitted(write: Write, new: Session) -> Session:
    row = {**request_values(new.request), **life_values(new)}
    new = replace(new, id=write.connection.execute(SUBMIT, row).scalar_one())
    write.changed[new.id] = new
    write.event("submitted", new, reason=None if new.replaces is None else f"replaces {new.replaces}")
    return new


def _move(write: Write, old: Session, new: Session, half_life_s: HalfLife) -> Session:
    """Write what `lifecycle.moved` made, with what follows from it for shares and usage."""
    if new.placement is None and old.placement is not None:
        write.connection.execute(RELEASE, {"session_id": new.id})
    if new.state in lifecycle.ENDED:
        accounts.spend(new, write, half_life_s)
    write.save([new])
    write.event("moved", new, was=old.state, reason=new.end_cause.value if new.end_cause else None)
    return new


def _check_version(write: Write, version: int) -> None:
    if write.version_before != version:
        raise StaleVersion(f"planned on version {version}; the store is at {write.version_before}")


def _cause(cause: EndCause | None) -> str | None:
    return None if cause is None else cause.value


def _expected(session: Session, states: Collection[SessionState] | None, attempt: int | None) -> Session:
    if states is not None and session.state not in states:
        wanted = " or ".join(state for state in SessionState if state in states)
        raise InvalidTransition(f"session {session.id} is {session.state} and not {wanted}")
    if attempt is not None and session.attempt != attempt:
        raise InvalidTransition(f"session {session.id} is at attempt {session.attempt} and not {attempt}")
    return session


def _hold(write: Write, found: Sequence[Session], held: bool) -> list[Session]:
    changed = [replace(session, held=held) for session in found]
    write.save(changed)
    for session in changed:
        write.event("held", session, reason="HELD" if held else None)
    return changed
