"""The changes of sessions, shared by every store. Each method is one write: all its effects are written, or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from fgpu_scheduler.core import lifecycle, reclaim, resizing
from fgpu_scheduler.core.commit import committed
from fgpu_scheduler.core.forecast_accuracy import ForecastHistory
from fgpu_scheduler.core.model import (
    EndCause,
    Node,
    NodeState,
    Quota,
    Request,
    Session,
    SessionIndex,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.planner import Plan
from fgpu_scheduler.core.reclaim import End, Reclaim
from fgpu_scheduler.core.resizing import Amount, NotResized
from fgpu_scheduler.core.units import format_milli
from fgpu_scheduler.core.usage import HALF_LIFE_S, HalfLife, decayed, fgpu_seconds
from fgpu_scheduler.errors import InvalidTransition, SessionExists, StaleVersion, TooManyPending
from fgpu_scheduler.store import quotas as accounts
from fgpu_scheduler.store.snapshot_cache import Contents

S = SessionState
EARLY = (S.PENDING, S.SCHEDULED)
"""The states in which nothing of a session has been launched."""
REPLACED = "replaced by a new request of the same server"


class Write(Protocol):
    """One write: the store's contents before it, and the changes."""

    now_s: int
    world: Contents
    """The contents and version before the write."""

    def one(self, session_id: int) -> Session:
        """Return the session with this id as it was before, or raise `UnknownSession`."""

    def add(self, new: Session) -> Session:
        """Add a new session, and return it with its id."""

    def save(self, changed: Sequence[Session]) -> None:
        """Write the changed sessions, except their shares: `give_shares` and `take_shares` write those."""

    def give_shares(self, placed: Sequence[Session]) -> None:
        """Write the shares of sessions that had none."""

    def take_shares(self, session_id: int) -> None:
        """Delete the shares of a session."""

    def set_used(self, user: str, resource_group: str, fgpu_milli_s: float) -> None:
        """Set the usage of a user's ended sessions, decayed to now."""

    def take_message(self, session_id: int) -> str | None:
        """Return and delete an administrator's message to the owner of a session that ends now."""

    def then(self) -> Contents | None:
        """Return the contents after this write, or None if they must be read from the database."""

    def event(
        self,
        kind: str,
        session: Session | None = None,
        *,
        was: SessionState | None = None,
        reason: str | None = None,
    ) -> None:
        """Log a change; with ``was`` it is a transition from that state to the session's state."""


