"""The changes of sessions. Each method is one write: all its effects are written, or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from fgpu_scheduler.core import lifecycle, reclaim, resizing
from fgpu_scheduler.core.model import (
    EndCause,
    Node,
    Request,
    Session,
    SessionIndex,
    SessionState,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.planner import Plan, committed
from fgpu_scheduler.core.reclaim import End, Reclaim
from fgpu_scheduler.core.resizing import Amount, NotResized
from fgpu_scheduler.core.shares import size_until
from fgpu_scheduler.core.units import format_milli
from fgpu_scheduler.core.usage import HALF_LIFE_S, HalfLife, decayed, fgpu_seconds
from fgpu_scheduler.errors import InvalidTransition, SessionExists, TooManyPending
from fgpu_scheduler.store import quotas as quota_store
from fgpu_scheduler.store.transaction import StoreConnection, Write

S = SessionState
EARLY = (S.PENDING, S.SCHEDULED)
"""The states in which nothing of a session has been launched."""


class SessionStore(StoreConnection):
    """Changes sessions, their shares and usage.

    Methods raise `UnknownSession` if there is no session with the id, and `InvalidTransition` if its state does not allow
    the change. Those with a ``version``, on which the change was decided, raise `StaleVersion` if the store has changed
    since; nothing is written then.
    """

    def __init__(self, url: str, *, half_life_s: HalfLife = lambda _: HALF_LIFE_S) -> None:
        """``half_life_s`` returns the half-life of usage in a resource group."""
        super().__init__(url)
        self._half_life_s = half_life_s

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
            SessionExists: a request's server has a session that is not ending.
            TooManyPending: a user would have more than ``max_pending_per_user`` pending requests.
            OverQuota: a request exceeds a pending quota, or could never start under a quota.
        """
        with self.writing(now_s=now_s) as write:
            old = None if replacing is None else write.one(replacing)
            groups = write.world.groups
            if old is not None and old.id in write.world.sessions:
                groups = groups.then([(old, None)])
            _refuse(requests, groups, max_pending_per_user)
            quota_store.refuse_over_quota(requests, write.world, groups)
            if old is not None and old.state in lifecycle.SERVING:
                message = "replaced by a new request of the same server"
                ended = lifecycle.moved(
                    old, end_state(old), now_s=now_s, cause=EndCause.USER, message=message
                )
                self._move(write, old, ended)
            new = tuple(write.add(Session(0, asked, S.PENDING, now_s, held)) for asked in requests)
            if place is None or len(new) > 1 or groups.waiting:
                return new
            then = write.then()
            if then is None:
                return new
            snapshot = then.snapshot(now_s)
            changes = committed(place(snapshot), snapshot, now_s=now_s)
            _write_plan(write, changes)
            after = {session.id: session for _, session in changes}
            return tuple(after.get(session.id, session) for session in new)

    def commit(self, plan: Plan, *, now_s: int) -> tuple[Session, ...]:
        """Check again that a plan's decisions fit, and write them; return the placed and the resuming sessions.

        Raises:
            StaleVersion: the store has changed since, or a decision no longer fits. Nothing is written.
        """
        with self.writing(now_s=now_s) as write:
            write.check_version(plan.version)
            return _write_plan(write, committed(plan, write.world.snapshot(now_s), now_s=now_s))

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
        launcher's note unless None. Only `commit` may set SCHEDULED and RESUMING, and only `park` parks a running
        session.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), expect, attempt)
            if to in (S.SCHEDULED, S.RESUMING):
                raise InvalidTransition(f"session {session_id}: only a committed plan makes it {to}")
            if to is S.PARKED and old.parked_at_s is None:
                raise InvalidTransition(
                    f"session {session_id}: it holds its shares, and only `park` makes it {to}"
                )
            if cause is EndCause.USER:
                message = write.take_message(session_id) or message
            new = replace(
                lifecycle.moved(old, to, now_s=now_s, cause=cause, message=message),
                attempt=old.attempt + 1 if to is S.PREPARING else old.attempt,
                launched=old.launched if launched is None else launched,
            )
            return self._move(write, old, new)

    def give_back(self, session_id: int, words: str, *, attempt: int, now_s: int) -> Session:
        """Queue a launching session again at its place, because its engine refused the node with this reason."""
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.LAUNCHING, attempt)
            return self._move(write, old, lifecycle.returned_to_queue(old, words, now_s=now_s))

    def reclaim(self, decisions: Sequence[Reclaim], version: int, *, now_s: int) -> tuple[Session, ...]:
        """Write the warnings, withdrawals and ends decided on ``version``; return the changed sessions.

        A session that is queued again is a new one at the old one's place, held until a caller waits to launch it. It
        follows the old one in the result.

        Raises:
            StaleVersion: also if a session would end without a warning or before the announced time.
        """
        with self.writing(now_s=now_s) as write:
            write.check_version(version)
            changed: list[Session] = []
            for decision in decisions:
                old = write.one(decision.session_id)
                if isinstance(decision, End):
                    new = reclaim.terminating(old, decision, now_s=now_s)
                    changed.append(self._move(write, old, new))
                    if decision.requeue:
                        changed.append(write.add(reclaim.requeued(new, now_s=now_s)))
                else:
                    new = reclaim.warned(old, decision)
                    changed.append(write.save_one(new, "ends", new.ends_cause))
            return tuple(changed)

    def keep(self, session_id: int, until_s: int | None, *, now_s: int) -> Session:
        """Let a running session be idle until ``until_s``, as its owner asks, and withdraw an idle warning.

        ``FOR_GOOD_S``: it is never parked. None: it is treated like any other session again.
        """
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.UP)
            new = reclaim.kept_while_idle(old, until_s, now_s=now_s)
            if new != old:
                write.save_one(new, "kept", None if until_s is None else EndCause.IDLE)
            if new.ends_cause is not old.ends_cause:
                write.event("ends", new)
            return new

    def extend(self, session_id: int, by_s: int, version: int, *, now_s: int) -> Session:
        """Extend the time limit of a session, as decided on ``version``.

        Raises:
            StaleVersion: also if the session does not run.
        """
        with self.writing(now_s=now_s) as write:
            write.check_version(version)
            new = reclaim.extended(write.one(session_id), by_s)
            return write.save_one(new, "extended", EndCause.TIME_LIMIT)

    def resize(self, session_id: int, amount: Amount, version: int, *, now_s: int) -> Session | NotResized:
        """Give a session another amount of its GPU, as decided on ``version``, or return the reason against it."""
        with self.writing(now_s=now_s) as write:
            write.check_version(version)
            old = write.one(session_id)
            new = resizing.resized(write.world.snapshot(now_s), old, amount)
            if isinstance(new, NotResized) or new == old:
                return new
            write.take_shares(new.id)
            write.save_one(new, "resized", f"{amount_words(old)} -> {amount_words(new)}")
            write.give_shares([new])
            return new

    def rename(self, session_id: int, name: str, *, now_s: int) -> Session:
        """Give a live session another name."""
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.LIVE)
            if old.request.name == name:
                return old
            return write.save_one(replace(old, request=replace(old.request, name=name)), "renamed")

    def park(self, session_id: int, parked_mib: int, message: str | None = None, *, now_s: int) -> Session:
        """Park a running or resuming session: it gives up its shares, and the host has ``parked_mib`` of GPU memory."""
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.UP)
            if old.state is S.PARKED:
                return old
            return self._move(write, old, parked(old, write.world.nodes, parked_mib, message, now_s=now_s))

    def ask_to_park(self, session_id: int, *, now_s: int) -> Session:
        """Store that a running session shall be parked, however busy it is. The Hub parks it if its engine can."""
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), (S.RUNNING,))
            if old.park_asked_at_s == now_s:
                return old
            return write.save_one(replace(old, park_asked_at_s=now_s, park_refused=None), "park")

    def refuse_to_park(self, session_id: int, why: str, *, now_s: int) -> Session:
        """Store why a running session is not parked, although a person asked for it."""
        with self.writing(now_s=now_s) as write:
            old = write.one(session_id)
            if old.state is not S.RUNNING or old.park_refused == why:
                return old
            return write.save_one(replace(old, park_refused=why), "park", "REFUSED")

    def want(self, session_id: int, wanted: bool, *, now_s: int) -> Session:
        """Store whether a parked session wants its shares back; a session in another state is left unchanged."""
        with self.writing(now_s=now_s) as write:
            old = write.one(session_id)
            if old.state is not S.PARKED or (old.wanted_at_s is not None) is wanted:
                return old
            new = replace(old, wanted_at_s=now_s if wanted else None, wait_reason=None)
            return write.save_one(new, "wanted", "WANTED" if wanted else None)

    def note_idle(self, session_id: int, since_s: int | None, *, now_s: int) -> Session:
        """Store since when both the GPU and the kernels of a running session are idle; None: one of them is busy."""
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.UP)
            if old.idle_since_s == since_s:
                return old
            new = replace(old, idle_since_s=since_s)
            write.save([new])
            if (old.idle_since_s is None) is not (since_s is None):
                write.event("idle", new, reason=None if since_s is None else EndCause.IDLE)
            return new

    def new_attempt(self, session_id: int, *, now_s: int) -> Session:
        """Begin another attempt to launch a session that is PREPARING or PULLING; it keeps its shares."""
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
        """Store a warning to the owner of a running session, and the cause that may end it; None withdraws it."""
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), lifecycle.UP)
            if old.message == message:
                return old
            return write.save_one(replace(old, message=message), "warned", None if message is None else cause)

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

    def set_priority(self, session_id: int, priority: int, *, by: str, now_s: int) -> Session:
        """Change the priority of a pending session for an administrator."""
        with self.writing(now_s=now_s) as write:
            old = expected(write.one(session_id), (S.PENDING,))
            asked = old.request
            if asked.priority == priority:
                return old
            own = old.own_request.priority
            new = replace(
                old,
                request=replace(asked, priority=priority),
                asked_priority=None if priority == own else own,
            )
            change = f"{asked.priority} -> {priority}"
            write.save_one(new, "priority", change)
            target = f"session {session_id} of {asked.user}"
            write.audit(by, "session.priority", target, change, asked.resource_group)
            return new

    def _move(self, write: Write, old: Session, new: Session) -> Session:
        """Write a session after a transition, with its effects on shares and usage."""
        if new.placement is None and old.placement is not None:
            write.take_shares(new.id)
        if new.state in lifecycle.ENDED and (amount := float(fgpu_seconds(new, write.now_s))):
            asked, group = new.request, new.request.resource_group
            own = asked.user, group, asked.account
            before, at_s = write.world.used.get(own, (0.0, write.now_s))
            before = decayed(before, age_s=write.now_s - at_s, half_life_s=self._half_life_s(group))
            write.set_used(asked, amount + before)
        write.save([new])
        write.event("moved", new, was=old.state, reason=new.end_cause or new.wait_reason)
        return new


