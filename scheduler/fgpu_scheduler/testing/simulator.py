"""The real core in a simulated lab: users, a Hub that dies, slow engines, lost nodes, a clock that jumps.

One seed is one history: `random.Random(seed)` decides everything, and time is virtual. `Checks` look after
every write. What the Hub does here is what `service` and the spawner do, one durable step at a time, and
between any two steps anything else may happen.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fgpu_scheduler.core import admission, forecast, lifecycle, placement, planner, reconcile
from fgpu_scheduler.core.model import (
    Device,
    EndCause,
    Node,
    NodeState,
    Request,
    Session,
    SessionState,
    Snapshot,
)
from fgpu_scheduler.core.planner import Plan, Policy
from fgpu_scheduler.core.reconcile import Ended, Finish, Healing, Observed, Remove, Stop
from fgpu_scheduler.errors import InvalidTransition, SessionExists, StaleVersion, TooManyPending
from fgpu_scheduler.testing.checks import Checks, Standing, Violation
from fgpu_scheduler.testing.memory import MemoryStore, SessionStore

S = SessionState
EPOCH_S = 1_800_000_000
MOST_ROUNDS = 400
"""Rounds after which a lab without faults must have come to rest."""


@dataclass(frozen=True, slots=True)
class Faults:
    """How often something goes wrong: chances in percent, and weights among what happens outside."""

    late_pull: int = 10
    failed_pull: int = 12
    failed_create: int = 6
    failed_start: int = 6
    failed_stop: int = 10
    late_commit: int = 40
    never_resumed: int = 15
    tells_launches: bool = True
    """Whether the Hub tells `reconcile` of the launches that are under way. False is a bug to be found."""


CALM = Faults(0, 0, 0, 0, 0, 0, 0)

OUTSIDE: tuple[tuple[int, str], ...] = (
    (30, "submit"),
    (24, "cycle"),
    (14, "observe"),
    (9, "user_ends"),
    (5, "process_dies"),
    (2, "node_lost"),
    (3, "node_returns"),
    (2, "cordon"),
    (3, "uncordon"),
    (2, "hub_restarts"),
    (2, "clock_jumps"),
    (1, "unit_changes"),
    (2, "foretell"),
)
"""What happens from outside, and how often."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a simulation went. Equal seeds give equal reports, whatever the machine and the hash seed."""

    seed: int
    events: int
    looks: int
    submitted: int
    ran: int
    stale: int
    restarts: int
    orphans: int
    log_hash: str


@dataclass(order=True, slots=True)
class _Due:
    at_s: int
    number: int
    hub: int | None = field(compare=False)
    act: Callable[[], None] = field(compare=False)