class SessionStore(ABC):
    """Stores nodes, sessions, shares and usage. Every write that changes anything makes a new version.

    Methods that change a session raise `UnknownSession` if there is none with its id.
    """

    def __init__(self, *, half_life_s: HalfLife = lambda _: HALF_LIFE_S) -> None:
        """``half_life_s`` returns the half-life of usage in a resource group."""
        self._half_life_s = half_life_s

    @abstractmethod
    def writing(self, *, now_s: int) -> AbstractContextManager[Write]:
        """Begin a write."""

    # --- Nodes and quotas ---

    @abstractmethod
    def set_nodes(self, nodes: Sequence[Node], *, now_s: int, keep_states: bool = False) -> None:
        """Replace the nodes and devices by the configured ones, but keep what sessions hold.

        A node that is no longer configured is deleted, or becomes LOST and closed while a session holds a share of it. A
        device that its node no longer has is deleted, or is no longer offered while it is held. A CORDONED node stays
        CORDONED, and a held device stays on its node. With ``keep_states`` known nodes keep their states, and only new
        nodes get the given state.

        Raises:
            BadSettings: a node or a device is configured twice.
        """

    @abstractmethod
    def set_node_state(
        self, node_id: str, state: NodeState, *, now_s: int, only: NodeState | None = None
    ) -> NodeState:
        """Set the state of a node, but only if it is ``only`` where that is given; return the state that it had.

        Raises:
            BadSettings: there is no such node.
        """

    @abstractmethod
    def set_cordon(self, device_uuid: str, reason: str | None, *, now_s: int) -> str | None:
        """Cordon a device for this reason, or uncordon it if None; return the reason that it had.

        Raises:
            BadSettings: there is no such device.
        """

    @abstractmethod
    def set_quotas(self, quotas: Sequence[Quota], *, now_s: int) -> None:
        """Replace all quotas by these, with administrators' edits applied.

        Raises:
            BadSettings: one is there twice, has no limit, an impossible limit, or no name. Nothing is changed.
        """

    # --- Reading ---

    @abstractmethod
    def version(self) -> int:
        """Return the store's version, which differs after every write."""

    @abstractmethod
    def snapshot(self, now_s: int) -> Snapshot:
        """Return nodes, live sessions, usage and quotas at one instant."""

    @abstractmethod
    def session(self, session_id: int) -> Session | None:
        """Return the session with this id, live or ended."""

    @abstractmethod
    def serving(self, user: str, server_name: str) -> Session | None:
        """Return the server's current session."""

    @abstractmethod
    def held_sessions(self) -> tuple[Session, ...]:
        """Return the held sessions in the order to resume them: first those with shares, then the queue."""

    @abstractmethod
    def experience(self, resource_group: str) -> ForecastHistory:
        """Return the lengths of the newest runs of a group, and the errors of its forecasts."""

    # --- The queue ---

    def submit(
        self,
        requests: Sequence[Request],
        *,
        now_s: int,
        max_pending_per_user: int | None = None,
        held: bool = False,
        replacing: int | None = None,
        place: Callable[[Snapshot], Plan] | None = None,
    ) -> tuple[Session, ...]:
        """Queue all of the requests, or none, and end the session ``replacing`` unless it is ending.

        If the queue is empty, ``place`` may place a single request in the same write.

        Raises:
            UnknownSession: there is no session ``replacing``.
            SessionExists: a request's server has a session that is not ending.
            TooManyPending: a user would have more than ``max_pending_per_user`` pending requests.
            OverQuota: a request exceeds a pending quota, or could never start under a quota.
        """
        with self.writing(now_s=now_s) as write:
            old = None if replacing is None else write.one(replacing)
            groups = write.world.groups
            if old is not None and old.id in write.world.sessions:
                groups = groups.then([(old, None)])
            _refuse_twice(requests, groups)
            if max_pending_per_user is not None:
                _refuse_too_many(requests, groups, max_pending_per_user)
            accounts.refuse_over_quota(requests, write.world, groups)
            if old is not None and old.state in lifecycle.SERVING:
                to = S.CANCELLED if old.state in EARLY else S.TERMINATING
                ended = lifecycle.moved(old, to, now_s=now_s, cause=EndCause.USER, message=REPLACED)
                self._move(write, old, ended)
            new = tuple(_add(write, Session(0, asked, S.PENDING, now_s, held)) for asked in requests)
            if place is None or len(new) > 1 or groups.waiting:
                return new
            then = write.then()
            if then is None:
                return new
            snapshot = then.snapshot(now_s)
            changes = committed(place(snapshot), snapshot, now_s=now_s)
            self._write_plan(write, changes)
            return tuple(session for _, session in changes) or new

    def commit(self, plan: Plan, *, now_s: int) -> tuple[Session, ...]:
        """Check again that a plan's decisions fit, and write them; return the placed sessions.

        Raises:
            StaleVersion: the store has changed since, or a decision no longer fits. Nothing is written.
        """
        with self.writing(now_s=now_s) as write:
            self._check_version(write, plan.version)
            return self._write_plan(write, committed(plan, write.world.snapshot(now_s), now_s=now_s))

    def _write_plan(self, write: Write, changes: Sequence[tuple[Session, Session]]) -> tuple[Session, ...]:
        """Write the sessions that a plan changes, given before and after; return the placed ones."""
        placed = [new for _, new in changes if new.state is S.SCHEDULED]
        write.save([new for _, new in changes])
        write.give_shares(placed)
        for old, new in changes:
            if new.state is S.SCHEDULED:
                write.event("moved", new, was=old.state)
                continue
            if new.wait_reason is not old.wait_reason:
                write.event("waits", new, reason=new.wait_reason)
            if new.promised_at_s != old.promised_at_s:
                write.event("promised", new, reason=WaitReason.RESERVED)
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

        A move to PREPARING begins a new attempt; a move back to PENDING gives up the shares. ``launched`` replaces the
        launcher's note unless None.

        Raises:
            InvalidTransition: the life cycle does not allow the move, the session's state or attempt is another one, or
                ``to`` is SCHEDULED, which only `commit` may set.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), expect, attempt)
            if to is S.SCHEDULED:
                raise InvalidTransition(f"session {session_id}: only a committed plan makes it {to}")
            if cause is EndCause.USER:
                message = write.take_message(session_id) or message
            new = replace(
                lifecycle.moved(old, to, now_s=now_s, cause=cause, message=message),
                attempt=old.attempt + 1 if to is S.PREPARING else old.attempt,
                launched=old.launched if launched is None else launched,
            )
            return self._move(write, old, new)

    def give_back(self, session_id: int, words: str, *, attempt: int, now_s: int) -> Session:
        """Queue a launching session again at its place, because its engine refused the node with this reason.

        Raises:
            InvalidTransition: it is neither PREPARING nor PULLING, or at another attempt.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.LAUNCHING, attempt)
            return self._move(write, old, lifecycle.returned_to_queue(old, words, now_s=now_s))

    def reclaim(self, decisions: Sequence[Reclaim], version: int, *, now_s: int) -> tuple[Session, ...]:
        """Write the warnings, withdrawals and ends decided on ``version``; return the changed sessions.

        A session that is queued again is a new one at the old one's place, held until a caller waits to launch it. It
        follows the old one in the result.

        Raises:
            StaleVersion: the store has changed since, or a session would end without a warning or before the announced
                time. Nothing is written.
        """
        with self.writing(now_s=now_s) as write:
            self._check_version(write, version)
            changed: list[Session] = []
            for decision in decisions:
                old = write.one(decision.session_id)
                if isinstance(decision, End):
                    new = reclaim.terminating(old, decision, now_s=now_s)
                    changed.append(self._move(write, old, new))
                    if decision.requeue:
                        changed.append(_add(write, reclaim.requeued(new, now_s=now_s)))
                else:
                    told = reclaim.warned(old, decision)
                    changed.append(_saved(write, told, "ends", told.ends_cause))
            return tuple(changed)

    def keep(self, session_id: int, until_s: int, *, now_s: int) -> Session:
        """Let a session be idle until ``until_s``, as its owner asks, and withdraw an idle warning.

        Raises:
            InvalidTransition: it is not RUNNING.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), (S.RUNNING,))
            new = reclaim.kept_while_idle(old, until_s)
            if new != old:
                _saved(write, new, "kept", EndCause.IDLE)
            if new.ends_cause is not old.ends_cause:
                write.event("ends", new)
            return new

    def extend(self, session_id: int, by_s: int, version: int, *, now_s: int) -> Session:
        """Extend the time limit of a session, as decided on ``version``.

        Raises:
            StaleVersion: the store has changed since, or the session does not run.
        """
        with self.writing(now_s=now_s) as write:
            self._check_version(write, version)
            old = write.one(session_id)
            new = _saved(write, reclaim.extended(old, by_s), "extended", EndCause.TIME_LIMIT)
            if new.ends_cause is not old.ends_cause:
                write.event("ends", new)
            return new

    def resize(self, session_id: int, amount: Amount, version: int, *, now_s: int) -> Session | NotResized:
        """Give a running session another amount of its GPU, as decided on ``version``, or return the reason against it.

        Raises:
            StaleVersion: the store has changed since.
        """
        with self.writing(now_s=now_s) as write:
            self._check_version(write, version)
            old = write.one(session_id)
            new = resizing.resized(write.world.snapshot(now_s), old, amount)
            if isinstance(new, NotResized) or new == old:
                return new
            write.take_shares(new.id)
            write.save([new])
            write.give_shares([new])
            write.event("resized", new, reason=f"{amount_words(old)} -> {amount_words(new)}")
            return new

    def note_idle(self, session_id: int, since_s: int | None, *, now_s: int) -> Session:
        """Store since when both the GPU and the kernels of a session are idle; None: one of them is busy.

        Raises:
            InvalidTransition: it is not RUNNING.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), (S.RUNNING,))
            if old.idle_since_s == since_s:
                return old
            new = replace(old, idle_since_s=since_s)
            write.save([new])
            if (old.idle_since_s is None) is not (since_s is None):
                write.event("idle", new, reason=None if since_s is None else EndCause.IDLE)
            return new

    def new_attempt(self, session_id: int, *, now_s: int) -> Session:
        """Begin another attempt to launch a session, which keeps its shares.

        Raises:
            InvalidTransition: it is neither PREPARING nor PULLING.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.LAUNCHING)
            new = replace(old, state=S.PREPARING, attempt=old.attempt + 1, launched=None)
            write.save([new])
            write.event("attempt", new, was=old.state)
            return new

    def warn(
        self,
        session_id: int,
        message: str | None,
        cause: EndCause = EndCause.ISOLATION_FAILED,
        *,
        now_s: int,
    ) -> Session:
        """Store a warning to the owner of a running session, and the cause that may end it; None withdraws it.

        Raises:
            InvalidTransition: it is not RUNNING.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), (S.RUNNING,))
            if old.message == message:
                return old
            for_what = None if message is None else cause
            return _saved(write, replace(old, message=message), "warned", for_what)

    def hold_waiting(self, *, now_s: int) -> int:
        """Hold every session that has not started, as no caller waits to launch it; return how many are held now."""
        with self.writing(now_s=now_s) as write:
            early = (*EARLY, *lifecycle.LAUNCHING)
            found = [session for session in write.world.sessions.values() if session.state in early]
            _hold(write, [session for session in found if not session.held], True)
            return len(found)

    def set_held(self, session_id: int, held: bool, *, now_s: int) -> Session:
        """Hold or release a session."""
        with self.writing(now_s=now_s) as write:
            session = write.one(session_id)
            return session if session.held is held else _hold(write, [session], held)[0]

    def _check_version(self, write: Write, version: int) -> None:
        if write.world.version != version:
            raise StaleVersion(f"planned on version {version}; the store is at {write.world.version}")

    def _move(self, write: Write, old: Session, new: Session) -> Session:
        """Write a session after a transition, with its effects on shares and usage."""
        if new.placement is None and old.placement is not None:
            write.take_shares(new.id)
        if new.state in lifecycle.ENDED:
            self._spend(write, new)
        write.save([new])
        write.event("moved", new, was=old.state, reason=new.end_cause or new.wait_reason)
        return new

    def _spend(self, write: Write, session: Session) -> None:
        """Add the usage of a session that ends now to its user's."""
        amount = float(fgpu_seconds(session, write.now_s))
        if not amount:
            return
        user, group = session.request.user, session.request.resource_group
        before, at_s = write.world.used.get((user, group), (0.0, write.now_s))
        before = decayed(before, age_s=write.now_s - at_s, half_life_s=self._half_life_s(group))
        write.set_used(user, group, amount + before)


