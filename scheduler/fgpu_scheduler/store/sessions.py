"""What may become of sessions, for every store: each method is one write, of all that follows from it or of nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from fgpu_scheduler.core import lifecycle, reclaim, resizing
from fgpu_scheduler.core.commit import committed
from fgpu_scheduler.core.hindsight import Experience
from fgpu_scheduler.core.model import (
    EndCause,
    Groups,
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
    """One write: what the store held before, and what is changed of it."""

    now_s: int
    world: Contents
    """What was there before, with its version."""

    def one(self, session_id: int) -> Session:
        """Return the session with this id, as it was before.

        Raises:
            UnknownSession: there is none.
        """

    def add(self, new: Session) -> Session:
        """Put a new session in, and return it with its id."""

    def save(self, changed: Sequence[Session]) -> None:
        """Change what changes in the life of sessions; their shares are given and taken by the two below."""

    def give_shares(self, placed: Sequence[Session]) -> None:
        """Write the shares of sessions that had none."""

    def take_shares(self, session_id: int) -> None:
        """Take away the shares of a session."""

    def set_used(self, user: str, resource_group: str, fgpu_milli_s: float) -> None:
        """Set what the ended sessions of a user have used by now."""

    def take_message(self, session_id: int) -> str | None:
        """Return what an administrator said to the owner of a session that ends now, and forget it."""

    def then(self) -> Contents | None:
        """Return what is there once this is written; None where it has to be read."""

    def event(
        self,
        kind: str,
        session: Session | None = None,
        *,
        was: SessionState | None = None,
        reason: str | None = None,
    ) -> None:
        """Log a change; with ``was`` it is one of the session's state, to the one it has now."""


