"""The ground of a simulation: its chances, its clock, and a store that is looked at after every write."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fgpu_scheduler.core import admission
from fgpu_scheduler.core.model import EndCause, NodeState, Session, SessionState, Snapshot
from fgpu_scheduler.core.planner import Policy
from fgpu_scheduler.core.reclaim import AllRules
from fgpu_scheduler.errors import InvalidTransition
from fgpu_scheduler.store.sessions import SessionStore
from fgpu_scheduler.testing import drawn
from fgpu_scheduler.testing.checks import Checks, Standing, Violation
from fgpu_scheduler.testing.memory import MemoryStore

EPOCH_S = 1_800_000_000


@dataclass(frozen=True, slots=True)
class Faults:
    """How often something goes wrong: chances in percent, and weights among what happens outside."""

    late_pull: int = 10
    failed_pull: int = 12
    failed_create: int = 6
    late_create: int = 15
    failed_start: int = 6
    failed_stop: int = 10
    late_commit: int = 40
    never_resumed: int = 15
    outages: bool = True
    """Whether anything dies, is lost or jumps, and whether administrators change anything."""
    tells_launches: bool = True
    """Whether the Hub tells `reconcile` of the launches that are under way. False is a bug to be found."""


CALM = Faults(0, 0, 0, 0, 0, 0, 0, 0, outages=False)


@dataclass(order=True, slots=True)
class _Due:
    at_s: int
    number: int
    hub: int | None = field(compare=False)
    act: Callable[[], None] = field(compare=False)


class Lab:
    """What every part of a simulation stands on. ``hub`` counts the Hub's lives: what a dead one had planned is void."""

    def __init__(
        self,
        seed: int,
        store: SessionStore | None,
        *,
        policy: Policy | None,
        rules: AllRules | None,
        faults: Faults | None,
    ) -> None:
        self.seed = seed
        self.step = 0
        self.lines: list[str] = []
        self._rng = random.Random(seed)
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
        found = drawn.nodes(self._rng)
        # Most people ask for the same few amounts, so that there is an order to keep.
        fitting = admission.amounts_that_fit(found, self._caps)
        self._amounts = [self._rng.choice(fitting) for _ in range(3)]
        drawn_policy, drawn_rules = drawn.policy(self._rng), drawn.rules(self._rng)
        self._policy = policy or drawn_policy
        self._rules = rules or drawn_rules
        self._store.set_nodes(found, now_s=self._now_s())
        self._checks = Checks(self._snapshot(), self._policy, self._rules, steady_s=self._time_s)

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

    def _look(self, *, planned: bool = False) -> None:
        self._checks.look(
            self._snapshot(),
            self._standing(),
            self._store.session,
            steady_s=self._time_s,
            planned=planned,
        )

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


def node_of(session: Session) -> str:
    """Return the node of a session that has its shares."""
    assert session.placement is not None
    return session.placement.node_id