class Simulation:
    """One lab and its history. ``hub`` counts the lives of the Hub: what a dead one had planned is void."""

    def __init__(
        self,
        seed: int,
        store: SessionStore | None = None,
        *,
        policy: Policy | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.seed = seed
        self.step = 0
        self.lines: list[str] = []
        self._rng = random.Random(seed)
        self._policy = policy or Policy()
        self._faults = faults or Faults()
        self._time_s = EPOCH_S
        self._skew_s = 0
        self._hub = 1
        self._due: list[_Due] = []
        self._numbers = 0
        self._store: SessionStore = store if store is not None else MemoryStore()
        self._containers: dict[str, Standing] = {}
        self._causes: dict[str, EndCause] = {}
        self._images: dict[tuple[str, str], None] = {}
        self._unreachable: dict[str, None] = {}
        self._creating: dict[int, int] = {}
        self._submitted = self._ran = self._stale = self._restarts = self._orphans = 0
        self._caps = admission.Caps(fgpu_step_milli=100, max_count=5, max_pending_per_user=6)
        lab = self._lab()
        # Most people ask for the same few amounts, so that there is an order to keep.
        fitting = admission.amounts_that_fit(lab, self._caps)
        self._amounts = [self._rng.choice(fitting) for _ in range(3)]
        self._store.set_nodes(lab, now_s=self._now_s())
        self._checks = Checks(self._snapshot())

    # --- The run ---

    def run(self, events: int) -> Report:
        """Let that many events happen, then let the faults stop and everything come to its end.

        Raises:
            Violation: a check fired; the message says how to see it again.
        """
        weights = [weight for weight, _ in OUTSIDE]
        acts = [getattr(self, f"_{name}") for _, name in OUTSIDE]
        try:
            for self.step in range(1, events + 1):
                if self._due and self._rng.randrange(100) < 65:
                    self._next()
                else:
                    self._pass_time(self._rng.randrange(20))
                    self._rng.choices(acts, weights)[0]()
            self._come_to_rest()
        except Exception as e:
            last = "\n  ".join(self.lines[-12:])
            raise Violation(
                f"seed {self.seed}, step {self.step} of {events}: {type(e).__name__}: {e}\n  {last}\n"
                f"see it again: python -m fgpu_scheduler.testing --seed {self.seed} --events {events}"
                + ("" if isinstance(self._store, MemoryStore) else " --store sql")
            ) from e
        text = "\n".join(self.lines)
        return Report(
            self.seed,
            events,
            self._checks.looks,
            self._submitted,
            self._ran,
            self._stale,
            self._restarts,
            self._orphans,
            hashlib.sha256(text.encode()).hexdigest(),
        )

    def _come_to_rest(self) -> None:
        self._faults = replace(CALM, tells_launches=self._faults.tells_launches)
        self._say("the faults stop")
        for node_id in list(self._unreachable):
            self._back(node_id)
        for node in self._snapshot().nodes:
            if node.state is not NodeState.READY:
                self._set_node(node.id, NodeState.READY)
        for _ in range(MOST_ROUNDS):
            self.step += 1
            for session in self._store.held_sessions():
                self._resume(session.id)
            self._cycle()
            self._observe()
            while self._due:
                self._next()
            sessions = self._snapshot().sessions
            if not sessions and not self._containers:
                break
            for session in sessions:
                # Whoever can run gets to run before anybody is turned away.
                if session.state is S.RUNNING or not self._could_run(session):
                    self._end(session.id, EndCause.USER)
        self._look()
        self._checks.ended(self._standing())
        snapshot = self._snapshot()
        if placement.free(snapshot) != tuple(placement.untouched(n) for n in snapshot.nodes):
            raise Violation("everything ended, and not everything is free")

    def _could_run(self, session: Session) -> bool:
        waits = session.state is S.PENDING
        return not waits or placement.could_ever_fit(session.request, self._snapshot().nodes)

    # --- Time ---

    def _now_s(self) -> int:
        return self._time_s + self._skew_s

    def _pass_time(self, seconds: int) -> None:
        self._time_s += seconds

    def _later(self, least_s: int, most_s: int, act: Callable[[], None]) -> None:
        """Let the Hub do something later, if it lives until then."""
        self._put(self._rng.randint(least_s, most_s), self._hub, act)

    def _elsewhere(self, least_s: int, most_s: int, act: Callable[[], None]) -> None:
        """Let something happen later whatever becomes of the Hub."""
        self._put(self._rng.randint(least_s, most_s), None, act)

    def _put(self, delay_s: int, hub: int | None, act: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._due, _Due(self._time_s + delay_s, self._numbers, hub, act))

    def _next(self) -> None:
        due = heapq.heappop(self._due)
        self._time_s = max(self._time_s, due.at_s)
        if due.hub is None or due.hub == self._hub:
            due.act()

    def _chance(self, percent: int) -> bool:
        return self._rng.randrange(100) < percent

    def _say(self, what: str) -> None:
        self.lines.append(f"{self._time_s - EPOCH_S} {what}")

    # --- The store, watched ---

    def _snapshot(self) -> Snapshot:
        return self._store.snapshot(self._now_s())

    def _look(self) -> None:
        self._checks.look(self._snapshot(), self._standing(), self._store.session)

    def _standing(self) -> tuple[Standing, ...]:
        return tuple(self._containers.values())

    def _move(
        self,
        session_id: int,
        to: SessionState,
        expect: Sequence[SessionState],
        *,
        attempt: int | None = None,
        cause: EndCause | None = None,
        message: str | None = None,
        launched: str | None = None,
    ) -> Session | None:
        """Return the session in its new state, or None where something else was faster."""
        try:
            moved = self._store.move(
                session_id,
                to,
                now_s=self._now_s(),
                cause=cause,
                message=message,
                launched=launched,
                expect=expect,
                attempt=attempt,
            )
        except InvalidTransition:
            self._say(f"session {session_id} is not {to}: it has moved on")
            return None
        self._say(f"session {session_id} -> {to} {cause or ''}")
        self._look()
        return moved

    def _get(self, session_id: int) -> Session:
        found = self._store.session(session_id)
        if found is None:
            raise Violation(f"session {session_id} is unknown")
        return found

    def _set_node(self, node_id: str, state: NodeState) -> None:
        self._store.set_node_state(node_id, state, now_s=self._now_s())
        self._say(f"node {node_id} is {state}")
        self._look()

    # --- The lab ---

    def _lab(self) -> tuple[Node, ...]:
        rng = self._rng
        nodes = []
        for number in range(rng.randint(1, 4)):
            node_id = f"n{number}"
            capacity = 1000 * rng.choice((1, 1, 2, 5))
            memory_mib = rng.choice((8192, 16160, 24576, 81559))
            devices = tuple(
                Device(f"GPU-{node_id}-{i}", node_id, i, "Simulated GPU", memory_mib, capacity)
                for i in range(rng.randint(1, 4))
            )
            group = "lab" if number == 0 else rng.choice(("lab", "lab", "class"))
            nodes.append(
                Node(node_id, group, 1000 * rng.choice((4, 16, 64)), 1024 * rng.choice((16, 128)), devices)
            )
        return tuple(nodes)

    def _submit(self) -> None:
        """A user asks, sees a forecast, and is refused or queued."""
        rng, snapshot = self._rng, self._snapshot()
        group = rng.choice(sorted({n.resource_group for n in snapshot.nodes}))
        anything = admission.amounts_that_fit(
            [n for n in snapshot.nodes if n.resource_group == group], self._caps
        )
        asked = Request(
            user=f"u{rng.randrange(8)}",
            server_name="",
            image=f"image{rng.randrange(3)}",
            resource_group=group,
            fgpu_milli=rng.choice(self._amounts if self._chance(70) else (*anything, 1500, 2500, 50, 9000)),
            cpu_milli=rng.choice((1000, 1000, 1000, 2000)),
            memory_mib=rng.choice((1024, 1024, 1024, 4096)),
        )
        count = rng.choice((1, 1, 1, 2, 3, 5))
        refusals = admission.admit(asked, count, snapshot.nodes, self._caps)
        if refusals:
            self._say(f"{asked.user} is refused: {'; '.join(r.message for r in refusals)}")
            return
        told = self._told(asked, count, snapshot)
        first = rng.randrange(12)
        requests = [replace(asked, server_name=f"s{(first + n) % 12}") for n in range(count)]
        attended = self._chance(50)
        try:
            sessions = self._store.submit(
                requests,
                now_s=self._now_s(),
                max_pending_per_user=self._caps.max_pending_per_user,
                held=not attended,
            )
        except (SessionExists, TooManyPending) as e:
            self._say(f"{asked.user} is not queued: {e}")
            return
        self._submitted += len(sessions)
        self._say(f"{asked.user} asks {count} x {asked.fgpu_milli} in {group}: {[s.id for s in sessions]}")
        self._checks.submitted(sessions)
        self._look()
        if attended:
            self._keeps_word(told, sessions)
        else:
            for session in sessions:
                self._later(0, 3, lambda i=session.id: self._attend(i))  # type: ignore[misc]

    def _told(self, asked: Request, count: int, snapshot: Snapshot) -> forecast.RequestForecast:
        typical = self._store.typical_length_s(asked.resource_group)
        return forecast.forecast_request(
            asked, count, snapshot, self._policy, self._caps, typical_length_s=typical
        )

    def _keeps_word(self, told: forecast.RequestForecast, sessions: Sequence[Session]) -> None:
        ids = [s.id for s in sessions]
        placed = planner.plan(self._snapshot(), self._policy).placed
        start = sum(1 for p in placed if p.session_id in ids)
        if start != told.startable_now:
            raise Violation(f"{told.startable_now} of {ids} were told to start now, and {start} do")

    def _attend(self, session_id: int) -> None:
        if self._get(session_id).state is S.PENDING:
            self._store.set_held(session_id, False, now_s=self._now_s())
            self._say(f"session {session_id} is attended")
            self._look()

    def _foretell(self) -> None:
        """Compare the queue's forecast with what the planner does."""
        snapshot = self._snapshot()
        typical = self._store.typical_length_s("lab")
        told = forecast.forecast(snapshot, self._policy, typical_length_s=typical)
        placed = [p.session_id for p in planner.plan(snapshot, self._policy).placed]
        if [f.session_id for f in told if f.position == 0] != placed:
            raise Violation(f"the forecast starts others than the planner: {told}, {placed}")
        if sorted(f.session_id for f in told) != [s.id for s in snapshot.sessions if s.state is S.PENDING]:
            raise Violation("the forecast does not speak of exactly those who wait")
        self._say(f"foretold {[(f.session_id, f.position, f.expected_start_at_s) for f in told]}")

    # --- Planning ---

    def _cycle(self) -> None:
        decided = planner.plan(self._snapshot(), self._policy)
        if self._chance(self._faults.late_commit):
            self._later(0, 4, lambda: self._commit(decided))
        else:
            self._commit(decided)

    def _commit(self, decided: Plan) -> None:
        version = self._store.version()
        try:
            placed = self._store.commit(decided, now_s=self._now_s())
        except StaleVersion as e:
            self._stale += 1
            self._say(f"stale: {e}")
            if version == decided.version:
                raise Violation(f"a plan of this very version was refused: {e}") from e
            self._later(0, 1, self._cycle)
            return
        if version != decided.version:
            raise Violation(f"a plan of version {decided.version} was committed at version {version}")
        for session in placed:
            self._say(f"session {session.id} -> SCHEDULED {session.placement}")
            self._later(0, 3, lambda i=session.id: self._launch(i))  # type: ignore[misc]
        self._look()

    # --- Launching ---

    def _launch(self, session_id: int) -> None:
        session = self._move(session_id, S.PREPARING, (S.SCHEDULED,))
        if session is not None:
            self._fetch(session)

    def _fetch(self, session: Session) -> None:
        """Pull the image where it is missing, then create the container."""
        if (_node(session), session.request.image) in self._images:
            self._later(0, 2, lambda: self._create(session))
        else:
            self._later(0, 2, lambda: self._pull(session))

    def _pull(self, session: Session) -> None:
        if self._move(session.id, S.PULLING, (S.PREPARING,), attempt=session.attempt) is None:
            return
        if self._chance(self._faults.failed_pull):
            self._later(1, 60, lambda: self._fails(session, EndCause.PULL_FAILED))
        elif self._chance(self._faults.late_pull):
            self._later(600, 4000, lambda: self._pulled(session))
        else:
            self._later(3, 120, lambda: self._pulled(session))

    def _pulled(self, session: Session) -> None:
        self._images[_node(session), session.request.image] = None
        self._create(session)

    def _create(self, session: Session) -> None:
        """Ask the engine. Once asked, it happens, even if the Hub dies or the user leaves meanwhile."""
        current = self._get(session.id)
        if current.state not in lifecycle.LAUNCHING or current.attempt != session.attempt:
            return
        hub = self._hub
        self._creating[session.id] = session.attempt
        self._elsewhere(1, 15, lambda: self._created(session, hub))

    def _created(self, session: Session, hub: int) -> None:
        made = _node(session) not in self._unreachable and not self._chance(self._faults.failed_create)
        if made:
            handle = f"c{session.id}-{session.attempt}"
            orphan = hub != self._hub
            self._orphans += orphan
            self._containers[handle] = Standing(
                handle, _node(session), session.id, session.attempt, True, orphan
            )
            self._say(f"{handle} is up{' as an orphan' if orphan else ''}")
            self._look()
        if hub == self._hub:
            self._later(0, 2, lambda: self._answered(session, made))

    def _answered(self, session: Session, made: bool) -> None:
        self._creating.pop(session.id, None)
        if not made:
            self._fails(session, EndCause.LAUNCH_FAILED)
            return
        if self._chance(50):
            try:
                self._store.note_launched(session.id, f"c{session.id}", attempt=session.attempt)
            except InvalidTransition:
                return
            self._look()
        self._later(1, 40, lambda: self._ready(session))

    def _ready(self, session: Session) -> None:
        handle = f"c{session.id}-{session.attempt}"
        container = self._containers.get(handle)
        if container is None or not container.alive:
            self._fails(session, EndCause.LAUNCH_FAILED)
        elif self._chance(self._faults.failed_start):
            self._fails(session, EndCause.ISOLATION_FAILED)
        elif self._move(session.id, S.RUNNING, lifecycle.LAUNCHING, attempt=session.attempt, launched=handle):
            self._ran += 1

    def _fails(self, session: Session, cause: EndCause) -> None:
        moved = self._move(
            session.id, S.TERMINATING, lifecycle.LAUNCHING, attempt=session.attempt, cause=cause
        )
        if moved is not None:
            self._later(0, 2, lambda: self._clear(session.id))

    # --- Ending ---

    def _user_ends(self) -> None:
        sessions = self._snapshot().sessions
        # Most live sessions wait or run: the short states in between need to be aimed at.
        launching = [s for s in sessions if s.state in lifecycle.LAUNCHING]
        if launching and self._chance(40):
            self._end(self._rng.choice(launching).id, EndCause.USER)
        elif sessions:
            self._end(self._rng.choice(sessions).id, EndCause.USER)

    def _end(self, session_id: int, cause: EndCause) -> None:
        session = self._get(session_id)
        if session.state in lifecycle.ENDED or session.state is S.TERMINATING:
            return
        early = session.state in (S.PENDING, S.SCHEDULED)
        to = S.CANCELLED if early else S.TERMINATING
        moved = self._move(session_id, to, (session.state,), cause=cause)
        if moved is not None and not early:
            self._later(0, 3, lambda: self._clear(session_id))

    def _clear(self, session_id: int) -> None:
        """Stop what was launched, and free the share once the engine says that it is gone."""
        session = self._get(session_id)
        if session.state is not S.TERMINATING:
            return
        if session_id in self._creating:
            self._later(1, 3, lambda: self._clear(session_id))
            return
        if _node(session) in self._unreachable or self._chance(self._faults.failed_stop):
            self._say(f"session {session_id} cannot be stopped; reconcile will")
            return
        hub = self._hub
        self._elsewhere(1, 8, lambda: self._cleared(session, hub))

    def _cleared(self, session: Session, hub: int) -> None:
        if _node(session) in self._unreachable:
            return
        for handle in [c.handle for c in self._standing() if c.session_id == session.id]:
            self._drop(handle)
        if hub == self._hub:
            self._later(0, 2, lambda: self._gone(session.id))

    def _gone(self, session_id: int) -> None:
        cause = self._get(session_id).end_cause
        self._move(session_id, lifecycle.final_state(cause), (S.TERMINATING,))

    def _drop(self, handle: str) -> None:
        """Remove a container if its node answers."""
        container = self._containers.get(handle)
        if container is not None and container.node_id not in self._unreachable:
            del self._containers[handle]
            self._say(f"{handle} is removed")
            self._look()

    # --- Faults ---

    def _process_dies(self) -> None:
        alive = [c for c in self._standing() if c.alive]
        if alive:
            self._dies(self._rng.choice(alive), self._rng.choice((EndCause.EXITED, EndCause.OOM)))

    def _dies(self, container: Standing, cause: EndCause) -> None:
        self._containers[container.handle] = replace(container, alive=False)
        self._causes[container.handle] = cause
        self._say(f"{container.handle} dies: {cause}")
        self._look()

    def _node_lost(self) -> None:
        nodes = [n.id for n in self._snapshot().nodes if n.id not in self._unreachable]
        if not nodes:
            return
        node_id = self._rng.choice(nodes)
        self._unreachable[node_id] = None
        self._say(f"node {node_id} does not answer")
        self._elsewhere(1, 30, lambda: self._node_missed(node_id))

    def _node_missed(self, node_id: str) -> None:
        """The Hub notices that a node is gone: what it has not launched there goes back to the queue."""
        if node_id not in self._unreachable:
            return
        self._set_node(node_id, NodeState.LOST)
        for session in self._snapshot().sessions:
            if session.placement is None or session.placement.node_id != node_id:
                continue
            if session.state is S.SCHEDULED:
                self._move(session.id, S.PENDING, (S.SCHEDULED,))
            elif session.state in lifecycle.LAUNCHING:
                self._later(5, 60, lambda s=session: self._fails(s, EndCause.NODE_LOST))  # type: ignore[misc]

    def _node_returns(self) -> None:
        if self._unreachable:
            self._back(self._rng.choice(list(self._unreachable)))

    def _back(self, node_id: str) -> None:
        rebooted = self._chance(30)
        for container in self._standing():
            if rebooted and container.node_id == node_id and container.alive:
                self._dies(container, EndCause.EXITED)
        del self._unreachable[node_id]
        self._set_node(node_id, NodeState.READY)

    def _cordon(self) -> None:
        ready = [n.id for n in self._snapshot().nodes if n.state is NodeState.READY]
        if ready:
            self._set_node(self._rng.choice(ready), NodeState.CORDONED)

    def _uncordon(self) -> None:
        cordoned = [n.id for n in self._snapshot().nodes if n.state is NodeState.CORDONED]
        if cordoned:
            self._set_node(self._rng.choice(cordoned), NodeState.READY)

    def _clock_jumps(self) -> None:
        self._skew_s = self._rng.randint(-7200, 7200)
        self._say(f"the clock is {self._skew_s} s off")

    def _unit_changes(self) -> None:
        """An administrator gives the devices of one node another unit."""
        snapshot = self._snapshot()
        chosen = self._rng.choice(snapshot.nodes)
        capacity = 1000 * self._rng.choice((1, 2, 5))
        other = replace(chosen, devices=tuple(replace(d, capacity_milli=capacity) for d in chosen.devices))
        self._store.set_nodes(
            [other if n.id == chosen.id else n for n in snapshot.nodes], now_s=self._now_s()
        )
        self._say(f"node {chosen.id} has {capacity} milli-fGPU per GPU")
        self._look()

    def _hub_restarts(self) -> None:
        """The Hub dies: what it was about to do is void. Waiting requests are resumed one by one, or never."""
        self._hub += 1
        self._restarts += 1
        self._creating.clear()
        self._store.hold_waiting(now_s=self._now_s())
        self._say("the Hub restarts")
        self._look()
        after_s = 0
        for session in self._store.held_sessions():
            after_s += self._rng.randrange(6)
            if self._chance(self._faults.never_resumed):
                self._later(900, 900, lambda i=session.id: self._abandon(i))  # type: ignore[misc]
            else:
                self._later(after_s, after_s, lambda i=session.id: self._resume(i))  # type: ignore[misc]

    def _abandon(self, session_id: int) -> None:
        if self._get(session_id).held:
            self._end(session_id, EndCause.QUEUE_TIMEOUT)

    def _resume(self, session_id: int) -> None:
        session = self._get(session_id)
        if session.state not in (S.PENDING, S.SCHEDULED, *lifecycle.LAUNCHING) or not session.held:
            return
        self._store.set_held(session_id, False, now_s=self._now_s())
        self._say(f"session {session_id} is resumed")
        self._look()
        if session.state is S.SCHEDULED:
            self._launch(session_id)
        elif session.state in lifecycle.LAUNCHING:
            anew = self._store.new_attempt(session_id, now_s=self._now_s())
            self._say(f"session {session_id} is at attempt {anew.attempt}")
            self._look()
            hub = self._hub
            self._elsewhere(1, 4, lambda: self._made_room(anew, hub))

    def _made_room(self, session: Session, hub: int) -> None:
        """What the last life of the Hub had launched goes before the next attempt comes."""
        answers = _node(session) not in self._unreachable
        for container in self._standing():
            if answers and container.session_id == session.id and container.attempt < session.attempt:
                self._drop(container.handle)
        if hub != self._hub:
            return
        if answers:
            self._later(0, 1, lambda: self._fetch(session))
        else:
            self._later(0, 1, lambda: self._fails(session, EndCause.NODE_LOST))

    # --- Reconciling ---

    def _observe(self) -> None:
        before = self._snapshot()
        launching = list(self._creating) if self._faults.tells_launches else []
        self._later(0, 3, lambda: self._engines_answer(before, launching))

    def _engines_answer(self, before: Snapshot, launching: Sequence[int]) -> None:
        reachable = [n.id for n in before.nodes if n.id not in self._unreachable]
        observed = [
            Observed(
                c.node_id,
                c.session_id,
                c.attempt,
                c.handle,
                c.alive,
                self._causes.get(c.handle, EndCause.EXITED),
            )
            for c in self._standing()
            if c.node_id in reachable
        ]
        self._rng.shuffle(observed)
        self._later(0, 3, lambda: self._heal(before, observed, reachable, launching))

    def _heal(
        self,
        before: Snapshot,
        observed: Sequence[Observed],
        reachable: Sequence[str],
        launching: Sequence[int],
    ) -> None:
        after = self._snapshot()
        healings = reconcile.reconcile(before, after, observed, reachable=reachable, launching=launching)
        for healing in healings:
            self._later(0, 2, lambda h=healing: self._apply(h))  # type: ignore[misc]

    def _apply(self, healing: Healing) -> None:
        self._say(f"heal {healing}")
        match healing:
            case Remove(thing, _) | Stop(_, thing):
                if not self._chance(self._faults.failed_stop):
                    self._elsewhere(0, 4, lambda: self._drop(thing.handle))
            case Ended(session_id, attempt, cause, message):
                self._move(
                    session_id, S.TERMINATING, (S.RUNNING,), attempt=attempt, cause=cause, message=message
                )
            case Finish(session_id):
                self._gone(session_id)


def _node(session: Session) -> str:
    assert session.placement is not None
    return session.placement.node_id


def simulate(
    seed: int,
    events: int,
    *,
    store: SessionStore | None = None,
    policy: Policy | None = None,
    faults: Faults | None = None,
) -> Report:
    """Run one simulation from its beginning to its rest.

    Raises:
        Violation: a check fired.
    """
    return Simulation(seed, store, policy=policy, faults=faults).run(events)
