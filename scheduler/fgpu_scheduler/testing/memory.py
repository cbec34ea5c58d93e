"""The part of the store that decisions depend on, in memory: one `Snapshot` value after another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from fgpu_scheduler.core import lifecycle, reclaim
from fgpu_scheduler.core.asked import asked_of, counted_ids
from fgpu_scheduler.core.commit import committed
from fgpu_scheduler.core.model import (
    Asked,
    EndCause,
    Node,
    NodeState,
    Quota,
    Request,
    Session,
    SessionState,
    Snapshot,
    Usage,
)
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.reclaim import End, Reclaim
from fgpu_scheduler.core.usage import HALF_LIFE_S, HalfLife, decayed, fgpu_seconds
from fgpu_scheduler.errors import (
    BadSettings,
    InvalidTransition,
    SessionExists,
    StaleVersion,
    TooManyPending,
    UnknownSession,
)
from fgpu_scheduler.store import quotas as accounts

S = SessionState


class SessionStore(Protocol):
    """What `MemoryStore` and the SQL `Store` have in common. `fgpu_scheduler.store.store.Store` has the promises."""

    def set_nodes(self, nodes: Sequence[Node], *, now_s: int) -> None: ...

    def set_node_state(
        self, node_id: str, state: NodeState, *, now_s: int, only: NodeState | None = None
    ) -> NodeState: ...

    def set_quotas(self, quotas: Sequence[Quota], *, now_s: int) -> None: ...

    def snapshot(self, now_s: int) -> Snapshot: ...

    def submit(
        self,
        requests: Sequence[Request],
        *,
        now_s: int,
        max_pending_per_user: int | None = None,
        held: bool = False,
    ) -> tuple[Session, ...]: ...

    def commit(self, plan: Plan, *, now_s: int) -> tuple[Session, ...]: ...

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
    ) -> Session: ...

    def reclaim(self, decisions: Sequence[Reclaim], version: int, *, now_s: int) -> tuple[Session, ...]: ...

    def keep(self, session_id: int, until_s: int, *, now_s: int) -> Session: ...

    def note_idle(self, session_id: int, since_s: int | None, *, now_s: int) -> Session: ...

    def new_attempt(self, session_id: int, *, now_s: int) -> Session: ...

    def note_launched(self, session_id: int, launched: str, *, attempt: int) -> None: ...

    def hold_waiting(self, *, now_s: int) -> int: ...

    def set_held(self, session_id: int, held: bool, *, now_s: int) -> Session: ...

    def session(self, session_id: int) -> Session | None: ...

    def serving(self, user: str, server_name: str) -> Session | None: ...

    def held_sessions(self) -> tuple[Session, ...]: ...

    def typical_length_s(self, resource_group: str, *, least: int = 5, newest: int = 50) -> int | None: ...

    def version(self) -> int: ...


class MemoryStore:
    """A `SessionStore` that forgets everything when the process ends. For tests and the simulator."""

    def __init__(self, nodes: Iterable[Node] = (), *, half_life_s: HalfLife = lambda _: HALF_LIFE_S) -> None:
        self._world = Snapshot(0, 1, tuple(sorted(nodes, key=lambda n: n.id)))
        self._half_life_s = half_life_s
        self._used: dict[tuple[str, str], tuple[float, int]] = {}
        self._ended: dict[int, Session] = {}
        self._next_id = 1
        self._asked: tuple[range, tuple[Asked, ...]] = (range(0), ())

    # --- Nodes ---

    def set_nodes(self, nodes: Sequence[Node], *, now_s: int) -> None:
        """Replace the nodes. One that is left out stays as LOST while a session holds a share of it."""
        ids = {n.id for n in nodes}
        held = {
            s.placement.node_id for s in self._world.sessions if s.state in lifecycle.HOLDING and s.placement
        }
        kept = [
            replace(n, state=NodeState.LOST) for n in self._world.nodes if n.id not in ids and n.id in held
        ]
        self._set_nodes((*nodes, *kept))

    def set_node_state(
        self, node_id: str, state: NodeState, *, now_s: int, only: NodeState | None = None
    ) -> NodeState:
        """Set the state of a node, and return the one that it had. With ``only`` nothing is done in any other state.

        Raises:
            BadSettings: there is no such node.
        """
        old = next((n.state for n in self._world.nodes if n.id == node_id), None)
        if old is None:
            raise BadSettings(f"there is no node {node_id!r}")
        if only in (None, old):
            self._set_nodes(replace(n, state=state) if n.id == node_id else n for n in self._world.nodes)
        return old

    def _set_nodes(self, nodes: Iterable[Node]) -> None:
        ordered = tuple(sorted(nodes, key=lambda n: n.id))
        if ordered != self._world.nodes:
            self._world = replace(self._world, version=self._world.version + 1, nodes=ordered)

    def snapshot(self, now_s: int) -> Snapshot:
        """Return nodes, live sessions, usage and quotas as they are."""
        usage = (
            Usage(user, group, int(self._decayed(user, group, now_s=now_s)))
            for user, group in sorted(self._used)
        )
        return replace(
            self._world,
            now_s=now_s,
            usage=tuple(u for u in usage if u.fgpu_milli_s),
            asked=self._asked_lately(),
        )

    def _asked_lately(self) -> tuple[Asked, ...]:
        ids = counted_ids(self._next_id - 1)
        if ids != self._asked[0]:
            found = (self.session(session_id) for session_id in ids)
            self._asked = ids, asked_of(session.request for session in found if session is not None)
        return self._asked[1]

    def set_quotas(self, quotas: Sequence[Quota], *, now_s: int) -> None:
        """Make these the quotas, all together.

        Raises:
            BadSettings: one is there twice, has no limit or an impossible one, or is for nobody. None is changed.
        """
        found = accounts.checked(quotas)
        if found != self._world.quotas:
            self._world = replace(self._world, version=self._world.version + 1, quotas=found)

    def version(self) -> int:
        """Return the version: another one after every write."""
        return self._world.version

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
        servers = {_server(s.request) for s in self._world.sessions if s.state in lifecycle.SERVING}
        for asked in requests:
            if _server(asked) in servers:
                raise SessionExists(f"the server {asked.server_name!r} of {asked.user} has a session")
            servers.add(_server(asked))
        if max_pending_per_user is not None:
            self._check_pending(requests, max_pending_per_user)
        accounts.refuse_over_quota(self._world, requests)
        new = tuple(self._new(Session(0, asked, S.PENDING, now_s, held)) for asked in requests)
        self._write(new)
        return new

    def _new(self, session: Session) -> Session:
        numbered = replace(session, id=self._next_id)
        self._next_id += 1
        return numbered

    def _check_pending(self, requests: Sequence[Request], most: int) -> None:
        waiting = [s.request.user for s in self._world.sessions if s.state is S.PENDING]
        asking = [asked.user for asked in requests]
        for user in asking:
            if waiting.count(user) + asking.count(user) > most:
                raise TooManyPending(
                    f"{user} may have {most} requests waiting: {waiting.count(user)} wait already, "
                    f"and this would add {asking.count(user)}"
                )

    def commit(self, plan: Plan, *, now_s: int) -> tuple[Session, ...]:
        """Write a plan's decisions, after checking again that they fit; return who got their shares.

        Raises:
            StaleVersion: the store has changed since, or a decision does not hold. Nothing is written.
        """
        self._check_version(plan.version)
        changed = [new for _, new in committed(plan, self._world, now_s=now_s)]
        self._write(changed)
        return tuple(new for new in changed if new.state is S.SCHEDULED)

    def _check_version(self, version: int) -> None:
        if version != self._world.version:
            raise StaleVersion(f"planned on version {version}; the store is at {self._world.version}")

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

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: not a legal change, or the session is elsewhere than expected.
        """
        old = self._expected(session_id, expect, attempt)
        if to is S.SCHEDULED:
            raise InvalidTransition(f"session {session_id}: only a committed plan makes it {to}")
        new = replace(
            lifecycle.moved(old, to, now_s=now_s, cause=cause, message=message),
            attempt=old.attempt + 1 if to is S.PREPARING else old.attempt,
            launched=old.launched if launched is None else launched,
        )
        self._write((new,))
        return new

    def reclaim(self, decisions: Sequence[Reclaim], version: int, *, now_s: int) -> tuple[Session, ...]:
        """Write who is warned, spared and ended, as decided on the snapshot of ``version``; return who has changed.

        Raises:
            StaleVersion: the store has changed since, or a session is ended that was not warned of it, or not yet of
                that instant. Nothing is written.
        """
        self._check_version(version)
        changed: list[Session] = []
        for decision in decisions:
            old = self._expected(decision.session_id, None, None)
            if isinstance(decision, End):
                changed.append(reclaim.ended(old, decision, now_s=now_s))
                if decision.requeue:
                    changed.append(reclaim.again(changed[-1], now_s=now_s))
            else:
                changed.append(reclaim.told(old, decision))
        written = tuple(session if session.id else self._new(session) for session in changed)
        self._write(written)
        return written

    def keep(self, session_id: int, until_s: int, *, now_s: int) -> Session:
        """Let a session be idle until then, as its owner asks, and take a warning for being idle back.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is not RUNNING.
        """
        old = self._expected(session_id, (S.RUNNING,), None)
        return self._changed(old, reclaim.kept(old, until_s))

    def note_idle(self, session_id: int, since_s: int | None, *, now_s: int) -> Session:
        """Keep since when both the GPU and the kernels of a session are idle; None: they are not.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is not RUNNING.
        """
        old = self._expected(session_id, (S.RUNNING,), None)
        return self._changed(old, replace(old, idle_since_s=since_s))

    def new_attempt(self, session_id: int, *, now_s: int) -> Session:
        """Begin to launch a session anew, its share held throughout.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is neither PREPARING nor PULLING.
        """
        old = self._expected(session_id, lifecycle.LAUNCHING, None)
        new = replace(old, state=S.PREPARING, attempt=old.attempt + 1, launched=None)
        self._write((new,))
        return new

    def note_launched(self, session_id: int, launched: str, *, attempt: int) -> None:
        """Keep the launcher's note on what it started for this attempt.

        Raises:
            UnknownSession: no session has this id.
            InvalidTransition: it is neither PREPARING nor PULLING, or at another attempt.
        """
        old = self._expected(session_id, lifecycle.LAUNCHING, attempt)
        self._write((replace(old, launched=launched),))

    def hold_waiting(self, *, now_s: int) -> int:
        """Hold every session that has not started; return how many are held then."""
        early = (S.PENDING, S.SCHEDULED, *lifecycle.LAUNCHING)
        found = [s for s in self._world.sessions if s.state in early]
        self._write([replace(s, held=True) for s in found if not s.held])
        return len(found)

    def set_held(self, session_id: int, held: bool, *, now_s: int) -> Session:
        """Hold a session or let it go.

        Raises:
            UnknownSession: no session has this id.
        """
        old = self._expected(session_id, None, None)
        return self._changed(old, replace(old, held=held))

    # --- Reading ---

    def session(self, session_id: int) -> Session | None:
        """Return the session with this id, live or ended."""
        return self._world.session(session_id) or self._ended.get(session_id)

    def serving(self, user: str, server_name: str) -> Session | None:
        """Return the server's current session."""
        found = (s for s in self._world.sessions if _server(s.request) == (user, server_name))
        return next((s for s in found if s.state in lifecycle.SERVING), None)

    def held_sessions(self) -> tuple[Session, ...]:
        """Return what is held, in the order to resume it: what has its share first, then the queue."""
        held = (s for s in self._world.sessions if s.held and s.state is not S.TERMINATING)
        return tuple(
            sorted(
                (s for s in held if s.state is not S.RUNNING),
                key=lambda s: (s.state is S.PENDING, s.submitted_at_s, s.id),
            )
        )

    def typical_length_s(self, resource_group: str, *, least: int = 5, newest: int = 50) -> int | None:
        """Return the median length of the sessions that ran and ended last, or None below ``least``."""
        ran = [
            (s.ended_at_s, s.id, s.ended_at_s - s.started_at_s)
            for s in self._ended.values()
            if s.request.resource_group == resource_group
            and s.started_at_s is not None
            and s.ended_at_s is not None
        ]
        lengths = [length for _, _, length in sorted(ran, reverse=True)[:newest]]
        return int(median(lengths)) if lengths and len(lengths) >= least else None

    # --- Parts ---

    def _expected(
        self, session_id: int, states: Collection[SessionState] | None, attempt: int | None
    ) -> Session:
        found = self.session(session_id)
        if found is None:
            raise UnknownSession(f"there is no session {session_id}")
        if states is not None and found.state not in states:
            raise InvalidTransition(f"session {session_id} is {found.state} and not {' or '.join(states)}")
        if attempt is not None and found.attempt != attempt:
            raise InvalidTransition(f"session {session_id} is at attempt {found.attempt} and not {attempt}")
        return found

    def _changed(self, old: Session, new: Session) -> Session:
        if new != old:
            self._write((new,))
        return new

    def _spend(self, session: Session) -> None:
        """Add what a session that has ended has used to what its user has."""
        amount = fgpu_seconds(session, 0)
        if amount and session.ended_at_s is not None:
            user, group = session.request.user, session.request.resource_group
            before = self._decayed(user, group, now_s=session.ended_at_s)
            self._used[user, group] = before + amount, session.ended_at_s

    def _decayed(self, user: str, group: str, *, now_s: int) -> float:
        amount, at_s = self._used.get((user, group), (0.0, now_s))
        return decayed(amount, age_s=now_s - at_s, half_life_s=self._half_life_s(group))

    def _write(self, changed: Sequence[Session]) -> None:
        if not changed:
            return
        sessions = {s.id: s for s in self._world.sessions}
        for session in changed:
            if session.state in lifecycle.ENDED:
                sessions.pop(session.id, None)
                if session.id not in self._ended:
                    self._spend(session)
                self._ended[session.id] = session
            else:
                sessions[session.id] = session
        after = self._world.with_sessions(sessions.values())
        self._world = replace(after, version=self._world.version + 1)


def _server(asked: Request) -> tuple[str, str]:
    return asked.user, asked.server_name