def end_state(session: Session) -> SessionState:
    """Return the state of a live session once its end is requested."""
    return S.CANCELLED if session.state in EARLY else S.TERMINATING


def parked(
    session: Session, nodes: Iterable[Node], parked_mib: int, message: str | None, *, now_s: int
) -> Session:
    """Return a running or resuming session PARKED."""
    shares = session.placement.shares if session.placement else ()
    devices = (device for node in nodes for device in node.devices)
    held = size_until(now_s, shares=shares, devices=devices)
    new = replace(session, sizes=lifecycle.with_size(session, held), message=message or session.message)
    return replace(lifecycle.moved(new, S.PARKED, now_s=now_s), parked_mib=parked_mib)


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


def _refuse(requests: Sequence[Request], groups: SessionIndex, most: int | None) -> None:
    """Refuse a second session of a server, and more than ``most`` pending requests of a user."""
    live = {user: groups.of_user.get(user, {}).values() for user in sorted({r.user for r in requests})}
    serving = [s.request for found in live.values() for s in found if s.state in lifecycle.SERVING]
    servers = {(asked.user, asked.server_name) for asked in serving}
    for request in requests:
        if (request.user, request.server_name) in servers:
            raise SessionExists(f"the server {request.server_name!r} of {request.user} has a session")
        servers.add((request.user, request.server_name))
    for user, found in live.items():
        already = sum(s.state is S.PENDING for s in found)
        more = sum(request.user == user for request in requests)
        if most is not None and already + more > most:
            raise TooManyPending(
                f"{user} may have {most} requests waiting: {already} wait already, and this would add {more}"
            )


def _write_plan(write: Write, changes: Sequence[tuple[Session, Session]]) -> tuple[Session, ...]:
    """Write the sessions that a plan changes, given before and after; return the placed and the resuming ones."""
    placed = [new for _, new in changes if new.state is S.SCHEDULED]
    resuming = [new for _, new in changes if new.state is S.RESUMING]
    write.save([new for _, new in changes])
    write.give_shares(placed)
    for old, new in changes:
        if new.state in (S.SCHEDULED, S.RESUMING):
            write.event("moved", new, was=old.state)
            continue
        if new.wait_reason is not old.wait_reason:
            write.event("waits", new, reason=new.wait_reason)
        if new.promised_at_s != old.promised_at_s:
            write.event("promised", new, reason=WaitReason.RESERVED)
    return (*placed, *resuming)


def _hold(write: Write, found: Sequence[Session], held: bool) -> list[Session]:
    changed = [replace(session, held=held) for session in found]
    write.save(changed)
    for session in changed:
        write.event("held", session, reason="HELD" if held else None)
    return changed