class SessionStore(ABC):
    """Nodes, sessions, their shares, and what was used. Every write makes another version, if it changes anything.

    What is to change a session raises `UnknownSession` where none has its id.
    """

    def __init__(self, *, half_life_s: HalfLife = lambda _: HALF_LIFE_S) -> None:
        """``half_life_s`` tells of a resource group how fast what was used there is forgotten."""
        self._half_life_s = half_life_s

    @abstractmethod
    def writing(self, *, now_s: int) -> AbstractContextManager[Write]:
        """Begin a write."""

    # --- Nodes and quotas ---

    @abstractmethod
    def set_nodes(self, nodes: Sequence[Node], *, now_s: int, keep_states: bool = False) -> None:
        """Make the nodes and devices those that are configured, and forget nothing that is held.

        A node that is no longer configured is deleted, or becomes LOST and closed while a session holds a share of
        it. A device that its node no longer has is deleted, or is no longer offered while it is held.
        A CORDONED node stays so, and a held device stays on its node, whatever is configured. With ``keep_states``
        whatever is known of how the nodes answer stays, and the given state is for those that are new.

        Raises:
            BadSettings: a node or a device is configured twice.
        """

    @abstractmethod
    def set_node_state(
        self, node_id: str, state: NodeState, *, now_s: int, only: NodeState | None = None
    ) -> NodeState:
        """Set the state of a node, and return the one that it had. With ``only`` nothing is done in any other state.

        Raises:
            BadSettings: there is no such node.
        """

    @abstractmethod
    def set_cordon(self, device_uuid: str, reason: str | None, *, now_s: int) -> str | None:
        """Let a device take no new sessions, for this reason, or let it take them again; return the reason it had.

        Raises:
            BadSettings: there is no such device.
        """

    @abstractmethod
    def set_quotas(self, quotas: Sequence[Quota], *, now_s: int) -> None:
        """Make these the quotas, all together, with what administrators changed of them over it.

        Raises:
            BadSettings: one is there twice, has no limit or an impossible one, or is for nobody. None is changed.
        """

    # --- Reading ---

    @abstractmethod
    def version(self) -> int:
        """Return the store's version: another one after every write."""

    @abstractmethod
    def snapshot(self, now_s: int) -> Snapshot:
        """Return nodes, live sessions, usage and quotas as they are at one instant."""

    @abstractmethod
    def session(self, session_id: int) -> Session | None:
        """Return the session with this id, live or ended."""

    @abstractmethod
    def serving(self, user: str, server_name: str) -> Session | None:
        """Return the server's current session."""

    @abstractmethod
    def held_sessions(self) -> tuple[Session, ...]:
        """Return what is held, in the order to resume it: what has its share first, then the queue."""

    @abstractmethod
    def experience(self, resource_group: str) -> Experience:
        """Return how long the sessions that ended last ran, and how good what was told of starts was."""

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
        """Queue all of the requests, or none. With them the session ``replacing`` ends, unless it does already.

        Where nobody waits, a single request may be placed in the same write: as ``place`` decides.

        Raises:
            UnknownSession: there is none to be replaced.
            SessionExists: a request's server has a session that is not ending.
            TooManyPending: a user would have more than ``max_pending_per_user`` waiting.
            OverQuota: it is over a pending quota, or could never be inside a quota.
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
        """Write a plan's decisions, after checking again that they fit; return who got their shares.

        Raises:
            StaleVersion: the store has changed since, or a decision does not hold. Nothing is written.
        """
        with self.writing(now_s=now_s) as write:
            self._check_version(write, plan.version)
            return self._write_plan(write, committed(plan, write.world.snapshot(now_s), now_s=now_s))

    def _write_plan(self, write: Write, changes: Sequence[tuple[Session, Session]]) -> tuple[Session, ...]:
        """Write each session that a plan changes, as it was and as it is then; return those that it places."""
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

        To PREPARING is a new attempt; back to PENDING gives up the shares. ``launched`` replaces the
        launcher's note unless None.

        Raises:
            InvalidTransition: the life cycle has no such change, the session is elsewhere than expected,
                or ``to`` is SCHEDULED, which only `commit` gives.
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
        """Put a session that launches back to its place in the queue: its engine did not give it its node, in words.

        Raises:
            InvalidTransition: it is neither PREPARING nor PULLING, or at another attempt.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.LAUNCHING, attempt)
            return self._move(write, old, lifecycle.given_back(old, words, now_s=now_s))

    def reclaim(self, decisions: Sequence[Reclaim], version: int, *, now_s: int) -> tuple[Session, ...]:
        """Write who is warned, spared and ended, as decided on the snapshot of ``version``; return who has changed.

        What is queued again is a new session, after the one that it replaces: it has its place, and is held until
        somebody waits to launch it.

        Raises:
            StaleVersion: the store has changed since, or a session is ended that was not warned of it, or not yet of
                that instant. Nothing is written.
        """
        with self.writing(now_s=now_s) as write:
            self._check_version(write, version)
            changed: list[Session] = []
            for decision in decisions:
                old = write.one(decision.session_id)
                if isinstance(decision, End):
                    new = reclaim.ended(old, decision, now_s=now_s)
                    changed.append(self._move(write, old, new))
                    if decision.requeue:
                        changed.append(_add(write, reclaim.again(new, now_s=now_s)))
                else:
                    told = reclaim.told(old, decision)
                    changed.append(_saved(write, told, "ends", told.ends_cause))
            return tuple(changed)

    def keep(self, session_id: int, until_s: int, *, now_s: int) -> Session:
        """Let a session be idle until then, as its owner asks, and take a warning for being idle back.

        Raises:
            InvalidTransition: it is not RUNNING.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), (S.RUNNING,))
            new = reclaim.kept(old, until_s)
            if new != old:
                _saved(write, new, "kept", EndCause.IDLE)
            if new.ends_cause is not old.ends_cause:
                write.event("ends", new)
            return new

    def extend(self, session_id: int, by_s: int, version: int, *, now_s: int) -> Session:
        """Make the time limit of a session longer, as decided on the snapshot of ``version``.

        Raises:
            StaleVersion: the store has changed since, or it does not run.
        """
        with self.writing(now_s=now_s) as write:
            self._check_version(write, version)
            old = write.one(session_id)
            new = _saved(write, reclaim.extended(old, by_s), "extended", EndCause.TIME_LIMIT)
            if new.ends_cause is not old.ends_cause:
                write.event("ends", new)
            return new

    def resize(self, session_id: int, amount: Amount, version: int, *, now_s: int) -> Session | NotResized:
        """Give a running session another amount of its GPU, as decided on the snapshot of ``version``.

        Returns what is against it, if anything is; then nothing is written.

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
        """Keep since when both the GPU and the kernels of a session are idle; None: they are not.

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
        """Begin to launch a session anew, its share held throughout.

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
        """Keep what the owner of a running session is warned of; None: of nothing any more.

        ``cause`` is what it may be ended for.

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
        """Hold every session that has not started, since nobody waits to launch it now.

        Return how many are held then, with those that were before.
        """
        with self.writing(now_s=now_s) as write:
            early = (*EARLY, *lifecycle.LAUNCHING)
            found = [session for session in write.world.sessions.values() if session.state in early]
            _hold(write, [session for session in found if not session.held], True)
            return len(found)

    def set_held(self, session_id: int, held: bool, *, now_s: int) -> Session:
        """Hold a session or let it go."""
        with self.writing(now_s=now_s) as write:
            session = write.one(session_id)
            return session if session.held is held else _hold(write, [session], held)[0]

    def _check_version(self, write: Write, version: int) -> None:
        if write.world.version != version:
            raise StaleVersion(f"planned on version {version}; the store is at {write.world.version}")

    def _move(self, write: Write, old: Session, new: Session) -> Session:
        """Write what `lifecycle.moved` made, with what follows from it for shares and usage."""
        if new.placement is None and old.placement is not None:
            write.take_shares(new.id)
        if new.state in lifecycle.ENDED:
            self._spend(write, new)
        write.save([new])
        write.event("moved", new, was=old.state, reason=new.end_cause or new.wait_reason)
        return new

    def _spend(self, write: Write, session: Session) -> None:
        """Add what a session that ends now has used to what its user has."""
        amount = float(fgpu_seconds(session, write.now_s))
        if not amount:
            return
        user, group = session.request.user, session.request.resource_group
        before, at_s = write.world.used.get((user, group), (0.0, write.now_s))
        before = decayed(before, age_s=write.now_s - at_s, half_life_s=self._half_life_s(group))
        write.set_used(user, group, amount + before)


def amount_words(session: Session) -> str:
    """Return what a session asks for of its GPU, for the log: "0.5 fGPU", "4096 MiB", "4096 MiB, 25 %"."""
    asked = session.request
    if asked.gpu_memory_mib is None:
        return f"{format_milli(asked.fgpu_milli)} fGPU"
    percent = "" if asked.compute_percent is None else f", {asked.compute_percent} %"
    return f"{asked.gpu_memory_mib} MiB{percent}"


def expected(
    session: Session, states: Collection[SessionState] | None, attempt: int | None = None
) -> Session:
    """Return a session that is in one of these states, and at this attempt; None: in any.

    Raises:
        InvalidTransition: it is not.
    """
    if states is not None and session.state not in states:
        wanted = " or ".join(state for state in SessionState if state in states)
        raise InvalidTransition(f"session {session.id} is {session.state} and not {wanted}")
    if attempt is not None and session.attempt != attempt:
        raise InvalidTransition(f"session {session.id} is at attempt {session.attempt} and not {attempt}")
    return session


def server_of(request: Request) -> tuple[str, str]:
    """Return whom and which of their servers a request is for."""
    return request.user, request.server_name


def _refuse_twice(requests: Sequence[Request], groups: Groups) -> None:
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


def _refuse_too_many(requests: Sequence[Request], groups: Groups, most: int) -> None:
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