def amount_words(session: Session) -> str:
    """Return the amount that a session requests, for the log: "0.5 fGPU", "4096 MiB", "4096 MiB, 25 %"."""
    asked = session.request
    if asked.gpu_memory_mib is None:
        return f"{format_milli(asked.fgpu_milli)} fGPU"
    percent = "" if asked.compute_percent is None else f", {asked.compute_percent} %"
    return f"{asked.gpu_memory_mib} MiB{percent}"


def expected(
    session: Session, states: Collection[SessionState] | None, attempt: int | None = None
) -> Session:
    """Return the session if it is in one of these states and at this attempt (None: any), or raise InvalidTransition."""
    if states is not None and session.state not in states:
        wanted = " or ".join(state for state in SessionState if state in states)
        raise InvalidTransition(f"session {session.id} is {session.state} and not {wanted}")
    if attempt is not None and session.attempt != attempt:
        raise InvalidTransition(f"session {session.id} is at attempt {session.attempt} and not {attempt}")
    return session


def server_of(request: Request) -> tuple[str, str]:
    """Return the user and the server name of a request."""
    return request.user, request.server_name


def _refuse_twice(requests: Sequence[Request], groups: SessionIndex) -> None:
    servers = {
        server_of(session.request)
        for user in {request.user for request in requests}
        for session in groups.of_user.get(user, {}).values()
        if session.state in lifecycle.SERVING
    }
    for request in requests:
        if server_of(request) in servers:
            raise SessionExists(f"the server {request.server_name!r} of {request.user} has a session")
        servers.add(server_of(request))


def _refuse_too_many(requests: Sequence[Request], groups: SessionIndex, most: int) -> None:
    for user in sorted({request.user for request in requests}):
        already = sum(1 for s in groups.of_user.get(user, {}).values() if s.state is S.PENDING)
        more = sum(1 for request in requests if request.user == user)
        if already + more > most:
            raise TooManyPending(
                f"{user} may have {most} requests waiting: {already} wait already, and this would add {more}"
            )


def _add(write: Write, new: Session) -> Session:
    new = write.add(new)
    write.event("submitted", new, reason=None if new.replaces is None else f"replaces {new.replaces}")
    return new


def _saved(write: Write, new: Session, kind: str, reason: str | None) -> Session:
    write.save([new])
    write.event(kind, new, reason=reason)
    return new


def _hold(write: Write, found: Sequence[Session], held: bool) -> list[Session]:
    changed = [replace(session, held=held) for session in found]
    write.save(changed)
    for session in changed:
        write.event("held", session, reason="HELD" if held else None)
    return changed
